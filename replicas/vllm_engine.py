"""vLLM's AsyncLLM behind our Engine.

    submit, abort, clear_cache          any thread
        -> a task for each request, on the event loop of the engine's thread
            -> AsyncLLM.generate (vllm_support.llm) ... its core, in a process of its own
        <- deltas of a step together            -> sink(StepOutput(deltas, None, stats))
        <- KV events, over a socket of theirs   -> sink(StepOutput((), events, stats))

A block of the prefix cache has two names: vLLM hashes it in its own way, and its events tell parents and tokens, from which
our name follows. Each request's `cache_salt` for vLLM is the root of our chain, so tenants, adapters and revisions are apart
in vLLM's cache as they are in the router's index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from replicas.admission import admit
from replicas.contract import (
    Delta,
    EngineInfo,
    EngineStats,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    KVEvents,
    StepOutput,
    StepSink,
)
from replicas.engine.validate import validate
from replicas.errors import ReplicaLostError
from replicas.step_time import StepTimeModel
from replicas.vllm_support.kv_events import KvEventTranslator
from replicas.vllm_support.loop_thread import LoopThread
from replicas.vllm_support.outputs import error_info, step_report, to_delta
from replicas.vllm_support.protocols import Feed, Llm, OnStats
from replicas.vllm_support.sampling import sampling_arguments
from replicas.vllm_support.telemetry import Telemetry

logger = logging.getLogger(__name__)

_WATCH_PERIOD_S = 0.25
_PING_PERIOD_S = 1.0
_STOP_TIMEOUT_S = 30.0

_DEATH = "vLLM's core process has ended"
_LOST = ErrorInfo(ReplicaLostError.__name__, "the replica's engine died", None, ReplicaLostError.code)


@dataclass(slots=True, eq=False)
class _Request:
    """A request between `submit` and its last delta. `ended_by` is why it was aborted."""

    request: GenerationRequest
    sampling: Mapping[str, Any]
    task: asyncio.Task[None] | None = None
    ended_by: FinishReason | None = None
    has_output: bool = False


class VllmEngine:
    """contract.Engine over an Llm, which lives on the event loop of a thread of this engine's own."""

    def __init__(
        self,
        start_llm: Callable[[OnStats], Llm],
        make_feed: Callable[[], Feed] | None,
        info: EngineInfo,
        *,
        max_queued_requests: int,
        can_seed: bool = True,
        clean_up: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start_llm` is called on the loop, and what it raises is raised here; `make_feed` where there are KV events.

        `info` is what the configuration says of the engine; vLLM may correct its lengths and numbers. For `can_seed` see
        vllm_support.sampling. `clean_up` is called when vLLM has ended, or hasn't started.
        """
        self._clock = clock
        self._max_queued_requests = max_queued_requests
        self._can_seed = can_seed
        self._clean_up = clean_up
        self._sink: StepSink = _drop
        self._sink_errors: set[type[Exception]] = set()  # kinds already logged
        self._requests: dict[str, _Request] = {}  # the loop's
        self._deltas: list[Delta] = []
        self._flushing = False
        self._clearing: asyncio.Task[None] | None = None

        # Shared between threads, guarded by _lock:
        self._lock = threading.Lock()
        self._unfinished: set[str] = set()
        self._stopping = False
        self._failure: str | None = None
        self._progress_s = clock()
        self._ping_sent_s: float | None = None

        self._thread = LoopThread("vllm-engine")
        self._loop = self._thread.loop
        try:
            self._llm = self._thread.call(start_llm, self._on_stats)
        except BaseException:
            self._thread.stop()
            clean_up()
            raise
        self._info = self._llm.actual(info)
        self._translator = KvEventTranslator(self._info.block_size)
        self._telemetry = Telemetry(self._info.num_blocks, StepTimeModel())
        self._stats = self._telemetry.stats(0)
        self._tasks = [self._thread.call(self._loop.create_task, self._watch())]
        if make_feed is not None:
            feed = self._thread.call(make_feed)
            self._tasks.append(self._thread.call(self._loop.create_task, feed.run(self._on_events, self._on_lost)))

    @property
    def info(self) -> EngineInfo:
        return self._info

    def core_pids(self) -> tuple[int, ...]:
        """Of vLLM's core processes, whose end is the engine's."""
        return self._llm.core_pids()

    def warm_up(self, requests: Sequence[GenerationRequest]) -> None:
        """Serve `requests` for nobody, one after the other, and forget them. Before `start`.

        vLLM's first steps take seconds longer than all others, since kernels are compiled in them.
        """
        for request in requests:
            self._thread.run(self._drain_one(request))
        self._thread.run(self._clear())  # to measure prompts, not looks into the cache
        model = StepTimeModel()
        self._telemetry.step_time = model
        for request in requests:
            self._thread.run(self._drain_one(request))
        self._thread.run(self._reset_for_start(model))

    def start(self, sink: StepSink) -> None:
        self._sink = sink

    def submit(self, request: GenerationRequest) -> None:
        request = validate(request, self._info)
        sampling = sampling_arguments(request, self._info.eos_token_ids, can_seed=self._can_seed)
        with self._lock:
            if self._failure is not None:
                raise ReplicaLostError("this replica's engine has died and is about to be replaced")
            admit(
                request.request_id,
                self._unfinished,
                self._stats,
                max_queued_requests=self._max_queued_requests,
                max_num_batched_tokens=self._info.max_num_batched_tokens,
                is_stopping=self._stopping,
            )
            if not self._unfinished:
                self._progress_s = self._clock()
            self._unfinished.add(request.request_id)
            self._thread.call_soon(self._begin, _Request(request, sampling))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        with self._lock:
            if request_id in self._unfinished and not self._stopping:
                self._thread.call_soon(self._cancel, request_id, reason)

    def clear_cache(self) -> None:
        with self._lock:
            if not self._stopping and self._failure is None:
                self._thread.call_soon(self._ask_to_clear)

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def heartbeat_age_s(self) -> float:
        """Of a busy engine the time since its last step; of an idle one how long its core owes an answer to a ping."""
        with self._lock:
            if self._unfinished or self._failure is not None:
                return self._clock() - self._progress_s
            return 0.0 if self._ping_sent_s is None else max(0.0, self._clock() - self._ping_sent_s - _PING_PERIOD_S)

    def failure(self) -> str | None:
        return self._failure

    def shutdown(self) -> None:
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        self._thread.run_for(self._end_all(), _STOP_TIMEOUT_S)
        self._thread.stop()
        self._clean_up()

    # ---- on the loop: requests ----

    def _begin(self, entry: _Request) -> None:
        request = entry.request
        num_cached = self._translator.num_leading(request.block_hashes) * self._info.block_size
        self._requests[request.request_id] = entry
        self._telemetry.on_submit(request.request_id, len(request.prompt_token_ids), num_cached)
        if self._failure is not None:
            self._finish(entry, FinishReason.ERROR, _LOST)
            return
        entry.task = self._loop.create_task(self._generate(entry))
        entry.task.add_done_callback(partial(self._on_done, entry))

    async def _generate(self, entry: _Request) -> None:
        request = entry.request
        async for output in self._llm.generate(request, entry.sampling):
            delta = to_delta(output, request, self._info.eos_token_ids, is_first=not entry.has_output)
            entry.has_output = True
            if delta.token_ids:
                self._telemetry.on_tokens(request.request_id, len(delta.token_ids))
            if delta.finish_reason is not None:
                self._forget(entry, delta.finish_reason)
            self._hand_out(delta)

    def _on_done(self, entry: _Request, task: asyncio.Task[None]) -> None:
        """However a request's task ended, the request has one last delta."""
        error = None if task.cancelled() else task.exception()
        if self._requests.get(entry.request.request_id) is not entry:  # ended, and perhaps followed by one with the same id
            return
        if error is not None:
            info = error_info(error, entry.request)
            self._finish(entry, FinishReason.ERROR, info)
            if info.name == ReplicaLostError.__name__:
                self._fail(_DEATH)
        else:
            self._finish(entry, entry.ended_by or FinishReason.ABORT)

    def _cancel(self, request_id: str, reason: FinishReason) -> None:
        entry = self._requests.get(request_id)
        if entry is not None and entry.task is not None and entry.ended_by is None:
            entry.ended_by = reason
            entry.task.cancel()

    def _finish(self, entry: _Request, reason: FinishReason, error: ErrorInfo | None = None) -> None:
        self._forget(entry, reason)
        self._hand_out(Delta(entry.request.request_id, finish_reason=reason, error=error))

    def _forget(self, entry: _Request, reason: FinishReason) -> None:
        request_id = entry.request.request_id
        del self._requests[request_id]
        self._telemetry.on_finish(request_id, reason)
        with self._lock:
            self._unfinished.discard(request_id)

    # ---- on the loop: what goes out ----

    def _hand_out(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """After the tasks that the same step of vLLM woke: their deltas leave together."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        deltas = tuple(self._deltas)
        self._deltas.clear()
        self._emit(deltas, None)

    def _emit(self, deltas: tuple[Delta, ...], events: KVEvents | None) -> None:
        self._stats = self._telemetry.stats(self._translator.num_blocks)
        try:
            self._sink(StepOutput(deltas, events, self._stats))
        except Exception as error:
            if type(error) not in self._sink_errors:
                self._sink_errors.add(type(error))
                logger.exception("the sink of step outputs failed; further failures of this kind are not logged")

    def _on_stats(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """After each step of vLLM, before the tasks of its requests run."""
        report = step_report(scheduler_stats, iteration_stats)
        if report is None:
            return
        self._telemetry.on_step(report)
        with self._lock:
            self._progress_s = self._clock()
        self._flush_soon()

    # ---- on the loop: the prefix cache ----

    def _on_events(self, events: Sequence[Any]) -> None:
        self._tell(self._translator.apply(events))

    def _tell(self, changes: KVEvents | None) -> None:
        if changes is not None:
            self._emit((), changes)

    def _on_lost(self) -> None:
        """vLLM published more than it keeps, and can't tell what it holds: an empty cache is one that both know."""
        logger.error("KV events of vLLM were lost; its prefix cache is emptied, so that the router knows it again")
        self._tell(self._translator.clear())
        self._ask_to_clear()

    def _ask_to_clear(self) -> None:
        if self._clearing is None or self._clearing.done():
            self._clearing = self._loop.create_task(self._clear())

    async def _clear(self) -> None:
        """vLLM empties its cache only while nothing runs: asked again until then."""
        self._translator.ask_clear()
        while not await self._llm.clear_cache():
            await asyncio.sleep(_WATCH_PERIOD_S)
            self._translator.ask_clear()
        self._tell(self._translator.expect_clear())

    # ---- on the loop: life and death ----

    async def _drain_one(self, request: GenerationRequest) -> None:
        """Raises what serving it raises."""
        ended = self._loop.create_future()
        self._sink = partial(_until_end, ended)
        self.submit(request)
        error = await ended
        if error is not None:
            raise RuntimeError(f"vLLM fails on a first request: {error.message}")

    async def _reset_for_start(self, model: StepTimeModel) -> None:
        await self._clear()
        self._translator.renumber()
        self._sink = _drop
        self._telemetry = Telemetry(self._info.num_blocks, model)
        self._stats = self._telemetry.stats(0)

    async def _watch(self) -> None:
        ping: asyncio.Task[None] | None = None
        try:
            while self._failure is None:
                await asyncio.sleep(_WATCH_PERIOD_S)
                if self._llm.is_dead:
                    self._fail(_DEATH)
                elif ping is None or ping.done():
                    ping = self._loop.create_task(self._ping())
        finally:
            if ping is not None:
                ping.cancel()

    async def _ping(self) -> None:
        with self._lock:
            self._ping_sent_s = self._clock()
        with contextlib.suppress(Exception):  # `_watch` sees what it means
            await self._llm.ping()
            await asyncio.sleep(_PING_PERIOD_S)
        with self._lock:
            self._ping_sent_s = None

    def _fail(self, reason: str) -> None:
        if self._failure is not None:
            return
        logger.error("%s: every request ends, and this replica with them", reason)
        with self._lock:
            self._failure = reason
        for entry in list(self._requests.values()):
            self._finish(entry, FinishReason.ERROR, _LOST)
            if entry.task is not None:
                entry.task.cancel()

    async def _end_all(self) -> None:
        tasks = [entry.task for entry in self._requests.values() if entry.task is not None]
        for request_id in list(self._requests):
            self._cancel(request_id, FinishReason.ABORT)
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.sleep(0)  # their last deltas leave
        background = [task for task in (*self._tasks, self._clearing) if task is not None]
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        self._llm.shutdown()


def _until_end(ended: asyncio.Future[ErrorInfo | None], output: StepOutput) -> None:
    for delta in output.deltas:
        if delta.finish_reason is not None and not ended.done():
            ended.set_result(delta.error)


def _drop(output: StepOutput) -> None:
    """The sink until `start` names one."""
