"""Answers in OpenAI's format: one JSON object, or server-sent events of exactly `data: {json}` and two line feeds.

A stream sends one event a token, so all of an event's JSON but the text is made once per choice:

    data: {"id":...,"choices":[{"index":0,"delta":{"content":  "text"  },"logprobs":null,"finish_reason":null}]}
    ----------------------- _before[index] ------------------          -------------- _after -----------------
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from cluster.openai_api import Kind, error_body
from replicas.contract import TokenLogprob
from replicas.errors import TrieserveError
from replicas.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_to_json = msgspec.json.encode

# Line ends for Python's str.splitlines, with which some clients read streams, though not for JSON or server-sent events.
_UNICODE_LINE_ENDS = tuple((end.encode(), b"\\u%04x" % ord(end)) for end in "\x85\u2028\u2029")

# JSON has no -inf; this is OpenAI's value for "very unlikely".
_LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of a whole request, all its choices together. `cached_tokens` are those of the prompts that were not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """A finished choice. `logprobs` is what `Logprobs.to_json` made of its tokens."""

    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None = None


def chat_completion(
    *, response_id: str, model: str, created_s: int, choices: Sequence[Choice], usage: TokenUsage
) -> dict[str, Any]:
    """The body of a chat completion that is not streamed."""
    entries = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
        for choice in choices
    ]
    return _answer("chat.completion", response_id, model, created_s, entries) | {"usage": usage.to_json()}


def completion(*, response_id: str, model: str, created_s: int, choices: Sequence[Choice], usage: TokenUsage) -> dict[str, Any]:
    """The body of a completion that is not streamed."""
    entries = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
        }
        for choice in choices
    ]
    return _answer("text_completion", response_id, model, created_s, entries) | {"usage": usage.to_json()}


def _answer(kind: str, response_id: str, model: str, created_s: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": response_id, "object": kind, "created": created_s, "model": model, "choices": choices}


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of one choice, in the order of its tokens, in the format of chats or of completions.

    `num_top` alternatives are shown. Completions also carry each token's offset into the text, counted here.
    """

    kind: Kind
    tokenizer: Tokenizer
    num_top: int
    _num_characters: int = field(default=0, init=False)

    def to_json(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The `logprobs` object of the choice's next tokens."""
        if self.kind is Kind.CHAT:
            return {"content": [self._chat_entry(token) for token in tokens], "refusal": None}
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens] if self.num_top else None,
            "text_offset": [self._offset(token.token_id) for token in tokens],
        }

    def _chat_entry(self, token: TokenLogprob) -> dict[str, Any]:
        top = [self._described(token_id, logprob) for token_id, logprob in token.top[: self.num_top]]
        return {**self._described(token.token_id, token.logprob), "top_logprobs": top}

    def _described(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}

    def _alternatives(self, token: TokenLogprob) -> dict[str, float]:
        """The chosen token is always among them. Of tokens with one name (parts of characters) the likeliest keeps it."""
        named: dict[str, float] = {}
        for token_id, logprob in (*token.top[: self.num_top], (token.token_id, token.logprob)):
            named.setdefault(self._name(token_id), _finite(logprob))
        return named

    def _name(self, token_id: int) -> str:
        return self.tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _offset(self, token_id: int) -> int:
        """Where in the text the token's first byte lies; that may be inside the character that the last token began."""
        if self.tokenizer.is_special(token_id):
            return self._num_characters
        data = self.tokenizer.token_bytes(token_id)
        inside = bool(data) and _continues(data[0])
        offset = max(0, self._num_characters - inside)
        self._num_characters += sum(not _continues(byte) for byte in data)
        return offset


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 belongs to the character before it."""
    return byte & 0xC0 == 0x80


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


class ChunkWriter:
    """The events of one streamed answer, as bytes; empty where there is nothing to send.

    For each choice: role, content..., finish, exactly one. Then usage if it was asked for, then DONE. Or at any point error,
    then DONE.
    """

    def __init__(
        self,
        kind: Kind,
        *,
        response_id: str,
        model: str,
        created_s: int,
        num_choices: int,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        """`include_usage`: `usage` will say something. `continuous_usage`: so does every other chunk."""
        self._is_chat = kind is Kind.CHAT
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._head = b"data: " + _to_json(_answer(name, response_id, model, created_s, [])).removesuffix(b"]}")
        choices = [self._head + b'{"index":%d,' % index for index in range(num_choices)]
        self._before = [choice + (b'"delta":{"content":' if self._is_chat else b'"text":') for choice in choices]
        self._roles = [choice + b'"delta":{"role":"assistant","content":""' for choice in choices]
        self._ends = [choice + (b'"delta":{' if self._is_chat else b'"text":""') for choice in choices]
        self._close = b"}," if self._is_chat else b","
        # As OpenAI does, chunks say `usage: null` where usage was asked for and comes last.
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._after = self._close + b'"logprobs":null,"finish_reason":null}' + self._tail
        self._finished = [False] * num_choices

    def role(self, index: int) -> bytes:
        """The first event of a choice; completions don't have it."""
        return self._roles[index] + self._after if self._is_chat else b""

    def content(
        self, index: int, text: str, *, logprobs: dict[str, Any] | None = None, usage: TokenUsage | None = None
    ) -> bytes:
        """New text of a choice, or log-probabilities of a token that has no text yet. `usage`: so far."""
        assert not self._finished[index], f"choice {index} goes on after its end"
        if not text and logprobs is None:
            return b""
        data = _to_json(text)
        if not text.isascii():
            for plain, escaped in _UNICODE_LINE_ENDS:
                data = data.replace(plain, escaped)
        if logprobs is None and not self._continuous_usage:
            return self._before[index] + data + self._after
        return self._before[index] + data + self._rest(logprobs, None, usage)

    def finish(
        self, index: int, reason: str, *, logprobs: dict[str, Any] | None = None, usage: TokenUsage | None = None
    ) -> bytes:
        """The last event of a choice."""
        assert not self._finished[index], f"choice {index} ends twice"
        assert reason in ("stop", "length"), f"{reason} is no clean end: use error()"
        self._finished[index] = True
        return self._ends[index] + self._rest(logprobs, reason, usage)

    def usage(self, usage: TokenUsage) -> bytes:
        """After all choices: the usage of the whole request, with no choices, if it was asked for."""
        assert all(self._finished), "a stream must not end cleanly before its choices do"
        return self._head + b'],"usage":' + _to_json(usage.to_json()) + b"}\n\n" if self._include_usage else b""

    def error(self, error: TrieserveError) -> bytes:
        """An error after the headers went out; clients raise it."""
        return b"data: " + _to_json(error_body(error)) + b"\n\n"

    def _rest(self, logprobs: dict[str, Any] | None, reason: str | None, usage: TokenUsage | None) -> bytes:
        """All that follows the text."""
        tail = self._tail
        if self._continuous_usage and usage is not None:
            tail = b'],"usage":' + _to_json(usage.to_json()) + b"}\n\n"
        return self._close + b'"logprobs":%b,"finish_reason":%b}' % (_to_json(logprobs), _to_json(reason)) + tail
