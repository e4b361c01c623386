"""A replica's token socket: many streams on each connection, one write per engine step and connection.

A stream may send as many tokens as its client gave it credit for; what the engine produces beyond that, or while the socket
is full, waits here, merged, and is bounded by the request's max_tokens. So a slow reader costs memory for its own tokens
and never holds up another. A connection that breaks or falls silent takes its streams along: they are aborted in the engine,
and their Serve slots, which have no expiry of their own, are given back.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Callable

from replicas.channel import Channel
from replicas.contract import Delta, EngineStats, GenerationRequest, KVEvents
from replicas.delta_buffer import DeltaBuffer
from replicas.errors import EngineError, ReplicaLostError, TrieserveError
from replicas.stream_hub import StreamHub
from replicas.wire import (
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_FRAME_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Challenge,
    Credit,
    Endpoint,
    Events,
    Hello,
    Ping,
    Pong,
    Refused,
    Report,
    Snapshot,
    Submit,
    Subscribe,
    Tokens,
    Welcome,
    WireError,
    client_decoder,
    client_proof,
    hello_decoder,
    make_nonce,
    server_proof,
    to_error_info,
)

_logger = logging.getLogger(__name__)

_MAX_TOKENS_PER_FRAME = 16384
_MAX_HASHES_PER_FRAME = 8192
_CLOSE_TIMEOUT_S = 2.0  # for what was sent to reach a slow reader


class _Stream:
    """One request on one connection. `credit` is what may be sent now, in tokens; never negative."""

    __slots__ = ("_connection", "backlog", "credit", "number", "request_id", "slot")

    def __init__(self, connection: _Connection, submit: Submit) -> None:
        self._connection = connection
        self.number = submit.stream
        self.request_id = submit.request.request_id
        self.slot = submit.slot
        self.credit = submit.credit
        self.backlog = DeltaBuffer()

    def deliver(self, delta: Delta) -> None:
        self.backlog.add(delta)
        self._connection.mark_ready(self)

    @property
    def may_send(self) -> bool:
        return bool(self.backlog) and (self.credit > 0 or self.backlog.num_tokens == 0)


class _Subscription:
    """The hub's events on their way to one connection. While its socket is full they wait; once they are more than the
    cache itself, they are dropped and a new snapshot takes their place."""

    def __init__(self, connection: _Connection, hub: StreamHub) -> None:
        self._connection = connection
        self._hub = hub
        self._held: list[KVEvents] = []
        self._num_held_hashes = 0
        self._snapshot_due = False

    def start(self) -> None:
        """(Re)start with a snapshot."""
        self._hub.subscribe(self)
        self._snapshot_due = True
        self.catch_up()
        self._connection.send(Report(self._hub.stats))

    def stop(self) -> None:
        self._hub.unsubscribe(self)

    def on_events(self, events: KVEvents) -> None:
        if self._snapshot_due:
            return
        if not self._connection.is_paused and not self._held:
            self._connection.send(Events(events))
            return
        self._held.append(events)
        self._num_held_hashes += len(events.stored) + len(events.removed) + 1
        if self._num_held_hashes > self._hub.num_cached_blocks + _MAX_HASHES_PER_FRAME:
            self._snapshot_due = True
            self._forget_held()

    def on_report(self, stats: EngineStats) -> None:
        if not self._connection.is_paused:  # a report that can't go out now is obsolete when it could
            self._connection.send(Report(stats))

    def catch_up(self) -> None:
        """Send what was held back."""
        if self._snapshot_due:
            self._send_snapshot()
        else:
            for events in self._held:
                self._connection.send(Events(events))
        self._snapshot_due = False
        self._forget_held()

    def _forget_held(self) -> None:
        self._held.clear()
        self._num_held_hashes = 0

    def _send_snapshot(self) -> None:
        snapshot = self._hub.snapshot()
        hashes = snapshot.hashes
        num_parts = max(1, -(-len(hashes) // _MAX_HASHES_PER_FRAME))
        for part in range(num_parts):
            start = part * _MAX_HASHES_PER_FRAME
            chunk = hashes[start : start + _MAX_HASHES_PER_FRAME]
            self._connection.send(Snapshot(snapshot.sequence, chunk, last=part == num_parts - 1))


class _Connection(Channel):
    """One ingress. Says nothing and obeys nothing until the client has proved that it knows the secret."""

    def __init__(self, server: StreamServer) -> None:
        super().__init__(hello_decoder, MAX_HANDSHAKE_FRAME_BYTES)
        self._server = server
        self._nonce = make_nonce()
        self.streams: dict[int, _Stream] = {}
        self._ready: dict[int, _Stream] = {}
        self._subscription: _Subscription | None = None
        self._ended_slots: deque[tuple[int, str]] = deque()

    def on_open(self) -> None:
        self._server.connections.add(self)
        self.send(Challenge(PROTOCOL_VERSION, self._nonce))

    def on_message(self, message: Hello | Submit | Abort | Credit | Subscribe | Ping) -> None:
        match message:
            case Credit():
                self._add_credit(message)
            case Submit():
                self._submit(message)
            case Abort():
                stream = self.streams.get(message.stream)
                if stream is not None:
                    self._server.hub.abort(stream.request_id, message.reason)
                    self._end_stream(stream)
            case Ping():
                self.send(Pong())
            case Subscribe():
                if self._subscription is None:
                    self._subscription = _Subscription(self, self._server.hub)
                self._subscription.start()
            case Hello():
                self._welcome(message)

    def on_closed(self) -> None:
        self._server.connections.discard(self)
        if self._subscription is not None:
            self._subscription.stop()
        slots = [slot for _, slot in self._ended_slots]
        for stream in list(self.streams.values()):
            self._server.hub.abort(stream.request_id)
            if stream.slot is not None:
                slots.append(stream.slot)
        self.streams.clear()
        self._ready.clear()
        self._server.orphan(slots)

    def tick(self, tick: int, max_silent_ticks: int) -> None:
        self.num_silent_ticks += 1
        while self._ended_slots and self._ended_slots[0][0] < tick - max_silent_ticks:
            self._ended_slots.popleft()
        if self.num_silent_ticks > max_silent_ticks:
            _logger.warning("closing a token connection that was silent: %d streams end", len(self.streams))
            self.abort()

    def mark_ready(self, stream: _Stream) -> None:
        if stream.may_send:
            self._ready[stream.number] = stream
            self.schedule_flush()

    def before_flush(self) -> None:
        if self.is_paused:
            return
        if self._subscription is not None:
            self._subscription.catch_up()
        if not self._ready:
            return
        ready, self._ready = self._ready, {}
        plain: list[tuple[int, tuple[int, ...]]] = []
        full: list[tuple[int, Delta]] = []
        num_tokens = 0
        for stream in ready.values():
            delta = stream.backlog.take(stream.credit)
            stream.credit -= len(delta.token_ids)
            num_tokens += len(delta.token_ids)
            if _is_plain(delta):
                plain.append((stream.number, delta.token_ids))
            else:
                full.append((stream.number, delta))
                if delta.finish_reason is not None:
                    self._end_stream(stream)
            if num_tokens >= _MAX_TOKENS_PER_FRAME:
                self.send(Tokens(tuple(plain), tuple(full)))
                plain, full, num_tokens = [], [], 0
        if plain or full:
            self.send(Tokens(tuple(plain), tuple(full)))

    def _welcome(self, hello: Hello) -> None:
        server = self._server
        if not hmac.compare_digest(hello.proof, client_proof(server.secret, self._nonce, hello.nonce)):
            raise WireError("the client does not know the deployment's secret")
        self.decoder = client_decoder
        self.frames.max_frame_bytes = MAX_FRAME_BYTES
        self.send(Welcome(server.boot_id, server_proof(server.secret, self._nonce, hello.nonce, server.boot_id)))

    def _submit(self, submit: Submit) -> None:
        if submit.stream in self.streams:
            raise WireError(f"stream {submit.stream} is open already")
        stream = _Stream(self, submit)
        try:
            self._server.open(submit.request, stream)
        except TrieserveError as error:
            self.send(Refused(submit.stream, to_error_info(error)))
            return
        self.streams[stream.number] = stream
        self.send(Accepted(submit.stream))

    def _add_credit(self, credit: Credit) -> None:
        stream = self.streams.get(credit.stream)
        if stream is not None:
            stream.credit += credit.tokens
            self.mark_ready(stream)

    def _end_stream(self, stream: _Stream) -> None:
        """The client, which gives the slot back itself, may die before it gets to it: remember the slot for a while."""
        del self.streams[stream.number]
        self._ready.pop(stream.number, None)
        self._server.check_drained()
        if stream.slot is not None:
            self._ended_slots.append((self._server.tick_count, stream.slot))


def _is_plain(delta: Delta) -> bool:
    return (
        delta.finish_reason is None
        and delta.logprobs is None
        and delta.num_cached_tokens is None
        and delta.queue_s is None
        and delta.stop_token_id is None
        and delta.error is None
    )


class StreamServer:
    """Serves a hub's streams, cache events and reports to the ingresses that know `secret`.

    `on_orphaned_slot(slot)` is called for the slot of every stream that lost its client, and of those that ended so shortly
    before that the client may not have given it back: it must accept a slot that is free already. `tick_s` is the period of
    reports and of the silence check; a client is lost after `max_silence_s` without a byte from it.
    """

    def __init__(
        self,
        hub: StreamHub,
        secret: bytes,
        boot_id: str,
        *,
        on_orphaned_slot: Callable[[str], None],
        tick_s: float = 0.05,
        max_silence_s: float = 15.0,
    ) -> None:
        self.hub = hub
        self.secret = secret
        self.boot_id = boot_id
        self.connections: set[_Connection] = set()
        self.tick_count = 0
        self._on_orphaned_slot = on_orphaned_slot
        self._tick_s = tick_s
        self._max_silent_ticks = round(max_silence_s / tick_s)
        self.is_draining = False
        self._drained = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_streams(self) -> int:
        """Streams whose last token has not been sent."""
        return sum(len(connection.streams) for connection in self.connections)

    async def start(self, host: str, port: int = 0) -> Endpoint:
        """Listen; port 0 takes a free one. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Connection(self), host, port)
        self._timer = loop.call_later(self._tick_s, self._on_timer)
        return Endpoint(host, self._listener.sockets[0].getsockname()[1], self.boot_id)

    def tick(self) -> None:
        """What is to be done every `tick_s`; the server's own timer calls it."""
        self.tick_count += 1
        self.hub.poll_reports()
        for connection in list(self.connections):
            connection.tick(self.tick_count, self._max_silent_ticks)

    async def drain(self) -> None:
        """Refuse new streams from now on, and return when the last one has been sent to its end. Wrap it in a timeout."""
        self.is_draining = True
        self.check_drained()
        await self._drained.wait()

    async def close(self) -> None:
        """Stop listening and end every connection; streams that are open are aborted. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._listener is not None:
            self._listener.close()
        connections = list(self.connections)
        for connection in connections:
            connection.close()
        if connections:
            await asyncio.wait([connection.lost for connection in connections], timeout=_CLOSE_TIMEOUT_S)

    def open(self, request: GenerationRequest, stream: _Stream) -> None:
        """Raises TrieserveError, whatever went wrong: each Submit gets an answer."""
        if self.is_draining:
            raise ReplicaLostError("the replica is shutting down", code="replica_draining")
        try:
            self.hub.open(request, stream.deliver)
        except TrieserveError:
            raise
        except Exception as error:
            _logger.exception("the engine failed to take request %s", request.request_id)
            raise EngineError("the engine failed to take the request") from error

    def orphan(self, slots: list[str]) -> None:
        """Each in a turn of its own, so that none goes unreleased because another failed."""
        loop = asyncio.get_running_loop()
        for slot in dict.fromkeys(slots):  # the choices of one request share a slot
            loop.call_soon(self._on_orphaned_slot, slot)
        self.check_drained()

    def check_drained(self) -> None:
        if self.is_draining and self.num_streams == 0:
            self._drained.set()

    def _on_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._on_timer)
        self.tick()
