"""A client of OpenAI's streaming API that keeps what a benchmark needs: when each event came, and how the stream ended."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Answer:
    """One streamed answer, filled while it comes. Times are `time.perf_counter()` seconds.

    `event_times_s`: arrival of every event that brought text, a token's log-probability or the role. With log-probabilities
    asked for, a completion's events are its tokens.
    """

    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    event_times_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: Any = None  # an error's JSON, as a body or in the stream; or what the connection failed with
    done: bool = False  # [DONE] came

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.error is None and self.finish_reason is not None and self.done

    @property
    def ttft_s(self) -> float:
        return self.event_times_s[0] - self.sent_s

    @property
    def num_prompt_tokens(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def num_output_tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def num_cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    def require_complete(self) -> Self:
        """Raises RuntimeError if it isn't: a figure made of failed requests is none."""
        if not self.complete:
            raise RuntimeError(f"a request failed: status {self.status}, finish_reason {self.finish_reason}, {self.error}")
        return self


class Client:
    """Requests to one server. Greedy, and streamed with usage at the end."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def complete(
        self, prompt: str | list[int], *, max_tokens: int, answer: Answer | None = None, **fields: Any
    ) -> Answer:
        """/v1/completions; exactly `max_tokens` tokens. `answer`, if given, can be watched while it fills."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        return await self._stream("/v1/completions", body, answer or Answer())

    async def chat(
        self, messages: list[dict[str, str]], *, max_tokens: int, answer: Answer | None = None, **fields: Any
    ) -> Answer:
        """/v1/chat/completions; exactly `max_tokens` tokens. The first event is the role's, sent with the first token."""
        body = {"messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **fields}
        return await self._stream("/v1/chat/completions", body, answer or Answer())

    async def tokenize(self, text_or_messages: str | list[dict[str, str]]) -> list[int]:
        name = "prompt" if isinstance(text_or_messages, str) else "messages"
        reply = await self._http.post("/tokenize", json={"model": self._model, name: text_or_messages})
        reply.raise_for_status()
        token_ids: list[int] = reply.json()["tokens"]
        return token_ids

    async def _stream(self, path: str, body: dict[str, Any], answer: Answer) -> Answer:
        """Never raises for what the server does: how it ended is in the answer."""
        body = {"model": self._model, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, **body}
        answer.sent_s = time.perf_counter()
        try:
            async with self._http.stream("POST", path, json=body) as reply:
                answer.status = reply.status_code
                answer.headers = dict(reply.headers)
                if reply.status_code == 200:
                    async for line in reply.aiter_lines():
                        _take(answer, line, time.perf_counter())
                else:
                    answer.error = (await reply.aread()).decode(errors="replace")
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended_s = time.perf_counter()
        return answer


def _take(answer: Answer, line: str, now_s: float) -> None:
    if not line.startswith("data: "):
        return
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        answer.done = True
        return
    event = json.loads(data)
    if "error" in event:
        answer.error = event["error"]
        return
    answer.usage = event.get("usage") or answer.usage
    for choice in event["choices"]:
        # A role comes with empty content; the event that only says why the answer ended has none, or empty text.
        if choice.get("delta") or choice.get("text") or choice.get("logprobs"):
            answer.event_times_s.append(now_s)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
