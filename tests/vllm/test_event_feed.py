"""The socket of KV events, fed by vLLM's own publisher: nothing is missed, told twice or out of order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from vllm.distributed.kv_events import BlockRemoved, KVEventBatch, ZmqEventPublisher

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

    def spoil(self) -> None:
        """A batch that nobody can read."""
        self._vllms._event_queue.put({"not": "a batch"})
        self._num_published += 1

    def shutdown(self) -> None:
        self._vllms.shutdown()


class Listener:
    def __init__(self, publisher: Publisher) -> None:
        self.heard: list[int | str] = []
        self._news = asyncio.Event()
        feed = EventFeed(publisher.endpoint, publisher.replay_endpoint)
        self.task = asyncio.create_task(feed.run(self._on_batch, lambda: self._hear("lost")))

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
        self._hear(int.from_bytes(event.block_hashes[0], "big"))

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
    made = Listener(publisher)
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_batches_come_once_and_in_order(publisher, listener):
    await listener.connected(publisher)
    first = listener.heard[-1] + 1
    publisher.publish(20)
    await listener.until(first + 19)
    assert listener.heard == list(range(first + 20))


async def test_who_listens_late_hears_what_was_before(publisher):
    publisher.publish(3)
    await asyncio.sleep(0.3)  # they are out, to nobody
    late = Listener(publisher)
    await late.connected(publisher)
    assert late.heard[:3] == [0, 1, 2]
    late.task.cancel()


async def test_what_the_publisher_no_longer_has_is_lost_and_the_rest_goes_on(publisher):
    publisher.publish(2 * BUFFER)
    await asyncio.sleep(0.5)
    late = Listener(publisher)
    await late.connected(publisher)
    await late.until(late.heard[-1])
    assert "lost" in late.heard
    assert 0 not in late.heard
    after = late.heard[-1]
    assert isinstance(after, int)
    publisher.publish(2)
    await late.until(after + 2)
    assert late.heard[-3:] == [after, after + 1, after + 2]
    assert late.heard.count("lost") == 1
    late.task.cancel()


async def test_a_batch_that_can_t_be_read_is_lost_alone(publisher, listener):
    await listener.connected(publisher)
    before = listener.heard[-1]
    publisher.spoil()
    publisher.publish(1)
    await listener.until(before + 2)
    assert listener.heard[-2:] == ["lost", before + 2]
