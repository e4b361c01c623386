"""The ingress's side of the token path: one connection per replica, a TokenStream per request.

    async with await client.open(endpoint, request, slot) as stream:
        async for delta in stream:
            ...

What arrives while the caller is busy waits at the stream, merged; the replica is told that it may send more as the caller
takes it, so a stream never holds more than `window_tokens`. Every failure of the path is a ReplicaLostError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from replicas.contract import Delta, ErrorInfo, FinishReason, GenerationRequest
from replicas.delta_buffer import DeltaBuffer
from replicas.errors import PayloadTooLarge, ReplicaLostError, TrieserveError, rebuild
from replicas.link import Link, connect_link
from replicas.wire import (
    Abort,
    Accepted,
    Credit,
    Endpoint,
    Refused,
    ServerMessage,
    Submit,
    Tokens,
    WireError,
)


class TokenStream:
    """One request's deltas. Made by StreamClient.open; one task reads it. Leaving `async with` early aborts the request."""

    def __init__(self, connection: _Connection, number: int, request_id: str, window_tokens: int) -> None:
        self.request_id = request_id
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection = connection
        self._number = number
        self._credit_quantum = max(1, window_tokens // 2)
        self._num_uncredited = 0
        self._arrived = DeltaBuffer()
        self._waiter: asyncio.Future[None] | None = None
        self._error: TrieserveError | None = None
        self._has_ended = False  # the last Delta is in `_arrived`, or was taken, or never comes because of `_error`
        self._is_exhausted = False

    async def __aenter__(self) -> TokenStream:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_exhausted:
            raise StopAsyncIteration
        return await self.next()

    async def next(self) -> Delta:
        """All that arrived since the last call as one Delta; waits if nothing did. Not to be called after the last Delta.

        Raises ReplicaLostError once everything that arrived before the loss has been taken.
        """
        assert not self._is_exhausted, f"{self.request_id}: next() after the last delta"
        while not self._arrived:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta = self._arrived.take()
        if delta.finish_reason is not None:
            self._is_exhausted = True
        elif not self._has_ended:
            self._num_uncredited += len(delta.token_ids)
            if self._num_uncredited >= self._credit_quantum:
                self._connection.send(Credit(self._number, self._num_uncredited))
                self._num_uncredited = 0
        return delta

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """End the request in the engine. A reader gets what arrived, with `reason`, as the last Delta. Idempotent."""
        if not self._has_ended:
            self._connection.send(Abort(self._number, reason))
            self.receive(Delta(self.request_id, finish_reason=reason))

    def receive(self, delta: Delta) -> None:
        self._arrived.add(delta)
        if delta.finish_reason is not None:
            self._end()
        self._wake()

    def fail(self, error: TrieserveError) -> None:
        self._error = error
        self._end()
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._wake()

    def _end(self) -> None:
        self._has_ended = True
        self._connection.streams.pop(self._number, None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection:
    """The streams on one link. `on_lost` is called once, if the link was ever up."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self.streams: dict[int, TokenStream] = {}
        self._announce_lost = on_lost
        self._link: Link | None = None
        self._next_number = 0

    @property
    def is_open(self) -> bool:
        return self._link is not None and not self._link.closed

    async def connect(self, endpoint: Endpoint, secret: bytes, connect_timeout_s: float, ping_period_s: float) -> None:
        self._link = await connect_link(
            endpoint,
            secret,
            on_server_message=self._on_message,
            on_lost=self._on_lost,
            connect_timeout_s=connect_timeout_s,
            ping_period_s=ping_period_s,
        )

    def submit(self, request: GenerationRequest, slot: str | None, window_tokens: int) -> TokenStream:
        """Raises ReplicaLostError, PayloadTooLarge."""
        if not self.is_open:
            raise ReplicaLostError("the connection to the replica was lost")
        self._next_number += 1
        stream = TokenStream(self, self._next_number, request.request_id, window_tokens)
        try:
            self.send(Submit(self._next_number, request, slot, window_tokens))
        except WireError as error:
            raise PayloadTooLarge("the prompt is too large to be sent to a replica") from error
        self.streams[self._next_number] = stream
        return stream

    def send(self, message: Submit | Abort | Credit) -> None:
        assert self._link is not None
        self._link.send(message)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def _on_message(self, message: ServerMessage) -> None:
        streams = self.streams
        if isinstance(message, Tokens):
            for number, token_ids in message.plain:
                if (stream := streams.get(number)) is not None:
                    stream.receive(Delta(stream.request_id, token_ids))
            for number, delta in message.full:
                if (stream := streams.get(number)) is not None:
                    stream.receive(delta)
        elif isinstance(message, Accepted):
            stream = streams.get(message.stream)
            if stream is not None and not stream.accepted.done():
                stream.accepted.set_result(None)
        elif isinstance(message, Refused):
            stream = streams.get(message.stream)
            if stream is not None:
                stream.fail(_rebuild(message.error))

    def _on_lost(self) -> None:
        self._announce_lost()
        for stream in list(self.streams.values()):
            stream.fail(ReplicaLostError("the replica was lost while it served the request"))


class StreamClient:
    """Opens streams on replicas, over one connection to each, which the first stream makes.

    `open_timeout_s` bounds connecting and the replica's answer to a request; a replica that answers no ping for three
    `ping_period_s` is lost.
    """

    def __init__(
        self, secret: bytes, *, window_tokens: int = 512, open_timeout_s: float = 5.0, ping_period_s: float = 5.0
    ) -> None:
        self._secret = secret
        self._window_tokens = window_tokens
        self._open_timeout_s = open_timeout_s
        self._ping_period_s = ping_period_s
        self._connections: dict[Endpoint, asyncio.Task[_Connection]] = {}  # being made, or open

    async def open(self, endpoint: Endpoint, request: GenerationRequest, slot: str | None = None) -> TokenStream:
        """Returns when the engine has accepted `request`. `slot` is given back by the replica if this process dies.

        Raises what the engine refused it with, PayloadTooLarge, or ReplicaLostError: unreachable, restarted, draining
        (code `replica_draining`) or silent for `open_timeout_s`.
        """
        try:
            async with asyncio.timeout(self._open_timeout_s):
                connection = await self._connection(endpoint)
                stream = connection.submit(request, slot, self._window_tokens)
                try:
                    await stream.accepted
                except BaseException:
                    stream.abort()
                    raise
        except TimeoutError as error:
            raise ReplicaLostError("the replica did not answer in time") from error
        return stream

    async def close(self) -> None:
        """Close every connection; streams that are open fail with ReplicaLostError."""
        for connection in await asyncio.gather(*self._connections.values(), return_exceptions=True):
            if isinstance(connection, _Connection):
                connection.close()

    async def _connection(self, endpoint: Endpoint) -> _Connection:
        """The open connection to `endpoint`, or a new one; callers that come meanwhile wait for the same one."""
        task = self._connections.get(endpoint)
        if task is None:
            task = asyncio.create_task(self._connect(endpoint))
            task.add_done_callback(_mark_retrieved)
            self._connections[endpoint] = task
        return await asyncio.shield(task)  # one impatient caller must not end the others' connection

    async def _connect(self, endpoint: Endpoint) -> _Connection:
        def forget() -> None:
            self._connections.pop(endpoint, None)

        connection = _Connection(forget)
        try:
            await connection.connect(endpoint, self._secret, self._open_timeout_s, self._ping_period_s)
        except BaseException:
            forget()
            raise
        return connection


def _mark_retrieved(task: asyncio.Task[_Connection]) -> None:
    """That nobody waits any more for a connection that fails is no news for the log."""
    if not task.cancelled():
        task.exception()


def _rebuild(error: ErrorInfo) -> TrieserveError:
    return rebuild(error.name, error.message, error.param, error.code, error.retry_after_s)
