"""The hub spreads an engine's output; no socket here."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ManualClock, ScriptedEngine, block, make_request, until

from replicas.contract import Delta, EngineStats, ErrorInfo, FinishReason, KVEvents, StepOutput
from replicas.errors import EngineError, OverloadedError, ReplicaLostError, RequestError
from replicas.stream_hub import StreamHub


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hub(engine, clock) -> StreamHub:
    hub = StreamHub(engine, clock)
    engine.start(hub.publish)
    return hub


class Mirror:
    """A subscriber that rebuilds the cache from the snapshot it began with and the events since."""

    def __init__(self, hub: StreamHub) -> None:
        hub.subscribe(self)
        snapshot = hub.snapshot()
        self.sequence, self.blocks = snapshot.sequence, set(snapshot.hashes)
        self.reports = []

    def on_events(self, events):
        assert events.sequence == self.sequence + 1
        self.sequence = events.sequence
        if events.cleared:
            self.blocks.clear()
        self.blocks -= set(events.removed)
        self.blocks |= set(events.stored)

    def on_report(self, stats):
        self.reports.append(stats.steps_total)


# Streams


def test_each_consumer_gets_its_own_deltas_until_the_last(engine, hub):
    got = {"a": [], "b": []}
    for name, deltas in got.items():
        hub.open(make_request(name), deltas.append)
    engine.emit("a", 1)
    engine.emit("b", 2, finish=FinishReason.STOP)
    engine.step()
    engine.tokens("a", 3)
    assert got == {"a": [Delta("a", (1,)), Delta("a", (3,))], "b": [Delta("b", (2,), FinishReason.STOP)]}
    assert hub.num_streams == 1


def test_an_aborted_stream_hears_nothing_more(engine, hub):
    got = []
    hub.open(make_request("a"), got.append)
    hub.abort("a", FinishReason.STOP)
    hub.abort("a")
    engine.step()
    assert engine.aborted == {"a": FinishReason.STOP}
    assert got == []
    assert hub.num_streams == 0


def test_a_finished_stream_is_not_aborted_in_the_engine(engine, hub):
    hub.open(make_request("a"), lambda delta: None)
    engine.tokens("a", 1, finish=FinishReason.LENGTH)
    hub.abort("a")
    assert engine.aborted == {}


def test_a_request_that_the_engine_refuses_leaves_nothing_behind(engine, hub):
    engine.refusal = OverloadedError("full")
    with pytest.raises(OverloadedError):
        hub.open(make_request("a"), lambda delta: None)
    assert hub.num_streams == 0
    engine.refusal = None
    hub.open(make_request("a"), lambda delta: None)


def test_an_id_in_use_is_refused_and_its_stream_goes_on(engine, hub):
    got = []
    hub.open(make_request("a"), got.append)
    with pytest.raises(RequestError, match="in use"):
        hub.open(make_request("a"), lambda delta: None)
    engine.tokens("a", 1)
    assert got == [Delta("a", (1,))]


async def test_the_iterator_ends_after_the_last_delta(engine, hub):
    async def read():
        return [delta.token_ids async for delta in hub.stream(make_request("a"))]

    task = asyncio.create_task(read())
    await until(lambda: "a" in engine.submitted)
    engine.tokens("a", 1)
    await until(lambda: hub.num_streams == 1)
    engine.tokens("a", 2)
    engine.tokens("a", 3, finish=FinishReason.STOP)
    assert [token for ids in await task for token in ids] == [1, 2, 3]
    assert engine.aborted == {}


async def test_the_iterator_merges_what_came_while_its_reader_was_busy(engine, hub):
    stream = hub.stream(make_request("a"))
    first = asyncio.create_task(anext(stream))
    await until(lambda: "a" in engine.submitted)
    engine.tokens("a", 1)
    assert (await first).token_ids == (1,)
    for token in (2, 3, 4):
        engine.tokens("a", token)
    assert (await anext(stream)).token_ids == (2, 3, 4)
    await stream.aclose()


async def test_a_reader_that_leaves_early_aborts_the_request(engine, hub):
    stream = hub.stream(make_request("a"))
    first = asyncio.create_task(anext(stream))
    await until(lambda: "a" in engine.submitted)
    engine.tokens("a", 1)
    await first
    await stream.aclose()
    assert engine.aborted == {"a": FinishReason.ABORT}


async def test_a_reader_that_is_cancelled_aborts_the_request(engine, hub):
    task = asyncio.create_task(anext(hub.stream(make_request("a"))))
    await until(lambda: "a" in engine.submitted)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted == {"a": FinishReason.ABORT}


# An engine that failed


def test_the_requests_of_a_failed_engine_are_lost_with_their_replica_and_not_to_blame(engine, hub):
    got = []
    hub.open(make_request("a"), got.append)
    engine.emit("a", finish=FinishReason.ERROR, error=ErrorInfo("EngineError", "the engine failed"))
    engine.failed = "its books contradict each other"
    engine.step()
    [delta] = got
    assert (delta.finish_reason, delta.error.name, delta.error.code) == (FinishReason.ERROR, "ReplicaLostError", "replica_lost")


def test_an_error_of_one_request_is_its_own_while_the_engine_goes_on(engine, hub):
    got = []
    hub.open(make_request("a"), got.append)
    engine.emit("a", finish=FinishReason.ERROR, error=ErrorInfo("EngineError", "the engine failed on this request"))
    engine.step()
    assert got[0].error.name == "EngineError"


def test_a_failed_engine_refuses_nobody_for_good(engine, hub):
    engine.failed, engine.refusal = "its books contradict each other", EngineError("the engine has failed")
    with pytest.raises(ReplicaLostError):
        hub.open(make_request("a"), lambda delta: None)
    assert hub.num_streams == 0


# Cache events

numbers = st.lists(st.integers(0, 15), max_size=5)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), numbers),
        st.tuples(st.just("remove"), numbers),
        st.tuples(st.just("clear"), st.just([])),
        st.tuples(st.just("subscribe"), st.just([])),
        st.tuples(st.just("step"), st.just([])),
    ),
    max_size=40,
)


@given(operations)
def test_a_snapshot_and_the_events_after_it_give_the_cache_whenever_one_subscribes(operations):
    """And what the hub mirrors is what a plain set says."""
    engine = ScriptedEngine()
    hub = StreamHub(engine, ManualClock())
    engine.start(hub.publish)
    mirrors = [Mirror(hub)]
    expected = set()
    stored, removed, cleared = set(), set(), False
    for name, blocks in [*operations, ("step", [])]:
        names = {block(number) for number in blocks}
        if name == "store":
            engine.store(*names)
            stored |= names
        elif name == "remove":
            engine.remove(*names)
            removed |= names
        elif name == "clear":
            engine.clear_cache()
            cleared = True
        elif name == "subscribe":
            mirrors.append(Mirror(hub))
        else:
            engine.step()
            expected = ((set() if cleared else expected) - removed) | stored
            stored, removed, cleared = set(), set(), False
        assert set(hub.snapshot().hashes) == expected
    for mirror in mirrors:
        assert mirror.blocks == expected
        assert mirror.sequence == hub.snapshot().sequence


def test_events_without_a_step_reach_subscribers_and_no_stream(engine, hub, clock):
    """vLLM tells of its cache a little later than of the tokens."""
    got = []
    hub.open(make_request("a"), got.append)
    mirror = Mirror(hub)
    hub.publish(StepOutput((), KVEvents(1, stored=(block(1),)), EngineStats(num_running=1)))
    hub.publish(StepOutput((), KVEvents(2, stored=(block(2),), removed=(block(1),)), EngineStats(num_running=1)))
    assert mirror.blocks == {block(2)}
    assert mirror.reports == [], "no denser than their period"
    assert got == []


def test_a_gap_in_the_engines_events_is_our_own_bug(engine, hub):
    engine._sequence = 5
    engine.store(block(1))
    with pytest.raises(AssertionError, match="6 follow 0"):
        engine.step()


def test_who_unsubscribes_hears_nothing_more(engine, hub):
    mirror = Mirror(hub)
    hub.unsubscribe(mirror)
    hub.unsubscribe(mirror)
    engine.store(block(1))
    engine.step()
    assert mirror.blocks == set()


# Reports


def test_reports_are_no_denser_than_their_period(engine, hub, clock):
    mirror = Mirror(hub)
    for _ in range(100):
        clock.now += 0.01
        engine.step(num_running=1)
    assert len(mirror.reports) == pytest.approx(20, abs=1)


def test_the_latest_report_goes_out_when_its_time_comes_without_another_step(engine, hub, clock):
    mirror = Mirror(hub)
    clock.now += 0.06
    engine.step(num_running=1)
    clock.now += 0.01
    engine.step(num_running=1)
    assert mirror.reports == [1]
    clock.now += 0.05
    hub.poll_reports()
    hub.poll_reports()
    assert mirror.reports == [1, 2]


def test_going_idle_is_reported_at_once(engine, hub, clock):
    mirror = Mirror(hub)
    clock.now += 0.06
    engine.step(num_running=1)
    clock.now += 0.001
    engine.step(num_running=0)
    assert mirror.reports == [1, 2]


def test_an_idle_engine_still_reports_each_second(hub, clock):
    mirror = Mirror(hub)
    for _ in range(20):
        clock.now += 0.25
        hub.poll_reports()
    assert len(mirror.reports) == 5
    assert hub.stats.num_blocks_total == 100  # known before the first step
