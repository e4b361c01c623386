"""A replica that is lost: before the first token another one answers and the client never knows; after it, it is told."""

from __future__ import annotations

import json

import pytest
from asgi_call import events
from local_edge import Edge, ids, pass_time
from local_fleet import submitted
from scripted_engine import ScriptedEngine

from replicas.contract import FinishReason
from replicas.errors import ReplicaLostError

BOTH_MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def text_of(data: bytes, stream: bool) -> str:
    if not stream:
        return json.loads(data)["choices"][0]["text"]
    *chunks, done = events(data)
    assert done == "[DONE]"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@BOTH_MODES
@pytest.mark.parametrize("n", [1, 2])
async def test_before_the_first_token_another_replica_answers_and_nobody_knows(stream, n):
    """cases RF01, RF04"""
    first, second = ScriptedEngine(), ScriptedEngine()
    async with Edge(first, second) as edge, edge.complete_call(stream=stream, n=n) as call:
        lost = await submitted(first, n)
        edge.fleet.replicas["r0"].kill()
        names = await submitted(second, n)
        assert names == lost, "the same sequences: same seeds, same hashes"
        assert [second.submitted[name] for name in names] == [first.submitted[name] for name in names]
        for name in names:
            second.tokens(name, *ids("hello"), finish=FinishReason.STOP)
        assert text_of(await call.rest(), stream) == "hello" * (n if stream else 1)
        assert call.status == 200
        await call.ended()
        assert edge.fleet.dispatches == [("r0", set()), ("r1", {"r0"})]
        assert edge.count("retries_total") == edge.count("replica_lost_total") == 1
        assert edge.count("requests_total") == edge.count("requests_total", outcome="ok") == 1


@BOTH_MODES
async def test_a_replica_that_cannot_be_reached_is_as_good_as_lost(stream):
    """cases RF01"""
    first, second = ScriptedEngine(), ScriptedEngine()
    async with Edge(first, second) as edge:
        edge.fleet.replicas["r0"].kill(ReplicaLostError("it is shutting down", code="replica_draining", replica="r0"))
        async with edge.complete_call(stream=stream) as call:
            (name,) = await submitted(second)
            second.tokens(name, *ids("hello"), finish=FinishReason.STOP)
            assert text_of(await call.rest(), stream) == "hello"
        assert edge.fleet.dispatches == [("r0", set()), ("r1", {"r0"})]


@BOTH_MODES
async def test_an_abort_that_nobody_asked_for_is_a_lost_replica(stream):
    """cases ST02: an engine that is shut down ends its sequences; that is no answer."""
    first, second = ScriptedEngine(), ScriptedEngine()
    async with Edge(first, second) as edge, edge.complete_call(stream=stream) as call:
        (name,) = await submitted(first)
        first.tokens(name, finish=FinishReason.ABORT)
        (name,) = await submitted(second)
        second.tokens(name, *ids("hello"), finish=FinishReason.STOP)
        assert text_of(await call.rest(), stream) == "hello"
        assert edge.fleet.dispatches == [("r0", set()), ("r1", {"r0"})]


@pytest.mark.parametrize("how", ["lost", "aborted"])
async def test_after_the_first_token_a_stream_ends_with_an_error_and_is_not_begun_again(how):
    """cases RF01, ST02"""
    first, second = ScriptedEngine(), ScriptedEngine()
    async with Edge(first, second) as edge, edge.complete_call(stream=True) as call:
        (name,) = await submitted(first)
        first.tokens(name, *ids("hello"))
        data = await call.chunk()
        if how == "lost":
            edge.fleet.replicas["r0"].kill()
        else:
            first.tokens(name, finish=FinishReason.ABORT)
        chunk, error, done = events(data + await call.rest())
        assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == ("hello", None)
        assert (error["error"]["code"], done) == ("replica_lost", "[DONE]")
        await call.ended()
        assert not second.submitted
        assert (edge.count("replica_lost_total"), edge.count("retries_total")) == (1, 0)
        assert edge.count("requests_total", outcome="error") == 1


async def test_after_the_first_token_a_whole_answer_is_503():
    first, second = ScriptedEngine(), ScriptedEngine()
    async with Edge(first, second) as edge, edge.complete_call() as call:
        (name,) = await submitted(first)
        first.tokens(name, *ids("hello"))
        edge.fleet.replicas["r0"].kill()
        error = json.loads(await call.rest())["error"]
        assert (call.status, error["code"], call.headers["retry-after"]) == (503, "replica_lost", "1")
        assert not second.submitted


@BOTH_MODES
async def test_a_second_loss_is_503_with_the_time_to_come_again(stream):
    """cases RF01, RF05"""
    engines = [ScriptedEngine() for _ in range(3)]
    async with Edge(*engines) as edge, edge.complete_call(stream=stream) as call:
        for number in range(2):
            await submitted(engines[number])
            edge.fleet.replicas[f"r{number}"].kill()
        error = json.loads(await call.rest())["error"]
        assert (call.status, error["code"], call.headers["retry-after"]) == (503, "replica_lost", "1")
        await call.ended()
        assert (edge.count("replica_lost_total"), edge.count("retries_total")) == (2, 1)
        assert not engines[2].submitted


@BOTH_MODES
async def test_a_lost_replica_is_not_asked_again_even_if_it_is_the_only_one(stream):
    """cases RF04"""
    async with Edge(engine := ScriptedEngine()) as edge, edge.complete_call(stream=stream) as call:
        await submitted(engine)
        edge.fleet.replicas["r0"].kill()
        error = json.loads(await call.rest())["error"]
        assert (call.status, error["code"], call.headers["retry-after"]) == (503, "no_replica", "2")
        assert len(edge.fleet.dispatches) == 1


async def test_a_retry_has_only_the_time_that_is_left():
    first, second = ScriptedEngine(), ScriptedEngine()
    async with Edge(first, second, keep_alive_s=1000) as edge, edge.complete_call(stream=True):
        await submitted(first)
        pass_time(500)
        edge.fleet.replicas["r0"].kill()
        await submitted(second)
        assert edge.fleet.timeouts_s == [pytest.approx(600, abs=5), pytest.approx(100, abs=5)]


async def test_each_prompt_of_a_request_is_retried_by_itself():
    first, second = ScriptedEngine(), ScriptedEngine()
    async with Edge(first, second) as edge:
        edge.fleet.order.extend(["r0", "r1"])
        async with edge.complete_call(stream=True, prompt=["hello", "he w"]) as call:
            (name,) = await submitted(first)
            (other,) = await submitted(second)
            second.tokens(other, *ids("hello"))
            data = await call.chunk()
            edge.fleet.replicas["r0"].kill()
            await submitted(second, 2)
            second.emit(name, *ids("im"), finish=FinishReason.STOP)
            second.emit(other, *ids("!"), finish=FinishReason.STOP)
            second.step()
            *chunks, _ = events(data + await call.rest())
        texts = {0: "", 1: ""}
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == ({0: "im", 1: "hello!"})
        assert edge.count("retries_total") == 1
