"""One end of a token connection: frames in, frames out, silence noticed. The two ends are stream_server.py and link.py.

Everything sent in one turn of the event loop goes out in one write. Silence is counted in ticks of the owner's timer, not in
seconds: a process that was stopped for a minute finds what arrived meanwhile and does not blame its peers.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import msgspec

from replicas.wire import FrameSplitter, Message, WireError, encode_frame

_logger = logging.getLogger(__name__)

# More than this unsent, and new tokens wait (merged) at their stream instead of in the transport.
_HIGH_WATER_BYTES = 256 * 1024


class Channel(asyncio.Protocol):
    """Subclasses say what a message means (`on_message`) and what the end of the connection does (`on_closed`).

    `decoder` and the limit on frames may be changed by `on_message`: they hold from the next frame on.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any], max_frame_bytes: int) -> None:
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()  # done when the socket is closed, too
        self.decoder = decoder
        self.frames = FrameSplitter(max_frame_bytes)
        self.num_silent_ticks = 0
        self.is_paused = False
        self._outbox: list[bytes] = []
        self._flush_scheduled = False
        self._transport: asyncio.Transport | None = None

    def on_open(self) -> None:
        """The connection is made."""

    def on_message(self, message: Any) -> None:
        """Raises WireError if the other end may not say this now."""
        raise NotImplementedError

    def on_closed(self) -> None:
        """The connection is gone; called once."""

    def before_flush(self) -> None:
        """The last chance to `send` something with this turn's write."""

    def send(self, message: Message) -> None:
        """Raises WireError if `message` is too large. On a closed channel it is dropped."""
        frame = encode_frame(message)
        if not self.closed:
            self._outbox.append(frame)
            self.schedule_flush()

    def schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """What was sent still goes out."""
        self._flush()
        self._end()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._end()
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        if not self.closed:
            self.closed = True
            self._outbox.clear()
            self.on_closed()

    def _flush(self) -> None:
        if self.closed or self._transport is None:
            self._flush_scheduled = False
            return
        self.before_flush()
        self._flush_scheduled = False  # only now: what `before_flush` sends needs no flush of its own
        if self._outbox:
            self._transport.write(b"".join(self._outbox))
            self._outbox.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self.on_open()

    def data_received(self, data: bytes) -> None:
        self.num_silent_ticks = 0
        try:
            for frame in self.frames.feed(data):
                self.on_message(self.decoder.decode(frame))
        except (WireError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            _logger.warning("closing a token connection after a bad frame: %s", error)
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self.lost.set_result(None)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False
        self.schedule_flush()
