"""An Engine whose every step is written by the test, and what tests of the token path share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from replicas.contract import (
    Delta,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    KVEvents,
    SamplingParams,
    StepOutput,
    StepSink,
)


def make_request(request_id: str, num_prompt_tokens: int = 3) -> GenerationRequest:
    return GenerationRequest(request_id, tuple(range(num_prompt_tokens)), SamplingParams(max_tokens=10_000), bytes(32))


def block(number: int) -> bytes:
    """A name for block `number`."""
    return number.to_bytes(32, "big")


async def until(condition: Callable[[], Any]) -> None:
    """Let the event loop run until `condition` holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ScriptedEngine:
    """`emit`, `store`, `remove` and `clear` say what the next `step` hands to the sink, in the caller's thread."""

    def __init__(self, **info: Any) -> None:
        """`info` are fields of EngineInfo that are to differ."""
        self.info = replace(EngineInfo("scripted", "", 1000, 10_000, 16, 100, (0,), 512, 64), **info)
        self.submitted: dict[str, GenerationRequest] = {}
        self.aborted: dict[str, FinishReason] = {}
        self.refusal: Exception | None = None
        self.failed: str | None = None
        self.silent_s = 0.0
        self._sink: StepSink = lambda output: None
        self._deltas: list[Delta] = []
        self._sequence = 0
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []
        self._cleared = False
        self._num_steps = 0

    def start(self, sink: StepSink) -> None:
        self._sink = sink

    def submit(self, request: GenerationRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted[request.request_id] = request

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        assert request_id not in self.aborted, f"{request_id} was aborted twice"
        self.aborted[request_id] = reason
        self.emit(request_id, finish=reason)

    def stats(self) -> EngineStats:
        return EngineStats(num_blocks_total=100, steps_total=self._num_steps)

    def heartbeat_age_s(self) -> float:
        return self.silent_s

    def failure(self) -> str | None:
        return self.failed

    def clear_cache(self) -> None:
        self._cleared = True

    def shutdown(self) -> None:
        pass

    def emit(self, request_id: str, *token_ids: int, finish: FinishReason | None = None, **fields: Any) -> None:
        self._deltas.append(Delta(request_id, token_ids, finish, **fields))

    def store(self, *names: bytes) -> None:
        self._stored += names

    def remove(self, *names: bytes) -> None:
        self._removed += names

    def step(self, num_running: int = 0) -> None:
        self._num_steps += 1
        events = None
        if self._stored or self._removed or self._cleared:
            self._sequence += 1
            events = KVEvents(self._sequence, tuple(self._stored), tuple(self._removed), self._cleared)
        stats = EngineStats(num_running=num_running, num_blocks_total=100, steps_total=self._num_steps)
        output = StepOutput(tuple(self._deltas), events, stats)
        self._deltas, self._stored, self._removed, self._cleared = [], [], [], False
        self._sink(output)

    def tokens(self, request_id: str, *token_ids: int, finish: FinishReason | None = None) -> None:
        """A step of one sequence alone."""
        self.emit(request_id, *token_ids, finish=finish)
        self.step(num_running=1)
