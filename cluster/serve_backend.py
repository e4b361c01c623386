"""The fleet behind Ray Serve: `choose_replica` runs our router and holds a slot, tokens come over the replica's own socket.

The classic path (Serve's streaming calls) is the fallback for clusters whose nodes can't reach each other's ports; both give
the same streams to the rest of the ingress.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cluster.backend import Dispatched, named_for
from cluster.stream_client import StreamClient
from replicas.contract import Delta, EngineInfo, FinishReason, GenerationRequest
from replicas.errors import NoReplicaError, ReplicaLostError, TrieserveError
from replicas.wire import Endpoint
from router.ticket import Ticket

_METRICS_TIMEOUT_S = 5.0
_RETRY_AFTER_S = 2.0
_INFO_PERIOD_S = 5.0


class ServeBackend:
    """One fleet. `name` is its model's. `client` is shared by all fleets of an ingress, and closed by whoever made it."""

    def __init__(self, name: str, engine: DeploymentHandle, client: StreamClient, *, data_path: str) -> None:
        self._name = name
        self._engine = engine
        self._client = client
        self._info: EngineInfo | None = None
        self._introduced = asyncio.Event()
        self._background: set[asyncio.Task[Any]] = set()
        self._dispatch = {"socket": self._over_socket, "classic": self._classic}[data_path]

    def info(self) -> EngineInfo:
        if self._info is None:
            raise NoReplicaError(f"no replica of {self._name} has started yet", retry_after_s=_RETRY_AFTER_S)
        return self._info

    async def introduced(self) -> None:
        """Returns once a replica was heard of. `follow` must run."""
        await self._introduced.wait()

    async def follow(self) -> None:
        """Learn what the replicas say of themselves, and now and then again: a deployment in place may change it."""
        while True:
            with contextlib.suppress(RayError, DeploymentUnavailableError, BackPressureError):
                # Waits for a replica. The empty context: see `_chosen`.
                facts = await contextvars.Context().run(self._engine.describe.remote)
                self._info = EngineInfo(**facts["info"])
                self._introduced.set()
            await asyncio.sleep(_INFO_PERIOD_S)

    def dispatch(
        self, group: Sequence[GenerationRequest], *, excluded: frozenset[str], timeout_s: float
    ) -> AbstractAsyncContextManager[Dispatched]:
        return self._dispatch(group, excluded, timeout_s)

    @contextlib.asynccontextmanager
    async def _over_socket(
        self, group: Sequence[GenerationRequest], excluded: frozenset[str], timeout_s: float
    ) -> AsyncGenerator[Dispatched]:
        ticket = Ticket(len(group[0].prompt_token_ids), group[0].block_hashes, excluded)
        choice = self._engine.choose_replica(ticket)
        selection = await _chosen(choice, ticket, timeout_s)
        streams: list[Any] = []
        try:
            facts = selection.replica_metadata
            endpoint = Endpoint(facts["endpoint"][0], facts["endpoint"][1], facts["boot_id"])
            # Serve's slot, so that the replica can give it back if this process dies; no public name for it in 2.60.
            slot = getattr(selection, "_slot_token", None)
            try:
                for request in group:
                    named = named_for(request, facts["info"]["block_size"])
                    streams.append(await self._client.open(endpoint, named, slot))
                yield _dispatched(selection.replica_id, streams, ticket)
            except ReplicaLostError as error:
                error.replica = error.replica or selection.replica_id
                raise
        finally:
            ticket.release()
            for stream in streams:
                stream.abort()
            # The answer need not wait for Serve's bookkeeping.
            self._in_background(choice.__aexit__(None, None, None))

    @contextlib.asynccontextmanager
    async def _classic(
        self, group: Sequence[GenerationRequest], excluded: frozenset[str], timeout_s: float
    ) -> AsyncGenerator[Dispatched]:
        """Every choice is a call of its own and routed on its own: the router's lease keeps them together."""
        tickets, streams = [], []
        try:
            for request in group:
                ticket = Ticket(len(request.prompt_token_ids), request.block_hashes, excluded)
                tickets.append(ticket)
                call = contextvars.Context().run(self._engine.options(stream=True).generate.remote, ticket, request)
                streams.append(_ClassicStream(call, ticket))
            try:
                await streams[0].start(timeout_s)
                yield _dispatched(streams[0].replica or "", streams, tickets[0])
            except ReplicaLostError as error:
                error.replica = error.replica or streams[0].replica
                raise
        finally:
            for ticket in tickets:
                ticket.release()
            for stream in streams:
                stream.abort()

    async def ready(self) -> int:
        """Replicas whose describe() answers now."""
        return len(await _answers(self._engine, "describe"))

    async def metrics(self) -> dict[str, bytes | None]:
        return await metrics_of(self._engine, f"engine:{self._name}")

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(_quietly(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _dispatched(replica: str, streams: Sequence[Any], ticket: Ticket) -> Dispatched:
    decision = ticket.decision
    if decision is not None and decision.ranking[0] != replica:
        decision = None  # Serve could not reach the first of the ranking; what was predicted doesn't hold here
    return Dispatched(replica, tuple(streams), ticket.first_token, decision, ticket.decide_s)


async def metrics_of(handle: DeploymentHandle, label: str) -> dict[str, bytes | None]:
    """What all replicas of a deployment expose; `label` stands for all of them where none answers."""
    return dict(await _answers(handle, "metrics_text")) or {label: None}


async def _answers(handle: DeploymentHandle, method: str) -> list[Any]:
    """What those replicas say that answer in time: one that is dying must not hide the others."""
    try:
        async with asyncio.timeout(_METRICS_TIMEOUT_S):
            answers = await handle.broadcast(method).results_async(return_exceptions=True)
    except (RayError, DeploymentUnavailableError, TimeoutError):
        return []
    return [answer for answer in answers if not isinstance(answer, BaseException)]


async def _quietly(work: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(RayError):
        await work


async def _chosen(choice: AbstractAsyncContextManager[Any], ticket: Ticket, timeout_s: float) -> Any:
    """Serve waits for ever where there is no replica: the deadline is ours.

    The empty context is for Serve too: handle calls of one HTTP request would share an id, by which its router tells waiting
    calls apart, and of two at once one is never woken (seen on 2.60 with several prompts in one request).
    """
    entering = asyncio.get_running_loop().create_task(_entered(choice), context=contextvars.Context())
    try:
        async with asyncio.timeout(timeout_s):
            return await entering
    except BaseException as error:
        ticket.release()
        ours = _as_ours(error)
        if ours is error:
            raise
        raise ours from error


async def _entered(choice: AbstractAsyncContextManager[Any]) -> Any:
    return await choice.__aenter__()


def _as_ours(error: BaseException) -> BaseException:
    if isinstance(error, TrieserveError):
        return error
    if isinstance(error, (TimeoutError, DeploymentUnavailableError, BackPressureError)):
        return NoReplicaError("no replica is ready to take the request", retry_after_s=_RETRY_AFTER_S)
    if isinstance(error, RayError):
        return ReplicaLostError("the replica was lost")
    return error


class _ClassicStream:
    """Serve's response generator as a DeltaStream."""

    def __init__(self, call: Any, ticket: Ticket) -> None:
        self._call = call
        self._ticket = ticket
        self._items = aiter(call)
        self._first: Delta | None = None
        self._finished = False

    async def start(self, timeout_s: float) -> None:
        """Wait for the first delta: only then is the router's decision there, and a refusal known."""
        try:
            async with asyncio.timeout(timeout_s):
                self._first = await self._next()
        except TimeoutError as error:
            raise _as_ours(error) from error

    async def next(self) -> Delta:
        first, self._first = self._first, None
        return first if first is not None else await self._next()

    async def _next(self) -> Delta:
        try:
            delta: Delta = await anext(self._items)
        except StopAsyncIteration:
            raise ReplicaLostError("the replica ended the stream early", replica=self.replica) from None
        except (RayError, DeploymentUnavailableError, BackPressureError) as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, TrieserveError):
                raise cause from None
            ours = _as_ours(error)
            if isinstance(ours, ReplicaLostError):
                ours.replica = self.replica
            raise ours from error
        self._finished = delta.finish_reason is not None
        return delta

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        if not self._finished:
            self._finished = True
            self._call.cancel()

    @property
    def replica(self) -> str | None:
        """Where the router sent it, as far as it has decided."""
        decision = self._ticket.decision
        return decision.ranking[0] if decision is not None else None
