"""A generation as an HTTP response: one JSON object, or server-sent events; and what happens when a client leaves.

Headers wait for the first piece, so that whatever fails before it has its own status. From then on an error is an event in the
stream, followed by [DONE]: a stream that simply ended would pass for a complete answer (cases ST02, ST03).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from cluster.generate import Generation, Piece, Pieces, Usage
from cluster.metrics import IngressMetrics, Outcome, TrackedRequest, outcome_of
from cluster.openai_errors import error_body, error_headers
from cluster.responses import ChunkWriter
from replicas.errors import DeadlineError, EngineError, TrieserveError

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

Headers = Mapping[str, str]

_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect the stream (case ST09)
}


class SseSender:
    """Sends events; the headers go out with the first. Nothing is sent twice and nothing after `end`."""

    def __init__(self, send: Send, headers: Callable[[], Headers]) -> None:
        self._send = send
        self._headers = headers
        self.started = False
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._loop.time()

    async def write(self, data: bytes) -> None:
        if self._ended or not data:
            return
        self._last_sent = self._loop.time()
        if not self.started:
            self.started = True
            await self._send(_start(200, {**_SSE_HEADERS, **self._headers()}))
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        if not self._ended:
            self._ended = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self, period_s: float) -> None:
        """A comment whenever nothing was sent for `period_s`, also before the first token: proxies drop silent streams
        (case ST09)."""
        while not self._ended:
            left_s = self._last_sent + period_s - self._loop.time()
            if left_s > 0:
                await asyncio.sleep(left_s)
            else:
                await self.write(KEEP_ALIVE)


class GenerationResponse:
    """An ASGI response that ends at the deadline, and when the client goes away. What became of the request is in `tracked`."""

    def __init__(
        self,
        generation: Generation,
        tracked: TrackedRequest,
        metrics: IngressMetrics,
        *,
        headers: Callable[[], Headers],
        timeout_s: float,
        keep_alive_s: float,
        writer: ChunkWriter | None,
        collect: Callable[[list[Piece], Usage], dict[str, Any]],
    ) -> None:
        self._generation = generation
        self._tracked = tracked
        self._metrics = metrics
        self._headers = headers
        self._timeout_s = timeout_s
        self._keep_alive_s = keep_alive_s
        self._writer = writer
        self._collect = collect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._stream(send, self._writer) if self._writer else self._whole(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                self._tracked.outcome = Outcome.CANCELLED
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _whole(self, send: Send) -> None:
        pieces: list[Piece] = []
        try:
            async with asyncio.timeout(self._timeout_s), aclosing(self._generation.pieces()) as run:
                async for arrived in run:
                    self._tracked.on_first_token()
                    pieces += arrived
            body = self._collect(pieces, self._generation.usage)
        except Exception as error:
            await self._send_error(send, _as_ours(error))
            return
        await send_json(send, 200, body, self._headers())

    async def _stream(self, send: Send, writer: ChunkWriter) -> None:
        sender = SseSender(send, self._headers)
        keep_alive = asyncio.ensure_future(sender.keep_alive(self._keep_alive_s))
        try:
            try:
                async with asyncio.timeout(self._timeout_s), aclosing(self._generation.pieces()) as run:
                    await self._write_pieces(run, sender, writer)
            finally:
                keep_alive.cancel()  # or its headers could get in the way of an error's
            await self._write(sender, writer.end(self._generation.usage) + DONE)
        except Exception as error:
            ours = _as_ours(error)
            if not sender.started:
                await self._send_error(send, ours)
                return
            self._tracked.outcome = outcome_of(ours)
            await self._write(sender, writer.error(ours) + DONE)
        await sender.end()

    async def _write_pieces(self, run: AsyncGenerator[Pieces], sender: SseSender, writer: ChunkWriter) -> None:
        begun: set[int] = set()
        async for arrived in run:
            self._tracked.on_first_token()
            usage = self._generation.usage
            events = [writer.piece(piece, usage) for piece in arrived]
            index = arrived[0].index if arrived else None
            if index is not None and index not in begun:
                begun.add(index)
                events.insert(0, writer.start(index))
            await self._write(sender, b"".join(events))

    async def _write(self, sender: SseSender, events: bytes) -> None:
        self._metrics.on_stream_events(events.count(b"\n\n"))  # which JSON has nowhere inside
        await sender.write(events)

    async def _send_error(self, send: Send, error: TrieserveError) -> None:
        self._tracked.outcome = outcome_of(error)
        await send_json(send, error.status, error_body(error), {**error_headers(error), **self._headers()})


def _as_ours(error: Exception) -> TrieserveError:
    if isinstance(error, TrieserveError):
        return error
    if isinstance(error, TimeoutError):
        return DeadlineError("the request's deadline passed")
    # Nothing of an unexpected error's text goes out (case TL02); the log has it.
    logger.error("unexpected error in a request", exc_info=error)
    return EngineError("internal error")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, headers: Headers) -> dict[str, Any]:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}


async def send_json(send: Send, status: int, body: Any, headers: Headers) -> None:
    data = msgspec.json.encode(body)
    await send(_start(status, {"content-type": "application/json", "content-length": str(len(data)), **headers}))
    await send({"type": "http.response.body", "body": data, "more_body": False})
