"""Streams of completions from a process of their own, read as cheaply as can be: the client must not be what is measured.

Events are counted, not parsed: an event's JSON is on one line and ends with two line feeds. `events_of` reads one stream the
other way, to see what is in it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httptools
from process_cpu import CpuMeter

_TIMEOUT_S = 180.0
_TAIL_BYTES = 1024  # enough for the last events: usage and [DONE]
_LINE_FEEDS_PER_EVENT = 2


@dataclass(frozen=True, slots=True)
class Load:
    """`num_streams` completions of exactly `max_tokens` tokens each, all sent at once, their prompts all different."""

    url: str
    model: str
    num_streams: int
    max_tokens: int

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    def request(self, stream: int) -> bytes:
        body = {
            "model": self.model,
            "prompt": f"Stream number {stream}:",
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {urlsplit(self.url).netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + data


@dataclass(frozen=True, slots=True)
class BurstResult:
    """What all streams of a load received, from the first byte sent to the last received. CPU seconds are this client's."""

    num_tokens: int
    wall_s: float
    client_cpu_s: float
    ttft_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WindowResult:
    """What happened while all streams were under way: events received, CPU seconds of the server's processes."""

    num_events: int
    wall_s: float
    server_cpu_s: float


class _Stream(asyncio.Protocol):
    """One request on one connection; httptools calls the `on_` methods."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._num_line_feeds = 0
        self._tail = b""
        self.kept: list[bytes] | None = None  # the body, if wanted
        self.began: asyncio.Future[float] = asyncio.get_running_loop().create_future()  # seconds to the first event
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_events(self) -> int:
        return self._num_line_feeds // _LINE_FEEDS_PER_EVENT

    def num_tokens(self) -> int:
        """By the server's own count. Raises RuntimeError unless the stream came to its proper end."""
        *_, usage, done = self._tail.split(b"\n\n")[:-1]
        if done != b"data: [DONE]":
            raise RuntimeError(f"a stream ended with {self._tail!r}")
        return int(json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"])

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._sent_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        error = ConnectionError(f"a stream broke off after {self.num_events} events: {exc}")
        for future in (self.began, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever has left needs no warning

    def on_body(self, body: bytes) -> None:
        self._num_line_feeds += body.count(b"\n")
        self._tail = body if len(body) >= _TAIL_BYTES else (self._tail + body)[-_TAIL_BYTES:]
        if not self.began.done():
            self.began.set_result(time.perf_counter() - self._sent_s)
        if self.kept is not None:
            self.kept.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if not self.ended.done():
            if status == 200:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(RuntimeError(f"HTTP {status}: {self._tail!r}"))
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def _open(load: Load) -> list[_Stream]:
    loop, address = asyncio.get_running_loop(), load.address
    requests = [load.request(number) for number in range(load.num_streams)]
    made = await asyncio.gather(*(loop.create_connection(partial(_Stream, request), *address) for request in requests))
    return [stream for _, stream in made]


async def _all_begun(streams: Sequence[_Stream]) -> tuple[float, ...]:
    return tuple(await asyncio.gather(*(stream.began for stream in streams)))


async def _burst(load: Load) -> BurstResult:
    async with asyncio.timeout(_TIMEOUT_S):
        started_s, cpu_s = time.perf_counter(), time.process_time()
        streams = await _open(load)
        await asyncio.gather(*(stream.ended for stream in streams))
        wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    num_tokens = sum(stream.num_tokens() for stream in streams)
    if num_tokens != load.num_streams * load.max_tokens:
        raise RuntimeError(f"{load.num_streams} streams of {load.max_tokens} tokens received {num_tokens} tokens")
    return BurstResult(num_tokens, wall_s, cpu_s, await _all_begun(streams))


async def _window(load: Load, server_pid: int, settle_s: float, window_s: float) -> WindowResult:
    meter = CpuMeter(server_pid)
    async with asyncio.timeout(_TIMEOUT_S):
        streams = await _open(load)
        await _all_begun(streams)
        await asyncio.sleep(settle_s)
        started_s, cpu_s, num_events = time.perf_counter(), meter.read_s(), sum(s.num_events for s in streams)
        await asyncio.sleep(window_s)
        wall_s, cpu_s = time.perf_counter() - started_s, meter.read_s() - cpu_s
        num_events = sum(stream.num_events for stream in streams) - num_events
    if any(stream.ended.done() for stream in streams):
        raise RuntimeError("a stream ended before the measurement did: ask for more tokens")
    for stream in streams:
        stream.close()
    return WindowResult(num_events, wall_s, cpu_s)


async def _one_by_one(load: Load, num_requests: int) -> tuple[float, ...]:
    times: list[float] = []
    for _ in range(num_requests):
        times += (await _burst(load)).ttft_s
    return tuple(times)


async def _events(load: Load) -> list[dict[str, Any]]:
    async with asyncio.timeout(_TIMEOUT_S):
        (stream,) = await _open(load)
        kept = stream.kept = []
        await stream.ended
    *events, done, rest = b"".join(kept).split(b"\n\n")
    if (done, rest) != (b"data: [DONE]", b""):
        raise RuntimeError(f"a stream ended with {done + rest!r}")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def burst(load: Load) -> BurstResult:
    """All streams from beginning to end. Raises RuntimeError if one isn't complete."""
    return asyncio.run(_burst(load))


def window(load: Load, server_pid: int, settle_s: float, window_s: float) -> WindowResult:
    """`window_s` seconds out of the middle of all streams, from `settle_s` after the last has begun; then hangs up."""
    return asyncio.run(_window(load, server_pid, settle_s, window_s))


def one_by_one(load: Load, num_requests: int) -> tuple[float, ...]:
    """Seconds to the first event of each request of a load with one stream, one after the other, a connection each."""
    return asyncio.run(_one_by_one(load, num_requests))


def events_of(load: Load) -> list[dict[str, Any]]:
    """Every event but [DONE] of a load with one stream, parsed."""
    return asyncio.run(_events(load))
