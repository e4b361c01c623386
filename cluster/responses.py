"""Answers in OpenAI's format: one JSON object, or server-sent events of exactly `data: {json}` and two line feeds.

A stream sends one event a token, so all of an event's JSON but the text is made once per choice:

    data: {"id":...,"choices":[{"index":0,"delta":{"content":  "text"  },"logprobs":null,"finish_reason":null}]}
    ----------------------- _before[index] ------------------          -------------- _after -----------------
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cluster.generate import Piece, Usage
from cluster.logprobs import LogprobFormat
from cluster.openai_api import GenerateCall, Kind
from cluster.openai_errors import error_body
from replicas.contract import TokenLogprob
from replicas.errors import EngineError, TrieserveError
from replicas.tokenizer import Tokenizer

_CLEAN_ENDS = ("stop", "length")

# Line ends for Python's str.splitlines, with which some clients read streams, though not for JSON or server-sent events.
_UNICODE_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")

_to_json = msgspec.json.encode


def collect(
    call: GenerateCall, tokenizer: Tokenizer, response_id: str, created_s: int, pieces: Sequence[Piece], usage: Usage
) -> dict[str, Any]:
    """The whole answer in one object. Raises EngineError if a choice has no clean end."""
    by_choice: list[list[Piece]] = [[] for _ in range(_num_choices(call))]
    for piece in pieces:
        by_choice[piece.index].append(piece)
    is_chat = call.kind is Kind.CHAT
    choices = []
    for index, own in enumerate(by_choice):
        reason = own[-1].finish_reason if own else None
        if reason not in _CLEAN_ENDS:
            raise EngineError(f"choice {index} ended with {reason}")
        text = "".join(piece.text for piece in own)
        choice: dict[str, Any] = {"index": index}
        choice |= {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
        tokens = [token for piece in own for token in piece.logprobs]
        choice["logprobs"] = None if call.num_logprobs is None else _logprob_format(call, tokenizer).to_json(tokens)
        choices.append(choice | {"finish_reason": reason})
    name = "chat.completion" if is_chat else "text_completion"
    return _head(call, name, response_id, created_s) | {"choices": choices, "usage": usage_json(usage)}


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _num_choices(call: GenerateCall) -> int:
    return len(call.prompts) * call.n


def _head(call: GenerateCall, name: str, response_id: str, created_s: int) -> dict[str, Any]:
    return {"id": response_id, "object": name, "created": created_s, "model": call.model}


def _logprob_format(call: GenerateCall, tokenizer: Tokenizer) -> LogprobFormat:
    return LogprobFormat(call.kind, tokenizer, call.num_logprobs or 0)


class ChunkWriter:
    """The events of one streamed answer, as bytes; empty where there is nothing to send.

    For each choice `start`, then `piece`s, the last of them with a finish_reason. Then `end`; or at any point `error`. The
    caller writes [DONE] after either.
    """

    def __init__(self, call: GenerateCall, tokenizer: Tokenizer, response_id: str, created_s: int) -> None:
        self._is_chat = call.kind is Kind.CHAT
        self._include_usage = call.include_usage
        self._continuous_usage = call.continuous_usage
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._head = b"data: " + _to_json(_head(call, name, response_id, created_s)).removesuffix(b"}") + b',"choices":['
        choices = [self._head + b'{"index":%d,' % index for index in range(_num_choices(call))]
        self._before = [choice + (b'"delta":{"content":' if self._is_chat else b'"text":') for choice in choices]
        self._roles = [choice + b'"delta":{"role":"assistant","content":""' for choice in choices]
        self._ends = [choice + (b'"delta":{' if self._is_chat else b'"text":""') for choice in choices]
        self._close = b"}," if self._is_chat else b","
        # As OpenAI does, chunks say `usage: null` where usage was asked for and comes later.
        self._tail = b'],"usage":null}\n\n' if call.include_usage else b"]}\n\n"
        self._after = self._close + b'"logprobs":null,"finish_reason":null}' + self._tail
        self._is_plain = call.num_logprobs is None and not call.continuous_usage
        self._logprobs = [] if call.num_logprobs is None else [_logprob_format(call, tokenizer) for _ in choices]
        self._unsent: list[list[TokenLogprob]] = [[] for _ in choices]
        self._finished = [False] * len(choices)

    def start(self, index: int) -> bytes:
        """The first event of a choice: the role, which completions don't have."""
        return self._roles[index] + self._after if self._is_chat else b""

    def piece(self, piece: Piece, usage: Usage) -> bytes:
        """One event if there is text, one more if the choice ends. `usage` is that of the request so far.

        Log-probabilities wait for the next text: a token may have none of its own yet (part of a character, of a stop string).
        """
        index, text, reason = piece.index, piece.text, piece.finish_reason
        assert not self._finished[index], f"choice {index} goes on after its end"
        if self._is_plain and reason is None:
            return self._before[index] + _text_json(text) + self._after if text else b""
        if self._logprobs:
            self._unsent[index] += piece.logprobs
        event = b""
        if text:
            event = self._before[index] + _text_json(text) + self._rest(piece, None, usage)
        if reason is None:
            return event
        assert reason in _CLEAN_ENDS, f"{reason} is no clean end: use error()"
        self._finished[index] = True
        return event + self._ends[index] + self._rest(piece, reason, usage)

    def end(self, usage: Usage) -> bytes:
        """After all choices: the usage of the whole request, with no choices, if it was asked for."""
        assert all(self._finished), "a stream must not end cleanly before its choices do"
        return self._head + b'],"usage":' + _to_json(usage_json(usage)) + b"}\n\n" if self._include_usage else b""

    def error(self, error: TrieserveError) -> bytes:
        """An error after the headers went out; clients raise it."""
        return b"data: " + _to_json(error_body(error)) + b"\n\n"

    def _rest(self, piece: Piece, reason: str | None, usage: Usage) -> bytes:
        """All that follows the text."""
        logprobs, tail = b"null", self._tail
        if unsent := self._unsent[piece.index]:
            logprobs = _to_json(self._logprobs[piece.index].to_json(unsent))
            unsent.clear()
        if self._continuous_usage:
            so_far = Usage(usage.prompt_tokens, piece.num_tokens, usage.cached_tokens)
            tail = b'],"usage":' + _to_json(usage_json(so_far)) + b"}\n\n"
        return self._close + b'"logprobs":%b,"finish_reason":%b}' % (logprobs, _to_json(reason)) + tail


def _text_json(text: str) -> bytes:
    data = _to_json(text)
    if not text.isascii():
        for plain, escaped in _UNICODE_LINE_ENDS:
            data = data.replace(plain, escaped)
    return data
