"""From a checked request to pieces of text: dispatch each prompt's choices, retry before the first token, find stop strings.

A `Generation` is one HTTP request's answer as it comes into being. It is the one place that sees both tokens and text, which
is why stop strings end here, and why a stream could go on at another replica: all that was sent is known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from cluster.backend import Backend, DeltaStream, Dispatched
from cluster.metrics import IngressMetrics
from replicas.contract import Delta, FinishReason, GenerationRequest, TokenLogprob
from replicas.errors import ReplicaLostError, TrieserveError, rebuild
from replicas.tokenizer import Detokenizer

_MAX_ATTEMPTS = 2
_QUEUED_PIECES = 32


class Piece(msgspec.Struct, frozen=True):
    """New text of choice `index`. `num_tokens` counts all its tokens so far; the last piece has a `finish_reason`.

    One is made for every token: a frozen dataclass takes five times as long to make.
    """

    index: int
    text: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


Pieces = tuple[Piece, ...]
"""All that one delta brought: one piece a token, so that a client sees one event a token however they arrived."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a whole request, all its choices together; `cached_tokens` are those of the prompts not computed anew."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """The sequences of one prompt; `first_index` is the response index of the first."""

    requests: tuple[GenerationRequest, ...]
    first_index: int


class Generation:
    """Iterate `pieces()` once. `usage` and `dispatched` grow as it goes; `dispatched` is set before the first piece."""

    def __init__(
        self,
        groups: Sequence[PromptGroup],
        backend: Backend,
        metrics: IngressMetrics,
        make_detokenizer: Callable[[], Detokenizer],
        *,
        timeout_s: float,
    ) -> None:
        self._groups = tuple(groups)
        self._num_prompt_tokens = sum(len(group.requests[0].prompt_token_ids) for group in groups)
        self._backend = backend
        self._metrics = metrics
        self._make_detokenizer = make_detokenizer
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + timeout_s
        self._num_tokens: dict[int, int] = {}
        self._num_cached: dict[int, int] = {}
        self.dispatched: Dispatched | None = None

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(self._num_tokens.values()),
            cached_tokens=sum(self._num_cached.values()),
        )

    def pieces(self) -> AsyncGenerator[Pieces]:
        """Pieces of all choices, interleaved as they come. Raises TrieserveError; then nothing more follows."""
        return interleave([self._run_group(group) for group in self._groups])

    def _left_s(self) -> float:
        return max(0.0, self._deadline - self._loop.time())

    async def _run_group(self, group: PromptGroup) -> AsyncGenerator[Pieces]:
        """Until a first delta came nothing was sent to the client, so a lost replica costs it nothing but time."""
        excluded: frozenset[str] = frozenset()
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                async with self._backend.dispatch(group.requests, excluded=excluded, timeout_s=self._left_s()) as sent:
                    first = await self._first_delta(sent)
                    self._on_start(group, sent, first)
                    runs = [
                        self._run_choice(group.first_index + choice, stream, first if choice == 0 else None)
                        for choice, stream in enumerate(sent.streams)
                    ]
                    async with aclosing(interleave(runs)) as merged:
                        async for pieces in merged:
                            yield pieces
                    return
            except ReplicaLostError as error:
                self._metrics.on_replica_lost()
                if group.first_index in self._num_tokens or attempt == _MAX_ATTEMPTS:
                    raise
                self._metrics.on_retry()
                excluded |= {error.replica} if error.replica else frozenset()

    async def _first_delta(self, sent: Dispatched) -> Delta:
        delta = await sent.streams[0].next()
        _raise_if_failed(delta, sent.replica)
        return delta

    def _on_start(self, group: PromptGroup, sent: Dispatched, first: Delta) -> None:
        for choice in range(len(group.requests)):
            self._num_tokens[group.first_index + choice] = 0
        self.dispatched = self.dispatched or sent
        sent.on_first_token()
        num_cached = first.num_cached_tokens or 0
        self._num_cached[group.first_index] = num_cached
        if sent.decision is not None:
            self._metrics.on_decision(
                sent.decision.reason,
                num_prompt_tokens=len(group.requests[0].prompt_token_ids),
                num_matched_tokens=sent.decision.matched_tokens,
                decide_s=sent.decide_s or 0.0,
            )
            self._metrics.on_cached_tokens(num_predicted=sent.decision.matched_tokens, num_cached=num_cached)
        else:
            self._metrics.on_fallback("serve")

    async def _run_choice(self, index: int, stream: DeltaStream, first: Delta | None) -> AsyncGenerator[Pieces]:
        text = ChoiceText(index, self._make_detokenizer())
        delta = first if first is not None else await stream.next()
        while True:
            _raise_if_failed(delta, None)
            pieces = text.push(delta)
            self._num_tokens[index] = text.num_tokens
            yield pieces
            if text.finished:
                if delta.finish_reason is None:
                    stream.abort(FinishReason.STOP)
                return
            delta = await stream.next()


class ChoiceText:
    """One choice's tokens as text; cuts at stop strings. A stop token is counted but has no text."""

    def __init__(self, index: int, detokenizer: Detokenizer) -> None:
        self._index = index
        self._detokenizer = detokenizer
        self.num_tokens = 0
        self.finished = False

    def push(self, delta: Delta) -> Pieces:
        """A piece for each token of `delta` up to the end of the answer; at least one piece if the answer ends here."""
        pieces: list[Piece] = []
        logprobs = delta.logprobs or ()
        num_spoken = len(delta.token_ids) - (delta.stop_token_id is not None)
        for position, token_id in enumerate(delta.token_ids):
            text = self._detokenizer.push((token_id,)) if position < num_spoken else ""
            self.num_tokens += 1
            self.finished = self._detokenizer.stopped is not None
            reason = FinishReason.STOP if self.finished else None
            pieces.append(Piece(self._index, text, self.num_tokens, (token_id,), logprobs[position : position + 1], reason))
            if self.finished:
                return tuple(pieces)
        if delta.finish_reason is not None:
            self.finished = True
            rest = self._detokenizer.flush()
            reason = FinishReason.STOP if self._detokenizer.stopped is not None else delta.finish_reason
            pieces.append(Piece(self._index, rest, self.num_tokens, finish_reason=reason))
        return tuple(pieces)


def _raise_if_failed(delta: Delta, replica: str | None) -> None:
    """ABORT that we didn't ask for is a replica going away; a stream must never end cleanly for that."""
    if delta.error is not None:
        info = delta.error
        error: TrieserveError = rebuild(info.name, info.message, info.param, info.code, info.retry_after_s)
        raise error
    if delta.finish_reason is FinishReason.ABORT:
        raise ReplicaLostError("the replica stopped before the answer was complete", replica=replica)


async def interleave(runs: Sequence[AsyncGenerator[Pieces]]) -> AsyncGenerator[Pieces]:
    """What all runs yield, in order of arrival; the first error ends them all. One run is passed through as it is."""
    if len(runs) == 1:
        async with aclosing(runs[0]) as only:
            async for pieces in only:
                yield pieces
        return
    queue: asyncio.Queue[Pieces | BaseException | None] = asyncio.Queue(_QUEUED_PIECES)

    async def pump(run: AsyncGenerator[Pieces]) -> None:
        try:
            async with aclosing(run):
                async for pieces in run:
                    await queue.put(pieces)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(pump(run)) for run in runs]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def with_choices(request: GenerationRequest, n: int) -> tuple[GenerationRequest, ...]:
    """A prompt's `n` sequences: the same seed, told apart by `choice`."""
    return tuple(replace(request, request_id=f"{request.request_id}-{choice}", choice=choice) for choice in range(n))
