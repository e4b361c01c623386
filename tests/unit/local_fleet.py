"""A fleet in this process: the ingress's Backend over replicas that are a StreamHub around an engine. No Ray, no sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence

from scripted_engine import ManualClock, ScriptedEngine, until

from cluster.backend import Dispatched
from replicas.contract import Delta, EngineInfo, FinishReason, GenerationRequest
from replicas.delta_buffer import DeltaBuffer
from replicas.errors import NoReplicaError, ReplicaLostError
from replicas.fake_engine import FakeEngine
from replicas.stream_hub import StreamHub
from router.policy import Decision


class LocalReplica:
    """An engine whose deltas arrive on the event loop. A ScriptedEngine steps when the test says so, a FakeEngine by itself."""

    def __init__(self, name: str, engine: ScriptedEngine | FakeEngine) -> None:
        self.name = name
        self.engine = engine
        self.hub = StreamHub(engine, ManualClock())
        self.loss: Exception | None = None
        self.streams: set[LocalStream] = set()
        self._is_stepping = False
        if isinstance(engine, ScriptedEngine):
            engine.start(self.hub.publish)

    @property
    def is_lost(self) -> bool:
        return self.loss is not None

    def kill(self, loss: Exception | None = None) -> None:
        """From now on every stream raises `loss`, or ReplicaLostError, once what had arrived is taken."""
        self.loss = loss or ReplicaLostError("the replica was lost", replica=self.name)
        for stream in self.streams:
            stream.wake()

    def step(self) -> None:
        """Have a FakeEngine step on the loop for as long as it has something to do."""
        if isinstance(self.engine, FakeEngine) and not self._is_stepping:
            self._is_stepping = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._is_stepping = False
        output = self.engine.step_once()
        if output is not None:
            self.hub.publish(output)
            self.step()


class LocalStream:
    """cluster.backend.DeltaStream at a LocalReplica."""

    def __init__(self, replica: LocalReplica, request: GenerationRequest) -> None:
        self._replica = replica
        self._request_id = request.request_id
        self._waiting = DeltaBuffer()
        self._news = asyncio.Event()
        self._has_ended = False
        replica.hub.open(request, self._receive)
        replica.streams.add(self)
        replica.step()

    async def next(self) -> Delta:
        while not self._waiting:
            if self._replica.loss is not None:
                raise self._replica.loss
            self._news.clear()
            await self._news.wait()
        return self._waiting.take()

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        self._replica.streams.discard(self)
        if not self._has_ended:
            self._replica.hub.abort(self._request_id, reason)
            self._replica.step()
            self._receive(Delta(self._request_id, finish_reason=reason))

    def wake(self) -> None:
        self._news.set()

    def _receive(self, delta: Delta) -> None:
        self._waiting.add(delta)
        self._has_ended = delta.finish_reason is not None
        self.wake()


class LocalFleet:
    """cluster.backend.Backend. A group goes to the first replica that isn't excluded, in the order of `order` where it says.

    `order` is used up by one name for each dispatch. `decision` is what the router is said to have decided.
    `dispatches` and `timeouts_s` record what was asked; `num_held` are the slots held now; `failure` is raised instead of
    dispatching.
    """

    def __init__(self, *engines: ScriptedEngine | FakeEngine) -> None:
        self.replicas = {f"r{number}": LocalReplica(f"r{number}", engine) for number, engine in enumerate(engines)}
        self.order: deque[str] = deque()
        self.decision: Decision | None = None
        self.failure: Exception | None = None
        self.dispatches: list[tuple[str, set[str]]] = []  # replica, excluded
        self.timeouts_s: list[float] = []
        self.num_first_tokens = 0
        self.num_held = 0

    @contextlib.asynccontextmanager
    async def dispatch(
        self, group: Sequence[GenerationRequest], *, excluded: frozenset[str], timeout_s: float
    ) -> AsyncIterator[Dispatched]:
        if self.failure is not None:
            raise self.failure
        replica = self._choose(excluded)
        self.dispatches.append((replica.name, set(excluded)))
        self.timeouts_s.append(timeout_s)
        self.num_held += 1
        streams: list[LocalStream] = []
        try:
            if replica.loss is not None:
                raise replica.loss
            for request in group:
                streams.append(LocalStream(replica, request))
            yield Dispatched(replica.name, tuple(streams), self._on_first_token, self.decision, 0.001)
        finally:
            self.num_held -= 1
            for stream in streams:
                stream.abort()

    def info(self) -> EngineInfo:
        return self.replicas["r0"].engine.info if self.replicas else ScriptedEngine().info

    async def ready(self) -> int:
        return sum(not replica.is_lost for replica in self.replicas.values())

    async def metrics(self) -> dict[str, bytes | None]:
        return {name: None if each.is_lost else b"replica_is_here 1\n" for name, each in self.replicas.items()}

    def _choose(self, excluded: frozenset[str]) -> LocalReplica:
        names = [name for name in self.replicas if name not in excluded]
        if not names:
            raise NoReplicaError("no replica is ready to take the request", retry_after_s=2.0)
        wanted = self.order.popleft() if self.order else names[0]
        return self.replicas[wanted]

    def _on_first_token(self) -> None:
        self.num_first_tokens += 1


async def submitted(engine: ScriptedEngine, num_requests: int = 1) -> list[str]:
    """The ids of the sequences at `engine`, in order, once there are `num_requests`."""
    await until(lambda: len(engine.submitted) >= num_requests)
    assert len(engine.submitted) == num_requests
    return list(engine.submitted)
