"""An engine that runs on its own thread, and everything that it hands out, for the conformance suite (suite.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from replicas.blocks import chain_root, hash_blocks
from replicas.contract import (
    Delta,
    Engine,
    EngineStats,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    StepOutput,
    TokenLogprob,
)

ROOT = chain_root(b"of the conformance suite")
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Abilities:
    """What an engine can do beyond the contract's minimum; of what it can't, the suite asks that it is refused or absent."""

    grammars: bool = False
    continues_penalized: bool = True  # answers begun elsewhere under penalties
    max_penalty: float = 100.0  # presence and frequency
    seeds: bool = True
    exact_in_batch: bool = True  # greedy tokens don't depend on what else is in the batch


@dataclass
class Answer:
    """A request's deltas put together."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [each for delta in self.deltas for each in delta.logprobs or ()]

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason if self.deltas else None

    @property
    def num_cached_tokens(self) -> int | None:
        return next((delta.num_cached_tokens for delta in self.deltas if delta.num_cached_tokens is not None), None)


class Rig:
    """`answers`, `held` (names that the events say are cached) and `faults` (what a sink call showed to be wrong) grow while
    the engine runs; `engine` is started here and shut down by whoever made it."""

    def __init__(self, engine: Engine, abilities: Abilities) -> None:
        self.engine = engine
        self.abilities = abilities
        self.answers: dict[str, Answer] = {}
        self.held: set[bytes] = set()
        self.faults: list[str] = []
        self.sink_error: Exception | None = None
        self._changed = threading.Condition()
        self._event_number = 0
        self._ids = count()
        self._stats = engine.stats()
        engine.start(self._take)

    def request(
        self, prompt: Iterable[int], max_tokens: int = 4, *, root: bytes = ROOT, choice: int = 0, **sampling: Any
    ) -> GenerationRequest:
        """Greedy and endless but for `max_tokens`, unless `sampling` says otherwise; drawn by a seed if it has one."""
        params = SamplingParams(
            max_tokens, **{"temperature": 0.0, "ignore_eos": True, "is_seeded": "seed" in sampling, **sampling}
        )
        return GenerationRequest(f"r{next(self._ids)}", tuple(prompt), params, root, choice=choice)

    def serve(self, *requests: GenerationRequest) -> list[Answer]:
        """The answers to requests that arrive at once, when all have ended."""
        for request in requests:
            self.submit(request)
        return [self.ended(request) for request in requests]

    def submit(self, request: GenerationRequest) -> None:
        with self._changed:
            self.answers[request.request_id] = Answer()
        self.engine.submit(request)

    def ended(self, request: GenerationRequest) -> Answer:
        answer = self.answers[request.request_id]
        self.until(lambda: answer.finish_reason is not None, f"{request.request_id} does not end")
        return answer

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for something that the engine's outputs bring about."""
        with self._changed:
            assert self._changed.wait_for(condition, _TIMEOUT_S), what

    def until_idle(self) -> EngineStats:
        """The last word of an engine that has nothing to do: its blocks are free again."""
        self.until(lambda: _is_idle(self._stats), f"the engine does not come to rest: {self._stats}")
        return self._stats

    def until_held(self, request: GenerationRequest, num_blocks: int | None = None) -> None:
        """KV events may come a little later than tokens."""
        names = self.names(request)[:num_blocks]
        self.until(lambda: self.held.issuperset(names), "the prompt's blocks don't get into the cache")

    def names(self, request: GenerationRequest) -> tuple[bytes, ...]:
        return hash_blocks(request.hash_root, request.prompt_token_ids, self.engine.info.block_size)

    def predicted_cached_tokens(self, request: GenerationRequest) -> int:
        """By the events: whole blocks, and at least one token is computed, whose logits give the first of the answer."""
        info, num_held = self.engine.info, 0
        size = info.block_size
        for name in self.names(request):
            if name not in self.held:
                break
            num_held += 1
        num_usable = min(num_held, (len(request.prompt_token_ids) - 1) // size) - info.num_recomputed_blocks
        return max(num_usable, 0) * size

    def _take(self, output: StepOutput) -> None:
        with self._changed:
            for delta in output.deltas:
                self._take_delta(delta)
            events = output.kv_events
            if events is not None:
                if events.sequence != self._event_number + 1:
                    self.faults.append(f"events {events.sequence} follow {self._event_number}")
                self._event_number = events.sequence
                if events.cleared:
                    self.held.clear()
                self.held.difference_update(events.removed)
                self.held.update(events.stored)
            self._check(output.stats)
            self._stats = output.stats
            self._changed.notify_all()
        if self.sink_error is not None:
            raise self.sink_error

    def _take_delta(self, delta: Delta) -> None:
        answer = self.answers.setdefault(delta.request_id, Answer())
        if answer.finish_reason is not None:
            self.faults.append(f"{delta.request_id} goes on after its end")
        if answer.deltas and (delta.num_cached_tokens, delta.queue_s) != (None, None):
            self.faults.append(f"{delta.request_id} tells twice what was cached or how long it queued")
        answer.deltas.append(delta)

    def _check(self, stats: EngineStats) -> None:
        finished = sum(stats.finished_total.values())
        if stats.started_total != finished + stats.num_running + stats.num_waiting:
            self.faults.append(f"requests don't add up: {stats}")
        if stats.num_blocks_free + stats.num_blocks_cached + stats.num_blocks_used != stats.num_blocks_total:
            self.faults.append(f"blocks don't add up: {stats}")
        numbers = [value for value in (getattr(stats, name) for name in _NUMBERS) if value < 0]
        if numbers:
            self.faults.append(f"a number below 0: {stats}")


_NUMBERS = [name for name in EngineStats.__slots__ if name.startswith("num_") or name.endswith("_total")]
_NUMBERS = [name for name in _NUMBERS if name not in ("finished_total", "accepted_per_position_total")]


def _is_idle(stats: EngineStats) -> bool:
    return (stats.num_running, stats.num_waiting, stats.num_blocks_used, stats.num_pending_tokens) == (0, 0, 0, 0)


def resumed(original: GenerationRequest, token_ids: list[int], num_done: int) -> GenerationRequest:
    """What is sent elsewhere when an answer's replica is lost after `num_done` of its tokens."""
    return replace(
        original,
        request_id=f"{original.request_id}-resumed",
        prompt_token_ids=(*original.prompt_token_ids, *token_ids[:num_done]),
        block_hashes=(),
        sampling=replace(original.sampling, max_tokens=original.sampling.max_tokens - num_done),
        num_prior_output_tokens=num_done,
    )
