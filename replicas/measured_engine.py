"""An Engine that tells the metrics of every request it is given; everything else goes straight through."""

from __future__ import annotations

from collections.abc import Callable

from replicas.contract import Engine, EngineInfo, EngineStats, FinishReason, GenerationRequest, StepSink
from replicas.metrics import ReplicaMetrics


class MeasuredEngine:
    """Times start at `submit`, whichever way a request came; the deltas are observed by whoever gets them."""

    def __init__(self, engine: Engine, metrics: ReplicaMetrics, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._metrics = metrics
        self._clock = clock

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def start(self, sink: StepSink) -> None:
        self._engine.start(sink)

    def submit(self, request: GenerationRequest) -> None:
        self._metrics.on_submit(
            request.request_id,
            self._clock(),
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
        )
        try:
            self._engine.submit(request)
        except BaseException:
            self._metrics.on_refused(request.request_id)
            raise

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self._engine.abort(request_id, reason)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def heartbeat_age_s(self) -> float:
        return self._engine.heartbeat_age_s()

    def failure(self) -> str | None:
        return self._engine.failure()

    def clear_cache(self) -> None:
        self._engine.clear_cache()

    def shutdown(self) -> None:
        self._engine.shutdown()
