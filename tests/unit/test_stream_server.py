"""Streams between a StreamClient and a StreamServer over loopback sockets."""

from __future__ import annotations

import asyncio

import pytest
from raw_peer import RawPeer
from scripted_engine import make_request, until
from token_rig import SECRET, TokenRig, read

from replicas import wire
from replicas.contract import Delta, FinishReason
from replicas.errors import ContextLengthError, EngineError, OverloadedError, ReplicaLostError, RequestError


@pytest.fixture
async def rig():
    async with TokenRig() as rig:
        yield rig


# Tokens


async def test_many_streams_share_one_connection_and_each_gets_its_own_tokens(rig):
    names = [f"r{i}" for i in range(50)]
    streams = await asyncio.gather(*(rig.client.open(rig.endpoint, make_request(name)) for name in names))
    tasks = [asyncio.create_task(read(stream)) for stream in streams]
    for step in range(20):
        for i, name in enumerate(names):
            rig.engine.emit(name, 1000 * i + step, finish=FinishReason.LENGTH if step == 19 else None)
        rig.engine.step()
        await asyncio.sleep(0)
    assert await asyncio.gather(*tasks) == [[1000 * i + step for step in range(20)] for i in range(50)]
    assert len(rig.server.connections) == 1
    assert rig.server.num_streams == 0
    assert rig.engine.aborted == {}


async def test_all_facts_of_a_delta_arrive(rig):
    [stream] = await rig.open("a")
    rig.engine.emit("a", 5, num_cached_tokens=48, queue_s=0.5)
    rig.engine.step()
    assert await stream.next() == Delta("a", (5,), num_cached_tokens=48, queue_s=0.5)
    rig.engine.emit("a", 2, finish=FinishReason.STOP, stop_token_id=2)
    rig.engine.step()
    assert await stream.next() == Delta("a", (2,), FinishReason.STOP, stop_token_id=2)


async def test_a_reader_gets_everything_that_came_while_it_was_busy_at_once(rig):
    [stream] = await rig.open("a")
    for token in range(5):
        rig.engine.tokens("a", token)
    assert (await stream.next()).token_ids == (0, 1, 2, 3, 4)


async def test_the_request_arrives_as_it_was_sent(rig):
    request = make_request("a", num_prompt_tokens=100_000)
    await rig.client.open(rig.endpoint, request)
    assert rig.engine.submitted == {"a": request}


def test_tokens_flow_on_the_event_loop_that_serve_uses():
    uvloop = pytest.importorskip("uvloop")

    async def scenario():
        async with TokenRig(window_tokens=4) as rig:
            [stream] = await rig.open("a")
            rig.engine.tokens("a", *range(99), finish=FinishReason.LENGTH)
            return await read(stream)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scenario()) == list(range(99))


# Refusals


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (ContextLengthError("too long", param="messages"), ContextLengthError),
        (OverloadedError("full", retry_after_s=7.2), OverloadedError),
        (ValueError("secret detail"), EngineError),
    ],
)
async def test_what_the_engine_refuses_is_raised_by_open_and_the_connection_lives(rig, refusal, expected):
    [other] = await rig.open("other")
    rig.engine.refusal = refusal
    with pytest.raises(expected) as raised:
        await rig.open("a", slot="slot")
    assert "secret detail" not in raised.value.message
    assert raised.value.param == getattr(refusal, "param", None)
    assert getattr(raised.value, "retry_after_s", None) == getattr(refusal, "retry_after_s", None)
    rig.engine.tokens("other", 1, finish=FinishReason.STOP)
    assert await read(other) == [1]
    assert rig.orphaned == []


async def test_an_id_that_is_in_use_is_refused(rig):
    await rig.open("a")
    with pytest.raises(RequestError, match="in use"):
        await rig.open("a")


# Aborts


async def test_an_abort_reaches_the_engine_and_ends_the_reader(rig):
    [stream] = await rig.open("a")
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.abort(FinishReason.STOP)
    stream.abort()
    assert await waiting == Delta("a", finish_reason=FinishReason.STOP)
    await until(lambda: rig.engine.aborted)
    assert rig.engine.aborted == {"a": FinishReason.STOP}
    assert rig.server.num_streams == 0


async def test_leaving_the_context_early_aborts_and_after_the_end_does_not(rig):
    early, late = await rig.open("early", "late")
    async with early, late:
        rig.engine.tokens("late", 1, finish=FinishReason.STOP)
        assert await read(late) == [1]
    await until(lambda: rig.engine.aborted)
    assert rig.engine.aborted == {"early": FinishReason.ABORT}


async def test_an_abort_that_crosses_the_last_token_hurts_nobody(rig):
    await rig.open("a")
    [other] = await rig.open("other")
    [connection] = rig.server.connections
    rig.engine.tokens("a", 1, finish=FinishReason.STOP)
    connection.on_message(wire.Abort(1, FinishReason.ABORT))
    rig.engine.tokens("other", 2, finish=FinishReason.STOP)
    assert await read(other) == [2]
    assert rig.engine.aborted == {}


async def test_a_caller_that_is_cancelled_while_it_opens_leaves_no_stream_behind(rig):
    await rig.open("first")
    task = asyncio.create_task(rig.client.open(rig.endpoint, make_request("a")))
    await until(lambda: "a" in rig.engine.submitted)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: "a" in rig.engine.aborted)
    assert rig.server.num_streams == 1


# Lost peers


async def test_when_the_client_dies_its_streams_are_aborted_and_its_slots_given_back(rig):
    """A Serve slot has no expiry: only the replica can give back what a dead ingress had reserved."""
    await rig.open("a", slot="slot-a")
    await rig.open("b", slot="slot-b")
    await rig.open("b2", slot="slot-b")  # another choice of the same request
    await rig.open("c")
    [done] = await rig.open("done", slot="slot-done")
    rig.engine.tokens("done", 1, finish=FinishReason.STOP)
    assert await read(done) == [1]
    await rig.client.close()
    await until(lambda: len(rig.orphaned) == 3)
    assert set(rig.engine.aborted) == {"a", "b", "b2", "c"}
    assert sorted(rig.orphaned) == ["slot-a", "slot-b", "slot-done"]


async def test_one_slot_that_cannot_be_given_back_does_not_keep_the_others(rig):
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context["exception"]))

    def release(slot):
        rig.orphaned.append(slot)
        raise RuntimeError(slot)

    rig.server._on_orphaned_slot = release
    for name in ("a", "b"):
        await rig.open(name, slot=name)
    await rig.client.close()
    await until(lambda: len(failures) == 2)
    assert sorted(rig.orphaned) == ["a", "b"]


async def test_when_the_server_dies_every_stream_on_it_fails_after_what_had_arrived(rig):
    streams = await rig.open("a", "b", "c")
    rig.engine.tokens("a", 1)
    await until(lambda: streams[0]._arrived)
    rig.drop_connections()
    await until(lambda: streams[0]._error)
    assert (await streams[0].next()).token_ids == (1,)
    for stream in streams:
        with pytest.raises(ReplicaLostError):
            await stream.next()
        stream.abort()
    assert set(rig.engine.aborted) == {"a", "b", "c"}


async def test_after_a_lost_connection_the_next_stream_makes_a_new_one(rig):
    [lost] = await rig.open("a")
    rig.drop_connections()
    with pytest.raises(ReplicaLostError):
        await lost.next()
    [stream] = await rig.open("b")
    rig.engine.tokens("b", 1, finish=FinishReason.STOP)
    assert await read(stream) == [1]


async def test_a_client_that_falls_silent_loses_its_streams(rig):
    peer = await RawPeer.connect(rig.endpoint, SECRET)
    await peer.send(wire.Submit(1, make_request("a"), "slot", 8))
    await until(lambda: rig.server.num_streams == 1)
    for _ in range(300):
        rig.server.tick()
    assert rig.engine.aborted == {}
    rig.server.tick()
    assert rig.engine.aborted == {"a": FinishReason.ABORT}
    await until(lambda: rig.orphaned == ["slot"])
    assert await peer.is_closed()


async def test_pings_keep_a_connection_alive_that_has_nothing_to_say(rig):
    await rig.open("a")
    [task] = rig.client._connections.values()
    link = task.result()._link
    for _ in range(5):
        for _ in range(200):
            rig.server.tick()
        link.ping()
        await until(lambda: link.num_silent_ticks == 0 and all(c.num_silent_ticks == 0 for c in rig.server.connections))
    assert rig.engine.aborted == {}


async def test_a_server_that_answers_no_ping_is_lost(rig):
    [stream] = await rig.open("a")
    [task] = rig.client._connections.values()
    for _ in range(4):
        task.result()._link.ping()
    with pytest.raises(ReplicaLostError):
        await stream.next()


# Draining


async def test_draining_refuses_new_streams_and_waits_for_the_last_token_of_the_old(rig):
    [stream] = await rig.open("a")
    drained = asyncio.create_task(rig.server.drain())
    await asyncio.sleep(0)
    with pytest.raises(ReplicaLostError) as raised:
        await rig.open("b")
    assert raised.value.code == "replica_draining"
    assert not drained.done()
    rig.engine.tokens("a", 1, finish=FinishReason.STOP)
    await drained
    await rig.server.close()
    assert await read(stream) == [1]


async def test_with_nothing_open_draining_is_immediate(rig):
    await rig.server.drain()
