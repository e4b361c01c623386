"""One engine's output, spread on the event loop: deltas to whoever opened the stream, cache events and stats to subscribers.

The engine's thread hands each step over with `loop.call_soon_threadsafe(hub.publish, output)`; everything here runs on that
loop. The hub mirrors the engine's set of cached blocks, so a new subscriber gets a snapshot and the events that follow it
without a question to the engine's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from replicas.blocks import BlockHash
from replicas.contract import (
    Delta,
    Engine,
    EngineStats,
    FinishReason,
    GenerationRequest,
    KVEvents,
    StepOutput,
)
from replicas.delta_buffer import DeltaBuffer
from replicas.errors import ReplicaLostError, RequestError
from replicas.wire import to_error_info

Consumer = Callable[[Delta], None]

_FAILED = "the replica's engine failed"


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """The blocks cached after the events up to `sequence`, the longest cached first."""

    sequence: int
    hashes: tuple[BlockHash, ...]


class Subscriber(Protocol):
    """Who wants to know what an engine's cache holds and how busy it is. Must not block."""

    def on_events(self, events: KVEvents) -> None: ...

    def on_report(self, stats: EngineStats) -> None: ...


class StreamHub:
    """Consumers get every Delta of their request, on the loop, until the one with a finish_reason.

    Reports go out at most every `report_period_s`, at once when the engine goes idle, and every `heartbeat_s` even if
    nothing happens: silence then means a lost replica and not an idle one. `clock` is monotonic, in seconds.
    """

    def __init__(
        self, engine: Engine, clock: Callable[[], float], *, report_period_s: float = 0.05, heartbeat_s: float = 1.0
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._report_period_s = report_period_s
        self._heartbeat_s = heartbeat_s
        self._consumers: dict[str, Consumer] = {}
        self._subscribers: list[Subscriber] = []
        self._cached: dict[BlockHash, None] = {}  # a set that keeps its order
        self._sequence = 0
        self._stats: EngineStats | None = None
        self._reported_at_s = clock()
        self._report_pending = False
        self._reported_idle = True

    @property
    def num_streams(self) -> int:
        return len(self._consumers)

    @property
    def stats(self) -> EngineStats:
        """After the latest step."""
        return self._engine.stats() if self._stats is None else self._stats

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    def snapshot(self) -> CacheSnapshot:
        return CacheSnapshot(self._sequence, tuple(self._cached))

    def open(self, request: GenerationRequest, consumer: Consumer) -> None:
        """Submit `request`. Raises what Engine.submit raises, RequestError for the id of a stream that is open, and
        ReplicaLostError once the engine has failed."""
        request_id = request.request_id
        if request_id in self._consumers:
            raise RequestError(f"request id {request_id} is in use", code="duplicate_request_id")
        self._consumers[request_id] = consumer
        try:
            self._engine.submit(request)
        except BaseException as error:
            del self._consumers[request_id]
            if self._engine.failure() is not None:
                raise ReplicaLostError(_FAILED) from error
            raise

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End the stream; its consumer hears nothing more. A stream that ended already is left alone."""
        if self._consumers.pop(request_id, None) is not None:
            self._engine.abort(request_id, reason)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """The deltas of `request`, merged while the caller was busy. Closing the iterator early aborts the request."""
        waiting = DeltaBuffer()
        arrived = asyncio.Event()

        def consume(delta: Delta) -> None:
            waiting.add(delta)
            arrived.set()

        self.open(request, consume)
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                delta = waiting.take()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.abort(request.request_id)

    def publish(self, output: StepOutput) -> None:
        """Spread one step's output. Deltas of unknown (aborted) requests are dropped."""
        consumers = self._consumers
        for delta in output.deltas:
            take = consumers.get if delta.finish_reason is None else consumers.pop
            consumer = take(delta.request_id, None)
            if consumer is not None:
                consumer(self._as_lost(delta) if delta.finish_reason is FinishReason.ERROR else delta)
        if output.kv_events is not None:
            self._apply(output.kv_events)
        self._stats = output.stats
        self._report_pending = True
        self.poll_reports()

    def subscribe(self, subscriber: Subscriber) -> None:
        """From now on `subscriber` gets all events after the present `snapshot()`."""
        if subscriber not in self._subscribers:
            self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)

    def poll_reports(self) -> None:
        """Send the report that is due, if one is. To be called every `report_period_s` as well as after each step."""
        stats = self.stats
        is_idle = stats.num_running == 0 and stats.num_waiting == 0
        now = self._clock()
        age_s = now - self._reported_at_s
        is_due = self._report_pending and (age_s >= self._report_period_s or (is_idle and not self._reported_idle))
        if is_due or age_s >= self._heartbeat_s:
            self._report_pending = False
            self._reported_idle = is_idle
            self._reported_at_s = now
            for subscriber in self._subscribers:
                subscriber.on_report(stats)

    def _as_lost(self, delta: Delta) -> Delta:
        """`delta` ends its request with an error. If the engine itself failed, that is nothing about the request, and another
        replica may answer it."""
        if self._engine.failure() is None:
            return delta
        return replace(delta, error=to_error_info(ReplicaLostError(_FAILED)))

    def _apply(self, events: KVEvents) -> None:
        assert events.sequence == self._sequence + 1, f"KV events {events.sequence} follow {self._sequence}"
        self._sequence = events.sequence
        if events.cleared:
            self._cached.clear()
        for name in events.removed:
            self._cached.pop(name, None)
        self._cached.update(dict.fromkeys(events.stored))
        for subscriber in self._subscribers:
            subscriber.on_events(events)
