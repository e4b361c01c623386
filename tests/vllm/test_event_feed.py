"""The socket of KV events, fed by vLLM's own publisher: nothing is missed, told twice or out of order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import zmq
from vllm.distributed.kv_events import BlockRemoved, KVEventBatch, ZmqEventPublisher

from replicas.vllm_support import event_feed
from replicas.vllm_support.event_feed import EventFeed

BUFFER = 8


class Publisher:
    """Batches that are told apart by the block that they remove."""

    def __init__(self, folder: Path) -> None:
        self.endpoint, self.replay_endpoint = (f"ipc://{folder}/{name}" for name in ("events", "replay"))
        self._vllms = ZmqEventPublisher(0, self.endpoint, self.replay_endpoint, buffer_steps=BUFFER)
        self._num_published = 0

    def publish(self, num_batches: int) -> None:
        for _ in range(num_batches):
            block = BlockRemoved(block_hashes=[self._num_published.to_bytes(4, "big")], medium="GPU", group_idx=0)
            self._vllms.publish(KVEventBatch(ts=0.0, events=[block]))
            self._num_published += 1

    def publish_unheard(self, num_batches: int) -> None:
        """To nobody, as where a connection broke. They are kept like others."""
        self._publish_to(_Nobody(), num_batches)

    def publish_cut(self, num_batches: int) -> None:
        """Messages that lack their last part. They are kept whole."""
        self._publish_to(_Cut(self._vllms._pub), num_batches)

    def _publish_to(self, socket: object, num_batches: int) -> None:
        self.settle()
        heard, self._vllms._pub = self._vllms._pub, socket
        self.publish(num_batches)
        self.settle()
        self._vllms._pub = heard

    def settle(self) -> None:
        """Until all is out: who listens from now on hears it only by asking."""
        until_s = time.monotonic() + 10
        while self._num_published and (not self._vllms._buffer or self._vllms._buffer[-1][0] < self._num_published - 1):
            assert time.monotonic() < until_s, "the publisher is stuck"
            time.sleep(1e-3)

    def spoil(self) -> None:
        """A batch that nobody can read."""
        self._vllms._event_queue.put({"not": "a batch"})
        self._num_published += 1

    @property
    def last(self) -> int:
        return self._num_published - 1

    def shutdown(self) -> None:
        self._vllms.shutdown()


class _Nobody:
    def send_multipart(self, frames: tuple[bytes, ...]) -> None:
        pass


class _Cut:
    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket

    def send_multipart(self, frames: tuple[bytes, ...]) -> None:
        self._socket.send_multipart(frames[:2])


class Listener:
    """`heard` are the numbers of batches, and "lost". It fails on those in `fails_on`."""

    def __init__(self, publisher: Publisher, replay_endpoint: str | None = None) -> None:
        self.heard: list[int | str] = []
        self.fails_on: set[int] = set()
        self._news = asyncio.Event()
        self.feed = EventFeed(publisher.endpoint, replay_endpoint or publisher.replay_endpoint)
        self.task = asyncio.create_task(self.feed.run(self._on_batch, lambda: self._hear("lost")))

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def until(self, last: int | str) -> None:
        async with asyncio.timeout(10):
            while not self.heard or self.heard[-1] != last:
                self._news.clear()
                await self._news.wait()

    async def connected(self, publisher: Publisher) -> None:
        """Publishing reaches only whom it knows: publish until something is heard."""
        async with asyncio.timeout(10):
            while not self.heard:
                publisher.publish(1)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self._news.wait()

    def _on_batch(self, events: list) -> None:
        [event] = events
        number = int.from_bytes(event.block_hashes[0], "big")
        if number in self.fails_on:
            raise KeyError(number)
        self._hear(number)

    def _hear(self, what: int | str) -> None:
        self.heard.append(what)
        self._news.set()


@pytest.fixture
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publisher]:
    made = Publisher(tmp_path_factory.mktemp("z"))
    yield made
    made.shutdown()


@pytest.fixture
async def listener(publisher: Publisher) -> AsyncIterator[Listener]:
    """One that is connected, and has heard of all so far."""
    made = Listener(publisher)
    await made.connected(publisher)
    await made.until(publisher.last)
    yield made
    await made.close()


@pytest.fixture
async def late(publisher: Publisher) -> AsyncIterator[Listener]:
    """One that connects when more has been published than is kept."""
    publisher.publish(2 * BUFFER)
    publisher.settle()
    made = Listener(publisher)
    await made.connected(publisher)
    await made.until(publisher.last)
    yield made
    await made.close()


async def test_batches_come_once_and_in_order(publisher, listener):
    publisher.publish(20)
    await listener.until(publisher.last)
    assert listener.heard == list(range(publisher.last + 1))


async def test_who_listens_late_hears_with_the_next_batch_what_was_before(publisher):
    publisher.publish(3)
    publisher.settle()
    late = Listener(publisher)
    await late.connected(publisher)
    await late.until(publisher.last)
    assert late.heard == list(range(publisher.last + 1))
    await late.close()


async def test_what_was_missed_is_asked_for(publisher, listener):
    for _ in range(2):
        publisher.publish_unheard(BUFFER - 2)  # and two more are kept before it answers
        publisher.publish(2)
        await listener.until(publisher.last)
    assert listener.heard == list(range(publisher.last + 1))


async def test_what_the_publisher_no_longer_has_is_lost_once_and_the_rest_goes_on(publisher, late):
    assert late.heard[0] == "lost"
    first = late.heard[1]
    publisher.publish(2)
    await late.until(publisher.last)
    assert late.heard == ["lost", *range(first, publisher.last + 1)]
    assert first >= 2 * BUFFER  # what was kept from before the loss is of no use


async def test_a_gap_that_can_t_be_filled_is_lost_once_and_the_rest_goes_on(publisher, listener):
    before = publisher.last
    publisher.publish_unheard(BUFFER + 1)
    publisher.publish(2)
    await listener.until(publisher.last)
    assert listener.heard == [*range(before + 1), "lost", publisher.last - 1, publisher.last]


async def test_a_publisher_that_does_not_answer_is_not_waited_for(publisher, tmp_path, monkeypatch):
    monkeypatch.setattr(event_feed, "_REPLAY_TIMEOUT_S", 0.05)
    publisher.publish(1)
    publisher.settle()
    listener = Listener(publisher, f"ipc://{tmp_path}/nobody")
    await listener.connected(publisher)
    await listener.until(publisher.last)
    assert listener.heard == ["lost", *range(listener.heard[1], publisher.last + 1)]
    await listener.close()


async def test_a_batch_that_can_t_be_read_is_lost_alone(publisher, listener):
    before = publisher.last
    publisher.spoil()
    publisher.publish(1)
    await listener.until(publisher.last)
    assert listener.heard == [*range(before + 1), "lost", publisher.last]


async def test_a_message_of_another_form_is_asked_for_again_and_logged_once(publisher, listener, caplog):
    publisher.publish_cut(3)
    publisher.publish(1)
    await listener.until(publisher.last)
    assert listener.heard == list(range(publisher.last + 1))
    assert [record.message for record in caplog.records if record.name == event_feed.__name__] == [
        "a message of vLLM's KV events has another form; it is asked for again; further ones are not logged"
    ]


async def test_readers_that_fail_alike_are_logged_once(publisher, listener, caplog):
    listener.fails_on.update(range(publisher.last + 1, publisher.last + 4))
    publisher.publish(4)
    await listener.until(publisher.last)
    assert listener.heard.count("lost") == 3
    assert sum(record.name == event_feed.__name__ for record in caplog.records) == 1


async def test_a_batch_that_its_reader_fails_on_is_lost_alone(publisher, listener):
    before = publisher.last
    listener.fails_on.add(before + 1)
    publisher.publish(2)
    await listener.until(publisher.last)
    assert listener.heard == [*range(before + 1), "lost", publisher.last]


async def test_whose_task_is_cancelled_closes_its_sockets(publisher, listener):
    await listener.close()
    assert listener.feed._context.closed
