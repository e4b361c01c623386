"""What one replica caches and how busy it is, as it says itself: a subscription that survives lost connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from replicas.blocks import BlockHash
from replicas.contract import EngineStats, KVEvents
from replicas.errors import ReplicaLostError
from replicas.link import Link, connect_link
from replicas.wire import Endpoint, Events, Report, ServerMessage, Snapshot, Subscribe

_logger = logging.getLogger(__name__)


class FeedListener(Protocol):
    """Called on the event loop; must not block. For each replica a snapshot comes first, then the events that follow it."""

    def on_snapshot(self, replica: str, sequence: int, hashes: Sequence[BlockHash]) -> None:
        """Replaces all that was known of the replica's cache."""

    def on_events(self, replica: str, events: KVEvents) -> bool:
        """False: there is a gap before `events`, or the listener lost track; a new snapshot follows."""

    def on_report(self, replica: str, stats: EngineStats) -> None: ...

    def on_lost(self, replica: str) -> None:
        """Nothing is known of the replica until the next snapshot."""


class ReplicaFeed:
    """Keeps `listener` informed of one replica from `start` to `close`; a lost connection is tried again, less and less
    often up to every `max_backoff_s`."""

    def __init__(
        self,
        replica: str,
        endpoint: Endpoint,
        secret: bytes,
        listener: FeedListener,
        *,
        connect_timeout_s: float = 5.0,
        ping_period_s: float = 5.0,
        min_backoff_s: float = 0.05,
        max_backoff_s: float = 2.0,
    ) -> None:
        self._replica = replica
        self._endpoint = endpoint
        self._secret = secret
        self._listener = listener
        self._connect_timeout_s = connect_timeout_s
        self._ping_period_s = ping_period_s
        self._min_backoff_s = min_backoff_s
        self._max_backoff_s = max_backoff_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        assert self._task is None, f"the feed of {self._replica} is running"
        self._task = asyncio.create_task(self._run(), name=f"feed of {self._replica}")

    async def close(self) -> None:
        """The listener hears nothing more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff_s = self._min_backoff_s
        while True:
            subscription = _Subscription(self._replica, self._listener)
            try:
                await subscription.run(self._endpoint, self._secret, self._connect_timeout_s, self._ping_period_s)
            except ReplicaLostError:
                pass
            else:
                backoff_s = self._min_backoff_s
                self._listener.on_lost(self._replica)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._max_backoff_s)


class _Subscription:
    """One connection's worth of a feed."""

    def __init__(self, replica: str, listener: FeedListener) -> None:
        self._replica = replica
        self._listener = listener
        self._link: Link | None = None
        self._lost = asyncio.Event()
        self._awaits_snapshot = True
        self._parts: list[BlockHash] = []

    async def run(self, endpoint: Endpoint, secret: bytes, connect_timeout_s: float, ping_period_s: float) -> None:
        """Returns when an established connection is lost; raises ReplicaLostError if none came about."""
        self._link = await connect_link(
            endpoint,
            secret,
            on_server_message=self._on_message,
            on_lost=self._lost.set,
            connect_timeout_s=connect_timeout_s,
            ping_period_s=ping_period_s,
        )
        try:
            self._link.send(Subscribe())
            await self._lost.wait()
        finally:
            self._link.close()

    def _on_message(self, message: ServerMessage) -> None:
        if isinstance(message, Events):
            # What is still under way from before a requested snapshot is contained in it.
            if not self._awaits_snapshot and not self._listener.on_events(self._replica, message.events):
                self._resync()
        elif isinstance(message, Report):
            self._listener.on_report(self._replica, message.stats)
        elif isinstance(message, Snapshot):
            self._parts.extend(message.hashes)
            if message.last:
                hashes, self._parts = self._parts, []
                self._awaits_snapshot = False
                self._listener.on_snapshot(self._replica, message.sequence, hashes)

    def _resync(self) -> None:
        assert self._link is not None
        _logger.info("the feed of %s has a gap; asking for a snapshot", self._replica)
        self._awaits_snapshot = True
        self._link.send(Subscribe())
