"""A ReplicaFeed keeps its listener's picture of a replica true, whatever happens to the connection."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ManualClock, ScriptedEngine, block, until

from replicas.stream_hub import StreamHub
from replicas.stream_server import StreamServer
from router.feed import ReplicaFeed

SECRET = b"the deployment's secret"


class Picture:
    """A listener. `num_to_lose` events are forgotten, as if they had never come."""

    def __init__(self) -> None:
        self.blocks: set[bytes] | None = None
        self.sequence = -1
        self.heard: list[str] = []
        self.num_to_lose = 0

    def on_snapshot(self, replica, sequence, hashes):
        self.heard.append("snapshot")
        self.sequence, self.blocks = sequence, set(hashes)

    def on_events(self, replica, events):
        if self.num_to_lose:
            self.num_to_lose -= 1
            return True
        if self.blocks is None or events.sequence != self.sequence + 1:
            self.heard.append("gap")
            return False
        self.sequence = events.sequence
        if events.cleared:
            self.blocks.clear()
        self.blocks = (self.blocks - set(events.removed)) | set(events.stored)
        return True

    def on_report(self, replica, stats):
        assert replica == "replica-1"
        if "report" not in self.heard:
            self.heard.append("report")

    def on_lost(self, replica):
        self.heard.append("lost")
        self.blocks = None

    def shows(self, hub: StreamHub) -> bool:
        snapshot = hub.snapshot()
        return self.sequence == snapshot.sequence and self.blocks == set(snapshot.hashes)


class Rig:
    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.hub = StreamHub(self.engine, ManualClock())
        self.engine.start(self.hub.publish)
        self.picture = Picture()

    async def __aenter__(self) -> Rig:
        self.server = StreamServer(self.hub, SECRET, "boot-1", on_orphaned_slot=lambda slot: None)
        self.endpoint = await self.server.start("127.0.0.1")
        self.feed = ReplicaFeed("replica-1", self.endpoint, SECRET, self.picture, min_backoff_s=0.001, max_backoff_s=0.01)
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.feed.close()
        await self.server.close()

    def drop_connections(self) -> None:
        for connection in self.server.connections.copy():
            connection.abort()


@pytest.fixture
async def rig():
    async with Rig() as rig:
        yield rig


async def test_a_feed_begins_with_what_is_cached_and_how_busy_the_replica_is(rig):
    rig.engine.store(*map(block, range(20_000)))  # several frames
    rig.engine.step()
    rig.feed.start()
    await until(lambda: "report" in rig.picture.heard)
    assert rig.picture.heard == ["snapshot", "report"]
    assert rig.picture.shows(rig.hub)


async def test_an_empty_cache_is_a_snapshot_too(rig):
    rig.feed.start()
    await until(lambda: rig.picture.blocks is not None)
    assert rig.picture.blocks == set()


async def test_after_a_gap_a_new_snapshot_comes(rig):
    rig.feed.start()
    await until(lambda: rig.picture.shows(rig.hub))
    rig.picture.num_to_lose = 1
    for number in range(10):
        rig.engine.store(block(number))
        rig.engine.step()
    await until(lambda: rig.picture.shows(rig.hub))
    assert [word for word in rig.picture.heard if word != "report"] == ["snapshot", "gap", "snapshot"]
    rig.engine.remove(block(3))
    rig.engine.step()
    await until(lambda: rig.picture.shows(rig.hub))
    assert rig.picture.heard.count("snapshot") == 2


async def test_a_lost_connection_is_announced_and_made_again(rig):
    rig.feed.start()
    await until(lambda: rig.picture.shows(rig.hub))
    rig.drop_connections()
    rig.engine.store(block(1))
    rig.engine.step()
    await until(lambda: rig.picture.shows(rig.hub))
    assert [word for word in rig.picture.heard if word != "report"] == ["snapshot", "lost", "snapshot"]


async def test_a_replica_that_is_gone_is_announced_once(rig):
    rig.feed.start()
    await until(lambda: rig.picture.shows(rig.hub))
    await rig.server.close()
    await until(lambda: "lost" in rig.picture.heard)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert rig.picture.heard.count("lost") == 1


async def test_a_restarted_replica_on_the_same_port_is_not_listened_to(rig):
    rig.server.boot_id = "boot-2"
    rig.feed.start()
    for _ in range(1000):
        await asyncio.sleep(0)
    assert rig.picture.heard == []


async def test_a_closed_feed_says_nothing_more_and_leaves_no_subscription(rig):
    rig.feed.start()
    await until(lambda: rig.picture.shows(rig.hub))
    await rig.feed.close()
    await rig.feed.close()
    heard = list(rig.picture.heard)
    await until(lambda: not rig.server.connections)
    rig.engine.store(block(1))
    rig.engine.step()
    assert rig.picture.heard == heard
    assert rig.hub._subscribers == []


operations = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["store", "remove"]), st.lists(st.integers(0, 15), min_size=1, max_size=5)),
        st.tuples(st.sampled_from(["clear", "drop", "lose", "turn"]), st.just([])),
    ),
    max_size=30,
)


@settings(max_examples=30, deadline=None)
@given(operations)
def test_whatever_breaks_the_picture_becomes_true_again(operations):
    async def scenario() -> None:
        async with Rig() as rig:
            rig.feed.start()
            for name, numbers in operations:
                if name == "store":
                    rig.engine.store(*map(block, numbers))
                elif name == "remove":
                    rig.engine.remove(*map(block, numbers))
                elif name == "clear":
                    rig.engine.clear_cache()
                elif name == "drop":
                    rig.drop_connections()
                elif name == "lose":
                    rig.picture.num_to_lose = 1
                else:
                    await asyncio.sleep(0)
                rig.engine.step()
            await until(lambda: rig.picture.blocks is not None)
            rig.picture.num_to_lose = 0
            # A loss shows with the next event.
            while not rig.picture.shows(rig.hub):
                rig.engine.store(block(99))
                rig.engine.step()
                for _ in range(20):
                    await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), 10))
