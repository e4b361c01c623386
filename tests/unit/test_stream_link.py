"""Who may talk on a token socket, and what becomes of those who can't be reached."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace

import pytest
from raw_peer import RawPeer
from scripted_engine import make_request, until
from token_rig import SECRET, TokenRig, read

from cluster.stream_client import StreamClient
from replicas import wire
from replicas.contract import FinishReason
from replicas.errors import ReplicaLostError
from replicas.wire import Endpoint


@pytest.fixture
async def rig():
    async with TokenRig() as rig:
        yield rig


async def test_another_secret_is_refused_and_reaches_nothing(rig):
    client = StreamClient(b"another secret")
    with pytest.raises(ReplicaLostError):
        await client.open(rig.endpoint, make_request("a"))
    assert rig.engine.submitted == {}
    assert not client._connections


async def test_a_replica_that_restarted_on_the_same_port_is_not_the_one_we_meant(rig):
    with pytest.raises(ReplicaLostError):
        await rig.client.open(replace(rig.endpoint, boot_id="boot-0"), make_request("a"))
    assert rig.engine.submitted == {}


async def test_a_server_that_does_not_know_the_secret_gets_no_prompt():
    """A port that a dead replica left may be anybody's."""
    received = bytearray()

    async def impostor(reader, writer):
        writer.write(wire.encode_frame(wire.Challenge(wire.PROTOCOL_VERSION, bytes(32))))
        received.extend(await reader.read(1000))
        writer.write(wire.encode_frame(wire.Welcome("boot-1", bytes(32))))
        received.extend(await reader.read(1000))
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], "boot-1")
    with pytest.raises(ReplicaLostError):
        await StreamClient(SECRET).open(endpoint, make_request("a"))
    server.close()
    assert isinstance(wire.hello_decoder.decode(received[4:]), wire.Hello)


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x01\xc1", wire.encode_frame(wire.Ping()), b"\xff\xff\xff\xff"],
    ids=["http", "not msgpack", "ping before hello", "huge frame"],
)
async def test_a_stranger_that_talks_nonsense_is_cut_off_alone(rig, data):
    [stream] = await rig.open("a")
    reader, writer = await asyncio.open_connection(rig.endpoint.host, rig.endpoint.port)
    writer.write(data)
    await reader.read()  # the challenge, then the end
    writer.close()
    rig.engine.tokens("a", 1, finish=FinishReason.STOP)
    assert await read(stream) == [1]


@pytest.mark.parametrize("data", [b"\x00\x00\x00\x01\xc1", wire.encode_frame(wire.Submit(1, make_request("x"), None, 8))])
async def test_a_known_client_that_breaks_the_protocol_loses_its_own_streams_alone(rig, data):
    [stream] = await rig.open("a")
    peer = await RawPeer.connect(rig.endpoint, SECRET)
    await peer.send(wire.Submit(1, make_request("b"), None, 8))
    await until(lambda: "b" in rig.engine.submitted)
    await peer.send_bytes(data)
    assert await peer.is_closed()
    assert set(rig.engine.aborted) == {"b"}
    rig.engine.tokens("a", 1, finish=FinishReason.STOP)
    assert await read(stream) == [1]


async def test_nobody_at_the_port_is_a_lost_replica_for_all_who_asked_at_once(rig):
    await rig.server.close()
    opened = [rig.client.open(rig.endpoint, make_request(name)) for name in "abc"]
    outcomes = await asyncio.gather(*opened, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ReplicaLostError] * 3


@pytest.fixture
async def mute():
    """(endpoint, event): something that takes connections and says nothing; the event tells that one was hung up."""
    hung_up = asyncio.Event()

    async def listen(reader, writer):
        await reader.read()
        writer.close()
        hung_up.set()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], "boot-1"), hung_up
    server.close()


async def test_a_port_that_never_answers_is_a_lost_replica_in_time_and_is_hung_up_on(mute):
    endpoint, hung_up = mute
    with pytest.raises(ReplicaLostError):
        await StreamClient(SECRET, open_timeout_s=0.02).open(endpoint, make_request("a"))
    await asyncio.wait_for(hung_up.wait(), 5)


async def test_a_connection_that_fails_when_nobody_waits_for_it_any_more_is_no_unhandled_error(mute):
    endpoint, hung_up = mute
    logged = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context["message"]))
    opening = asyncio.create_task(StreamClient(SECRET, open_timeout_s=0.02).open(endpoint, make_request("a")))
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.wait_for(hung_up.wait(), 5)
    del opening
    gc.collect()
    assert logged == []


async def test_a_caller_that_gives_up_does_not_take_the_others_connection_along(rig):
    impatient = asyncio.create_task(rig.client.open(rig.endpoint, make_request("impatient")))
    patient = asyncio.create_task(rig.client.open(rig.endpoint, make_request("patient")))
    await asyncio.sleep(0)
    impatient.cancel()
    stream = await patient
    rig.engine.tokens("patient", 1, finish=FinishReason.STOP)
    assert await read(stream) == [1]
    assert impatient.cancelled()
    assert set(rig.engine.submitted) == {"patient"}
