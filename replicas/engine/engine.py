"""The native engine: a thread that asks the scheduler what to compute, has the runner compute it, and hands out the results.

    submit, abort, clear_cache         any thread; checked here, then queued as calls
        -> inbox -> scheduler.plan -> runner.run -> scheduler.apply         the engine's thread
        -> sink(StepOutput)                                                 a thread of its own, while the next step is computed

No torch here: the runner brings it. `step_once` is the whole of a step, for the thread and for tests without one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Protocol

from configs.schema import AppConfig
from replicas.admission import admit
from replicas.blocks import BLOCK_SIZE
from replicas.contract import (
    Delta,
    EngineInfo,
    EngineStats,
    ErrorInfo,
    FinishReason,
    GenerationRequest,
    StepOutput,
    StepSink,
)
from replicas.engine.compute_thread import ComputeThread
from replicas.engine.scheduler import Scheduler, SchedulerConfig
from replicas.engine.speculate.drafter import Drafter, make_drafter
from replicas.engine.step import ChunkResult, StepPlan, StepResult
from replicas.engine.validate import validate
from replicas.engine.warm_up import num_rounds, warm_up_plans
from replicas.errors import EngineError
from replicas.step_time import StepTimeModel

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 30.0  # a step that takes longer hangs, and nobody should hang with it
_NOTHING = StepResult(chunks=(), duration_s=0.0)


class Runner(Protocol):
    """Computes steps on a device. Called from one thread at a time."""

    def run(self, plan: StepPlan) -> StepResult:
        """One ChunkResult per chunk, in order. What it raises ends only the requests that raise it alone, too."""


class NativeEngine:
    """contract.Engine over a Runner. `max_queued_requests` bounds those that don't run yet; beyond it `submit` refuses."""

    def __init__(
        self,
        runner: Runner,
        info: EngineInfo,
        step_time: StepTimeModel,
        *,
        max_queued_requests: int = 512,
        chunked_prefill: bool = True,
        prefix_caching: bool = True,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
        thread: ComputeThread | None = None,
    ) -> None:
        """`thread` is the one that loaded what `runner` computes with; without one, `start` makes its own."""
        assert info.block_size == BLOCK_SIZE, info.block_size
        self._info = info
        self._runner = runner
        self._step_time = step_time
        self._clock = clock
        self._max_queued_requests = max_queued_requests
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=info.num_blocks,
                max_num_seqs=info.max_num_seqs,
                max_num_batched_tokens=info.max_num_batched_tokens,
                max_model_len=info.max_model_len,
                eos_token_ids=info.eos_token_ids,
                chunked_prefill=chunked_prefill,
                prefix_caching=prefix_caching,
            ),
            drafter,
        )
        self._thread = thread
        self._output_thread: ComputeThread | None = None  # since `start`
        self._stepping: Future[None] | None = None  # since `start`, until the loop has ended
        self._sink: StepSink = _drop
        self._sink_errors: set[type[Exception]] = set()  # kinds already logged

        # Shared between threads, guarded by _wake's lock:
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._unfinished: set[str] = set()  # submitted, and the last Delta isn't out
        self._stopping = False
        self._failed = False
        self._progress_s = clock()
        self._stats = self._snapshot()

    @classmethod
    def from_runner(
        cls, config: AppConfig, runner: Runner, info: EngineInfo, thread: ComputeThread | None = None
    ) -> NativeEngine:
        """The engine that `config.engine` describes; `info` is what the loaded model and its KV cache turned out to be."""
        step_time = StepTimeModel()
        return cls(
            runner,
            info,
            step_time,
            drafter=make_drafter(config.engine.speculation, step_time),
            max_queued_requests=config.engine.max_queued_requests,
            chunked_prefill=config.engine.chunked_prefill,
            prefix_caching=config.engine.prefix_caching,
            thread=thread,
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def warm_up(self) -> None:
        """Compute a few steps for nobody (see warm_up.py), a second or so. Before `start`, on the thread that will step."""
        for plan in warm_up_plans(self._info):
            started = time.perf_counter()
            self._runner.run(plan)  # the first of its kind says nothing about those that follow
            for _ in range(num_rounds(time.perf_counter() - started)):
                self._run(plan)
        self._stats = self._snapshot()

    def start(self, sink: StepSink) -> None:
        self._sink = sink
        self._thread = self._thread or ComputeThread()
        self._output_thread = ComputeThread("engine-output")
        self._stepping = self._thread.submit(self._loop)

    def submit(self, request: GenerationRequest) -> None:
        request = validate(request, self._info)
        with self._wake:
            now = self._clock()
            if self._failed:
                raise EngineError("the engine has failed and is about to be replaced")
            admit(
                request.request_id,
                self._unfinished,
                self._stats,
                max_queued_requests=self._max_queued_requests,
                max_num_batched_tokens=self._info.max_num_batched_tokens,
                is_stopping=self._stopping,
            )
            if not self._unfinished:
                self._progress_s = now  # it was idle until now
            self._unfinished.add(request.request_id)
            self._post(partial(self._scheduler.add, request, now))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        with self._wake:
            if request_id in self._unfinished:
                self._post(partial(self._scheduler.abort, request_id, reason))

    def clear_cache(self) -> None:
        with self._wake:
            self._post(self._scheduler.clear_cache)

    def stats(self) -> EngineStats:
        """As of the last step."""
        return self._stats

    def heartbeat_age_s(self) -> float:
        with self._wake:
            return self._clock() - self._progress_s if self._unfinished or self._failed else 0.0

    def failure(self) -> str | None:
        return "the engine's own books contradict each other" if self._failed else None

    def shutdown(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._failed:
            return
        if self._stepping is None or self._stepping.done():
            self._end_all()
        elif self._thread is None or not self._thread.is_current:
            wait((self._stepping,), timeout=_JOIN_TIMEOUT_S)
        if self._thread is not None:
            self._thread.close()
        with self._wake:
            output_thread, self._output_thread = self._output_thread, None
        if output_thread is not None:
            if not output_thread.is_current:
                wait((output_thread.submit(_nothing),), timeout=_JOIN_TIMEOUT_S)  # what was said has been heard
            output_thread.close()

    def step_once(self) -> StepOutput | None:
        """Take in what was asked and compute one step. None if there was nothing to do. Not while the thread runs."""
        self._take_calls()
        plan = self._scheduler.plan(self._clock())
        return self._apply(plan, self._run(plan) if plan.chunks else _NOTHING)

    def _apply(self, plan: StepPlan, result: StepResult) -> StepOutput | None:
        applied = self._scheduler.apply(plan, result)
        stats = self._snapshot()
        with self._wake:
            self._stats = stats
            self._progress_s = self._clock()
            self._unfinished.difference_update(delta.request_id for delta in applied.deltas if delta.finish_reason)
        if not plan.chunks and not applied.deltas and applied.kv_events is None:
            return None
        return StepOutput(applied.deltas, applied.kv_events, stats)

    def _run(self, plan: StepPlan) -> StepResult:
        try:
            result = self._run_checked(plan)
        except Exception:
            logger.exception("a step of %d sequences failed; trying each alone", len(plan.chunks))
            return StepResult(tuple(self._run_alone(plan, index) for index in range(len(plan.chunks))), duration_s=0.0)
        self._step_time.observe(plan.num_tokens, plan.num_context_tokens, len(plan.chunks), result.duration_s)
        return result

    def _run_alone(self, plan: StepPlan, index: int) -> ChunkResult:
        """Chunk `index` by itself: KV entries it had written already are written again, to the same places."""
        chunk = plan.chunks[index]
        try:
            return self._run_checked(StepPlan((chunk,))).chunks[0]
        except Exception as error:
            logger.exception("request %s ends: its step failed", chunk.request_id)
            return ChunkResult(chunk.request_id, error=f"the engine failed on this request ({type(error).__name__})")

    def _run_checked(self, plan: StepPlan) -> StepResult:
        result = self._runner.run(plan)
        for chunk, outcome in zip(plan.chunks, result.chunks, strict=True):
            sampled = outcome.token_id is not None
            fits = outcome.error is not None or sampled == (chunk.sample is not None)
            if chunk.request_id != outcome.request_id or not fits or len(outcome.further) > len(chunk.draft_samples):
                raise EngineError("the runner's results don't match the plan")
        return result

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._stopping or self._scheduler.has_work)
                if self._stopping:
                    break
            try:
                output = self.step_once()
            except Exception:
                # Not a client's doing: the scheduler contradicts itself, and its books can't be trusted any more.
                logger.exception("the engine failed; every request ends")
                self._fail()
                return
            self._emit(output)
        self._end_all()

    def _end_all(self) -> None:
        self._take_calls()
        for request_id in self._scheduler.request_ids:
            self._scheduler.abort(request_id, FinishReason.ABORT)
        self._emit(self._apply(StepPlan(()), _NOTHING))

    def _fail(self) -> None:
        """End every request with an error without asking the scheduler; `heartbeat_age_s` grows from here on."""
        error = ErrorInfo("EngineError", "the engine failed")
        with self._wake:
            self._failed = True
            deltas = tuple(Delta(i, finish_reason=FinishReason.ERROR, error=error) for i in sorted(self._unfinished))
            self._unfinished.clear()
            before = self._stats
            finished = dict(before.finished_total)
            finished[FinishReason.ERROR] += before.num_running + before.num_waiting
            self._stats = replace(
                before, num_running=0, num_waiting=0, num_pending_tokens=0, num_context_tokens=0, finished_total=finished
            )
        self._emit(StepOutput(deltas, None, self._stats))

    def _emit(self, output: StepOutput | None) -> None:
        if output is None:
            return
        if self._output_thread is None:
            self._hand_over(output)
        else:
            self._output_thread.submit(partial(self._hand_over, output))

    def _hand_over(self, output: StepOutput) -> None:
        try:
            self._sink(output)
        except Exception as error:
            if type(error) not in self._sink_errors:
                self._sink_errors.add(type(error))
                logger.exception("the sink of step outputs failed; further failures of this kind are not logged")

    def _post(self, call: Callable[[], None]) -> None:
        self._inbox.append(call)
        self._wake.notify()

    def _take_calls(self) -> None:
        with self._wake:
            calls = tuple(self._inbox)
            self._inbox.clear()
        for call in calls:
            call()

    def _snapshot(self) -> EngineStats:
        return self._scheduler.stats(self._step_time.coefficients())


def _nothing() -> None:
    """To wait for what came before it."""


def _drop(output: StepOutput) -> None:
    """The sink until `start` names one."""
