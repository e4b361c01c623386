"""What becomes of an answer when the engine, a replica, the client or the clock says no: each has one right ending."""

from __future__ import annotations

import asyncio
import json

import pytest
from asgi_call import events
from local_edge import CHAT, Edge, ids, pass_time
from local_fleet import submitted
from scripted_engine import ScriptedEngine, until

from cluster.answer import KEEP_ALIVE
from replicas import wire
from replicas.contract import ErrorInfo, FinishReason
from replicas.errors import ContextLengthError, NoReplicaError, OverloadedError

BOTH_MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
TOO_LONG = ErrorInfo("ContextLengthError", "too long", "messages", "context_length_exceeded")
SECRET_PATH = "/etc/a-path-that-is-nobodys-business"


async def answer(call):
    """Status, headers, and the body's JSON."""
    body = json.loads(await call.rest())
    return call.status, call.headers, body


def check_ends_with_error(data: bytes, code: str) -> None:
    """An event that clients raise, then [DONE]; and nothing before it that looks like a complete answer."""
    *chunks, error, done = events(data)
    assert done == "[DONE]"
    assert error.keys() == {"error"}
    assert error["error"]["code"] == code
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


# Errors


@BOTH_MODES
async def test_an_error_before_the_first_token_has_its_own_status(stream):
    """cases ST03, RF05"""
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=stream) as call:
        (name,) = await submitted(engine)
        engine.emit(name, finish=FinishReason.ERROR, error=ErrorInfo("EngineError", "the step failed"))
        engine.step()
        status, headers, body = await answer(call)
        assert (status, body["error"]["code"], body["error"]["message"]) == (500, "engine_error", "the step failed")
        assert headers["x-should-retry"] == "false"
        await call.ended()
        assert edge.count("requests_total", outcome="error") == edge.count("http_requests_total", status="500") == 1
        assert len(edge.fleet.dispatches) == 1, "what one request did to an engine must not be tried on another"


async def test_an_error_after_the_first_token_is_an_event_and_never_a_clean_end():
    """cases ST02, ST03"""
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=True) as call:
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"))
        first = await call.chunk()
        engine.emit(name, finish=FinishReason.ERROR, error=ErrorInfo("EngineError", "the step failed"))
        engine.step()
        check_ends_with_error(first + await call.rest(), "engine_error")
        await call.ended()
        assert edge.count("requests_total", outcome="error") == edge.count("http_requests_total", status="200") == 1


async def test_an_error_in_the_middle_of_a_whole_answer_has_its_status():
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call() as call:
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"))
        engine.emit(name, finish=FinishReason.ERROR, error=ErrorInfo("EngineError", "the step failed"))
        engine.step()
        status, _, body = await answer(call)
        assert (status, body.keys()) == (500, {"error"})


async def test_one_choice_that_fails_ends_all_of_them():
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=True, n=2) as call:
        first, second = await submitted(engine, 2)
        engine.tokens(first, *ids("hello"))
        engine.emit(second, finish=FinishReason.ERROR, error=ErrorInfo("EngineError", "the step failed"))
        engine.step()
        check_ends_with_error(await call.rest(), "engine_error")
        assert engine.aborted == {first: FinishReason.ABORT}


@BOTH_MODES
@pytest.mark.parametrize("when", ["at submission", "in the step"])
async def test_what_an_engine_refuses_is_the_clients_error_and_not_tried_again(stream, when):
    """cases RF03"""
    first, second = ScriptedEngine(), ScriptedEngine()
    async with Edge(first, second) as edge:
        if when == "at submission":
            first.refusal = ContextLengthError(TOO_LONG.message, param=TOO_LONG.param)
        async with edge.chat_call(stream=stream) as call:
            if when == "in the step":
                (name,) = await submitted(first)
                first.emit(name, finish=FinishReason.ERROR, error=TOO_LONG)
                first.step()
            status, headers, body = await answer(call)
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "messages")
        assert "retry-after" not in headers
        assert edge.fleet.dispatches == [("r0", set())]
        assert edge.count("replica_lost_total") == edge.count("retries_total") == 0
        assert edge.count("requests_total", outcome="client_error") == 1


@BOTH_MODES
@pytest.mark.parametrize(
    ("error", "code", "retry_after"),
    [
        (OverloadedError("the queue is full", retry_after_s=7.2), "overloaded", "8"),
        (NoReplicaError("no replica is ready", retry_after_s=2.0), "no_replica", "2"),
    ],
)
async def test_a_fleet_that_is_full_or_absent_says_when_to_come_again(stream, error, code, retry_after):
    """cases RF05"""
    async with Edge(ScriptedEngine()) as edge:
        edge.fleet.failure = error
        async with edge.chat_call(stream=stream) as call:
            status, headers, body = await answer(call)
        assert (status, body["error"]["code"], body["error"]["type"]) == (503, code, "overloaded_error")
        assert headers["retry-after"] == retry_after
        assert edge.count("requests_total", outcome="shed") == 1


@BOTH_MODES
async def test_an_engine_that_is_full_says_itself_when_to_come_again(stream):
    """cases RF05"""
    full = wire.to_error_info(OverloadedError("the queue is full", retry_after_s=7.2))
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=stream) as call:
        (name,) = await submitted(engine)
        engine.emit(name, finish=FinishReason.ERROR, error=full)
        engine.step()
        status, headers, _ = await answer(call)
        assert (status, headers["retry-after"]) == (503, "8")
        await call.ended()


@BOTH_MODES
@pytest.mark.parametrize("where", ["in the fleet", "in preparation"])
async def test_nothing_of_an_unexpected_error_goes_out(stream, where, monkeypatch, caplog):
    """cases TL02"""

    def fail(*_args, **_kwargs):
        raise RuntimeError(SECRET_PATH)

    async with Edge(ScriptedEngine()) as edge:
        if where == "in the fleet":
            edge.fleet.failure = RuntimeError(SECRET_PATH)
        else:
            monkeypatch.setattr("cluster.prepare.prompt_token_ids", fail)
        response = await edge.chat(stream=stream)
        assert response.status_code == 500
        error = {"message": "internal error", "type": "server_error", "param": None, "code": "engine_error"}
        assert response.json() == {"error": error}
        assert edge.count("requests_total", outcome="error") == 1
    assert SECRET_PATH in caplog.text


async def test_nothing_of_an_unexpected_error_goes_out_in_a_stream_either(caplog):
    """cases TL02"""
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=True) as call:
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"))
        first = await call.chunk()
        edge.fleet.replicas["r0"].kill(RuntimeError(SECRET_PATH))
        data = first + await call.rest()
        check_ends_with_error(data, "engine_error")
        assert SECRET_PATH.encode() not in data
    assert SECRET_PATH in caplog.text


# Clients that leave


@BOTH_MODES
@pytest.mark.parametrize("after_first_token", [False, True])
async def test_a_client_that_leaves_ends_its_sequences(stream, after_first_token):
    """cases ST01"""
    async with Edge(engine := ScriptedEngine()) as edge:
        async with edge.chat_call(stream=stream, n=2) as call:
            names = await submitted(engine, 2)
            assert edge.count("requests_in_flight") == 1
            if after_first_token:
                engine.tokens(names[0], *ids("hello"))
                await until(lambda: edge.fleet.num_first_tokens)
            if after_first_token and stream:
                await call.chunk()
            call.disconnect()
            await call.ended()
            assert engine.aborted == dict.fromkeys(names, FinishReason.ABORT)
        edge.check_nothing_is_left()
        assert edge.count("requests_total") == edge.count("requests_total", outcome="cancelled") == 1
        status = "200" if after_first_token and stream else "499"
        assert edge.count("http_requests_total", route=CHAT, status=status) == 1


async def test_a_client_that_stopped_reading_and_leaves_ends_its_sequences():
    """cases ST01"""
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=True, n=2) as call:
        names = await submitted(engine, 2)
        call.stop_reading()
        for name in names:
            engine.tokens(name, *ids("hello"))
        await until(lambda: edge.count("stream_events_total"))
        call.disconnect()
        await call.ended()
        edge.check_nothing_is_left()
        assert engine.aborted == dict.fromkeys(names, FinishReason.ABORT)
        assert edge.count("requests_total", outcome="cancelled") == 1


@BOTH_MODES
async def test_a_client_that_leaves_after_the_answer_got_it(stream):
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=stream) as call:
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"), finish=FinishReason.STOP)
        await call.rest()
        call.disconnect()
        await call.ended()
        assert edge.count("requests_total", outcome="ok") == 1
        assert engine.aborted == {}


@BOTH_MODES
async def test_an_ingress_that_is_stopped_ends_its_sequences(stream):
    async with Edge(engine := ScriptedEngine()) as edge:
        task = asyncio.ensure_future(edge.chat(stream=stream))
        (name,) = await submitted(engine)
        task.cancel()
        await asyncio.wait([task])
        assert engine.aborted == {name: FinishReason.ABORT}
        assert edge.count("requests_total", outcome="cancelled") == 1


# The clock


async def test_a_silent_stream_is_kept_alive_also_before_the_first_token():
    """cases ST09"""
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=True) as call:
        (name,) = await submitted(engine)
        for _ in range(2):
            pass_time(16)
            assert await call.chunk() == KEEP_ALIVE
        assert call.status == 200
        engine.tokens(name, *ids("hello"))
        assert b"hello" in await call.chunk()
        pass_time(16)
        assert await call.chunk() == KEEP_ALIVE
        engine.tokens(name, finish=FinishReason.STOP)
        assert events(await call.rest())[-1] == "[DONE]"


async def test_a_stream_that_speaks_needs_no_keep_alive():
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=True) as call:
        (name,) = await submitted(engine)
        data = b""
        for _ in range(4):
            pass_time(10)
            engine.tokens(name, *ids("hello"))
            data += await call.chunk()
        engine.tokens(name, finish=FinishReason.STOP)
        assert KEEP_ALIVE not in data + await call.rest()


async def test_an_error_after_a_keep_alive_is_an_event():
    """cases ST03, ST09"""
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=True) as call:
        (name,) = await submitted(engine)
        pass_time(16)
        assert await call.chunk() == KEEP_ALIVE
        engine.emit(name, finish=FinishReason.ERROR, error=TOO_LONG)
        engine.step()
        check_ends_with_error(await call.rest(), "context_length_exceeded")


@BOTH_MODES
async def test_the_deadline_before_the_first_token_is_504(stream):
    async with Edge(engine := ScriptedEngine(), keep_alive_s=1000) as edge, edge.chat_call(stream=stream) as call:
        (name,) = await submitted(engine)
        pass_time(601)
        status, headers, body = await answer(call)
        assert (status, body["error"]["code"], body["error"]["type"]) == (504, "deadline_exceeded", "timeout_error")
        assert headers["retry-after"] == "1"
        assert engine.aborted == {name: FinishReason.ABORT}


async def test_the_deadline_within_a_stream_is_an_event():
    async with Edge(engine := ScriptedEngine(), keep_alive_s=1000) as edge, edge.chat_call(stream=True) as call:
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"))
        first = await call.chunk()
        pass_time(601)
        check_ends_with_error(first + await call.rest(), "deadline_exceeded")
        assert engine.aborted == {name: FinishReason.ABORT}
