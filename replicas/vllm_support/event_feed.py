"""The socket on which vLLM publishes its KV events, read without a gap.

vLLM numbers its batches from 0, publishes them (PUB), and keeps the last ones for whoever missed some (ROUTER):

    (topic, number, batch)                       published
    request: (empty, first number wanted)        reply: (empty, topic, number, batch) ... (empty, empty, -1, empty)

numbers being 8 bytes, big-endian, signed. Source: vllm/distributed/kv_events.py, `ZmqEventPublisher`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio

from replicas.vllm_support.kv_events import batch_decoder

logger = logging.getLogger(__name__)

_REPLAY_TIMEOUT_S = 5.0
_NUMBER_BYTES = 8
_END = -1

OnBatch = Callable[[Sequence[Any]], None]


class EventFeed:
    """Make it and run it on the event loop that it reads on. Only addresses of this machine: messages carry no proof."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._next = 0
        self._told: set[str] = set()  # what was logged already: a fault of this kind comes with every step

    async def run(self, on_batch: OnBatch, on_lost: Callable[[], None]) -> None:
        """Until cancelled. Each batch is handed over once, in order; `on_lost` where some can't be had any more.

        Batches that were published before this began are asked for with the first that comes after.
        """
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)  # what is dropped here would have to be asked for
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(self._endpoint)
        try:
            while True:
                frames = await socket.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
                    self._tell_once("a message of vLLM's KV events has another form; it is asked for again")
                    continue  # its number will be missing
                await self._take(_to_int(frames[1]), frames[2], on_batch, on_lost)
        finally:
            self._context.destroy(linger=0)

    async def _take(self, number: int, payload: bytes, on_batch: OnBatch, on_lost: Callable[[], None]) -> None:
        if number < self._next:
            return  # came with a replay
        if number > self._next:
            async for missed, missed_payload in self._replay(self._next):
                if missed == self._next and missed < number:
                    self._hand_over(missed, missed_payload, on_batch, on_lost)
            if number > self._next:
                logger.error("%d batches of KV events are lost", number - self._next)
                on_lost()
        self._hand_over(number, payload, on_batch, on_lost)

    def _hand_over(self, number: int, payload: bytes, on_batch: OnBatch, on_lost: Callable[[], None]) -> None:
        self._next = number + 1
        try:
            on_batch(batch_decoder.decode(payload).events)
        except Exception as error:  # whatever is wrong with this one, the next ones must be heard
            self._tell_once(f"a batch of vLLM's KV events can't be read: {type(error).__name__}", error)
            on_lost()

    def _tell_once(self, message: str, error: Exception | None = None) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.error("%s; further ones are not logged", message, exc_info=error)

    async def _replay(self, start: int) -> AsyncIterator[tuple[int, bytes]]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(self._replay_endpoint)
        try:
            await socket.send_multipart((b"", start.to_bytes(_NUMBER_BYTES, "big")))
            async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                while True:
                    _, _, number, payload = await socket.recv_multipart()
                    if _to_int(number) == _END:
                        return
                    yield _to_int(number), payload
        except TimeoutError:
            logger.error("vLLM does not send the KV events that were missed")
        finally:
            socket.close(linger=0)


def _to_int(number: bytes) -> int:
    return int.from_bytes(number, "big", signed=True)
