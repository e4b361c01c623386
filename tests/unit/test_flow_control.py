"""A slow reader costs memory for its own tokens and nobody else's time."""

from __future__ import annotations

import asyncio

import pytest
from raw_peer import RawPeer
from scripted_engine import ManualClock, ScriptedEngine, block, make_request, until

from cluster.stream_client import StreamClient
from replicas import wire
from replicas.channel import _HIGH_WATER_BYTES
from replicas.contract import FinishReason, TokenLogprob
from replicas.stream_hub import StreamHub
from replicas.stream_server import StreamServer
from replicas.wire import Endpoint

SECRET = b"the deployment's secret"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def hub(engine) -> StreamHub:
    hub = StreamHub(engine, ManualClock())
    engine.start(hub.publish)
    return hub


@pytest.fixture
async def server(hub):
    server = StreamServer(hub, SECRET, "boot-1", on_orphaned_slot=lambda slot: None)
    yield server
    await server.close()


@pytest.fixture
async def endpoint(server) -> Endpoint:
    return await server.start("127.0.0.1")


async def _tokens_of(peer: RawPeer, stream: int) -> tuple[list[int], FinishReason | None]:
    """Of the next Tokens frame."""
    while not isinstance(message := await peer.receive(), wire.Tokens):
        pass
    for number, delta in message.full:
        if number == stream:
            return list(delta.token_ids), delta.finish_reason
    return [token for number, ids in message.plain if number == stream for token in ids], None


async def test_a_stream_without_credit_waits_and_its_neighbour_does_not(engine, server, endpoint):
    peer = await RawPeer.connect(endpoint, SECRET)
    await peer.send(wire.Submit(1, make_request("slow"), None, 4))
    await peer.send(wire.Submit(2, make_request("fast"), None, 10_000))
    await until(lambda: len(engine.submitted) == 2)
    fast = []
    for token in range(1000):
        engine.emit("slow", token)
        engine.emit("fast", token)
        engine.step()
        fast += (await _tokens_of(peer, 2))[0]
    assert fast == list(range(1000))
    engine.tokens("slow", 1000, finish=FinishReason.LENGTH)

    await peer.send(wire.Credit(1, 6))
    assert await _tokens_of(peer, 1) == (list(range(4, 10)), None)
    await peer.send(wire.Credit(1, 10_000))
    assert await _tokens_of(peer, 1) == (list(range(10, 1001)), FinishReason.LENGTH)


async def test_an_end_without_tokens_needs_no_credit(engine, server, endpoint):
    peer = await RawPeer.connect(endpoint, SECRET)
    await peer.send(wire.Submit(1, make_request("a"), None, 1))
    await until(lambda: engine.submitted)
    engine.tokens("a", 7)
    assert await _tokens_of(peer, 1) == ([7], None)
    engine.tokens("a", finish=FinishReason.ABORT)
    assert await _tokens_of(peer, 1) == ([], FinishReason.ABORT)


@pytest.mark.parametrize("window_tokens", [1, 2, 7, 512])
async def test_a_reader_that_takes_its_tokens_gets_all_of_them_whatever_the_window(engine, server, endpoint, window_tokens):
    client = StreamClient(SECRET, window_tokens=window_tokens)
    stream = await client.open(endpoint, make_request("a"))
    engine.tokens("a", *range(600))
    engine.tokens("a", *range(600, 700), finish=FinishReason.LENGTH)
    got = []
    async for delta in stream:
        assert len(delta.token_ids) <= window_tokens
        got += delta.token_ids
    assert got == list(range(700))
    await client.close()


async def test_a_stalled_reader_holds_no_more_than_its_window_and_the_rest_waits_at_the_replica(engine, server, endpoint):
    client = StreamClient(SECRET, window_tokens=8)
    stalled = await client.open(endpoint, make_request("stalled"))
    other = await client.open(endpoint, make_request("other"))
    for token in range(2000):
        engine.emit("stalled", token)
        engine.emit("other", token)
        engine.step()
        assert (await other.next()).token_ids == (token,)
    assert (await stalled.next()).token_ids == tuple(range(8))
    await client.close()


async def test_a_client_that_does_not_read_its_socket_fills_no_memory_but_its_streams_own(engine, server, endpoint):
    """The kernel's buffers fill, then the transport's up to its limit, then tokens wait merged at their stream."""
    peer = await RawPeer.connect(endpoint, SECRET)
    await peer.send(wire.Submit(1, make_request("deaf"), None, 10**9))
    client = StreamClient(SECRET)
    other = await client.open(endpoint, make_request("other"))
    await until(lambda: len(engine.submitted) == 2)
    top = tuple((token, -1.0) for token in range(2000))
    deaf = next(connection for connection in server.connections if connection.streams[1].request_id == "deaf")
    num_tokens = 0
    while deaf.streams[1].backlog.num_tokens < 300:
        engine.emit("deaf", num_tokens, logprobs=(TokenLogprob(num_tokens, -1.0, top),))
        engine.emit("other", num_tokens)
        engine.step()
        assert (await other.next()).token_ids == (num_tokens,)
        num_tokens += 1
        assert deaf._transport.get_write_buffer_size() < 2 * _HIGH_WATER_BYTES
    engine.tokens("deaf", num_tokens, finish=FinishReason.LENGTH)

    got, finish = [], None
    while finish is None:
        ids, finish = await _tokens_of(peer, 1)
        got += ids
    assert got == list(range(num_tokens + 1))
    await client.close()


async def test_a_step_with_very_many_tokens_is_sent_in_several_frames(engine, server, endpoint):
    peer = await RawPeer.connect(endpoint, SECRET)
    for number in range(1, 6):
        await peer.send(wire.Submit(number, make_request(f"r{number}"), None, 10_000))
    await until(lambda: len(engine.submitted) == 5)
    for number in range(1, 6):
        engine.emit(f"r{number}", *range(10_000))
    engine.step()
    assert [len((await _tokens_of(peer, number))[0]) for number in (1, 3, 5)] == [10_000] * 3


async def test_events_that_waited_for_the_socket_go_before_those_that_did_not(engine, server, endpoint):
    peer = await RawPeer.connect(endpoint, SECRET)
    await peer.send(wire.Subscribe())
    assert isinstance(await peer.receive(), wire.Snapshot)
    assert isinstance(await peer.receive(), wire.Report)
    [connection] = server.connections
    for number in range(4):
        if number == 1:
            connection.pause_writing()
        if number == 3:
            connection.resume_writing()
        engine.store(block(number))
        engine.step()
    messages = [await peer.receive() for _ in range(4)]
    assert [message.events.sequence for message in messages if isinstance(message, wire.Events)] == [1, 2, 3, 4]


async def test_a_subscriber_that_does_not_read_gets_a_new_snapshot_instead_of_an_endless_backlog(engine, hub, server, endpoint):
    peer = await RawPeer.connect(endpoint, SECRET)
    await peer.send(wire.Subscribe())
    assert await peer.receive() == wire.Snapshot(0, (), last=True)
    await until(lambda: any(connection._subscription for connection in server.connections))
    [connection] = server.connections
    number = 0
    while not connection._subscription._snapshot_due:
        engine.remove(*hub.snapshot().hashes)
        engine.store(*(block(number + i) for i in range(2000)))
        number += 2000
        engine.step()
        await asyncio.sleep(0)
        assert connection._subscription._num_held_hashes < 20_000
    engine.store(block(1))
    engine.step()

    blocks, sequence, num_snapshots = set(), 0, 0
    while sequence < hub.snapshot().sequence:
        message = await peer.receive()
        if isinstance(message, wire.Events):
            assert message.events.sequence == sequence + 1
            sequence += 1
            blocks = (blocks - set(message.events.removed)) | set(message.events.stored)
        elif isinstance(message, wire.Snapshot):
            num_snapshots += 1
            sequence, blocks = message.sequence, set(message.hashes)
    assert num_snapshots == 1
    assert blocks == set(hub.snapshot().hashes)
