"""Answers, whole and streamed, from the engine's deltas to the bytes that a client reads."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
from asgi_call import events
from local_edge import Edge, fake_engine, ids, tokenizer
from local_fleet import submitted
from scripted_engine import ScriptedEngine, until

from replicas.contract import FinishReason

BOTH_KINDS = pytest.mark.parametrize("kind", ["chat", "completion"])
BOTH_MODES = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
STOP_TOKEN = 2


@dataclass
class Answer:
    """What a client has in hand at the end, by choice."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None

    @property
    def token_counts(self) -> tuple[int, int, int]:
        usage = self.usage
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def read(response) -> Answer:
    """Of either mode and kind. What no answer may violate is checked on the way."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/json":
        body = response.json()
        answer = Answer(usage=body["usage"])
        for choice in body["choices"]:
            answer.texts[choice["index"]] = choice["message"]["content"] if "message" in choice else choice["text"]
            answer.finish_reasons[choice["index"]] = choice["finish_reason"]
        assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
        return answer
    *chunks, done = events(response.content)
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    answer = Answer()
    for chunk in chunks:
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in answer.finish_reasons, "a choice goes on after its end"
            if choice["finish_reason"] is not None:
                answer.finish_reasons[index] = choice["finish_reason"]
            if "delta" in choice:
                assert ("role" in choice["delta"]) == (index not in answer.texts), "the role comes first, and once"
            answer.texts[index] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return answer


def ask(edge, kind, stream, **fields):
    if stream:
        fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    return asyncio.ensure_future((edge.chat if kind == "chat" else edge.complete)(**fields))


# The form of a stream


async def test_a_chat_stream_has_the_role_first_then_text_then_one_end():
    """cases ST02, ST07, ST08, ST09"""
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=True) as call:
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"))
        first = events(await call.chunk())
        assert [chunk["choices"][0]["delta"] for chunk in first] == [
            {"role": "assistant", "content": ""},
            {"content": "hello"},
        ]
        assert call.status == 200
        assert call.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert (call.headers["cache-control"], call.headers["x-accel-buffering"]) == ("no-cache", "no")
        engine.tokens(name, *ids(" w"), STOP_TOKEN, finish=FinishReason.STOP)
        *rest, done = events(await call.rest())
        assert done == "[DONE]"
        assert [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in rest] == [
            ({"content": " w"}, None),
            ({}, "stop"),
        ]
        assert all("usage" not in chunk for chunk in first + rest)


async def test_the_headers_wait_for_the_first_token():
    """cases ST03"""
    async with Edge(engine := ScriptedEngine()) as edge, edge.chat_call(stream=True) as call:
        (name,) = await submitted(engine)
        for _ in range(5):
            await asyncio.sleep(0)
        assert call.status is None
        engine.tokens(name, *ids("hello"), finish=FinishReason.LENGTH)
        assert b"hello" in await call.rest()


async def test_tokens_that_came_together_are_one_event_each():
    async with Edge(engine := ScriptedEngine()) as edge, edge.complete_call(stream=True) as call:
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"), *ids(" w"), *ids("hell"), finish=FinishReason.LENGTH)
        *chunks, _ = events(await call.rest())
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["hello", " w", "hell", ""]
        assert edge.count("stream_events_total") == 5, "with the [DONE]"


@BOTH_KINDS
@pytest.mark.parametrize("include_usage", [True, False, None])
async def test_usage_is_one_last_chunk_if_it_was_asked_for(kind, include_usage):
    """cases ST04"""
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    async with Edge(fake_engine()) as edge:
        response = await ask(edge, kind, True, max_tokens=5, **{"stream_options": None, **options})
        *chunks, _ = events(response.content)
        if not include_usage:
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
            return
        *others, last = chunks
        assert all(chunk["usage"] is None for chunk in others)
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)


async def test_continuous_usage_counts_up_with_the_tokens():
    """cases ST04"""
    async with Edge(engine := ScriptedEngine()) as edge:
        task = ask(edge, "completion", True, stream_options={"continuous_usage_stats": True})
        (name,) = await submitted(engine)
        engine.emit(name, *ids("hello"), *ids(" w"), num_cached_tokens=1)
        engine.step()
        engine.tokens(name, *ids("im"), finish=FinishReason.LENGTH)
        *chunks, _ = events((await task).content)
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {1}
        assert {chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks} == {1}


# Several choices and prompts


@BOTH_MODES
async def test_choices_of_several_prompts_interleave_and_each_keeps_its_place(stream):
    """cases ST10"""
    async with Edge(engine := ScriptedEngine()) as edge:
        task = ask(edge, "completion", stream, prompt=["hello", "he w"], n=2)
        await submitted(engine, 4)
        by_index = {
            request.choice + (0 if list(request.prompt_token_ids) == ids("hello") else 2): name
            for name, request in engine.submitted.items()
        }
        assert sorted(by_index) == [0, 1, 2, 3]
        for index in (3, 0, 2, 1):
            engine.emit(by_index[index], *ids("hello"), num_cached_tokens=16 if index % 2 == 0 else None)
        engine.step()
        for index in (1, 3):
            engine.emit(by_index[index], *ids(f" w{index}"))
        engine.step()
        for index in (2, 0, 3, 1):
            engine.emit(by_index[index], *ids("!"), finish=FinishReason.LENGTH if index == 2 else FinishReason.STOP)
            engine.step()
        answer = read(await task)
        assert answer.texts == {0: "hello!", 1: "hello w1!", 2: "hello!", 3: "hello w3!"}
        assert answer.finish_reasons == {0: "stop", 1: "stop", 2: "length", 3: "stop"}
        num_prompt, num_answer = len(ids("hello")) + len(ids("he w")), 4 * 2 + 2 * 2
        assert answer.token_counts == (num_prompt, num_answer, 32)
        assert edge.fleet.dispatches == [("r0", set()), ("r0", set())]


@BOTH_KINDS
@pytest.mark.parametrize("n", [1, 3])
async def test_what_is_streamed_is_what_is_answered_whole(kind, n):
    """cases ST05"""
    async with Edge(fake_engine()) as edge:
        for seed in range(3):
            fields = {"seed": seed, "n": n, "max_tokens": 40}
            whole = read(await ask(edge, kind, False, **fields))
            streamed = read(await ask(edge, kind, True, **fields))
            assert streamed.texts == whole.texts
            assert streamed.finish_reasons == whole.finish_reasons == dict.fromkeys(range(n), "length")
            assert streamed.token_counts[:2] == whole.token_counts[:2]
            stop = whole.texts[0][10:13]
            whole_cut = read(await ask(edge, kind, False, stop=stop, **fields))
            streamed_cut = read(await ask(edge, kind, True, stop=stop, **fields))
            assert streamed_cut.texts == whole_cut.texts == {i: t.partition(stop)[0] for i, t in whole.texts.items()}
            assert streamed_cut.token_counts[:2] == whole_cut.token_counts[:2]


async def test_cached_tokens_are_the_engines():
    async with Edge(fake_engine()) as edge:
        fields = {"prompt": "x" * 40, "max_tokens": 2}
        assert read(await edge.complete(**fields)).token_counts == (40, 2, 0)
        assert read(await edge.complete(**fields)).token_counts == (40, 2, 32)
        assert read(await ask(edge, "completion", True, **fields)).token_counts == (40, 2, 32)
        assert read(await edge.complete(n=2, **fields)).token_counts == (40, 4, 32)
        assert read(await edge.complete(**{**fields, "prompt": ["x" * 40, "x" * 20]})).token_counts == (60, 4, 48)


# Ends


@BOTH_MODES
@BOTH_KINDS
async def test_the_engines_own_ends_are_the_answers(kind, stream):
    for num_answer_tokens, finish_reason in ((4, "stop"), (None, "length")):
        async with Edge(fake_engine(num_answer_tokens)) as edge:
            answer = read(await ask(edge, kind, stream, max_tokens=6))
            assert answer.finish_reasons == {0: finish_reason}
            assert answer.token_counts[1] == (num_answer_tokens or 6)


@BOTH_MODES
@BOTH_KINDS
@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stop_string_cuts_exactly_and_ends_the_sequence(kind, stream, include_stop):
    """cases ST06"""
    async with Edge(engine := ScriptedEngine()) as edge:
        task = ask(edge, kind, stream, stop=["lo wo", "zzz"], include_stop_str_in_output=include_stop)
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"))
        engine.tokens(name, *ids(" w"))
        engine.tokens(name, *ids("o"), *ids("rld"))
        answer = read(await task)
        assert answer.texts == {0: "hello wo" if include_stop else "hel"}
        assert answer.finish_reasons == {0: "stop"}
        assert answer.token_counts[1] == 3, "tokens after the stop string don't count"
        assert engine.aborted == {name: FinishReason.STOP}


async def test_nothing_of_a_stop_string_is_sent_before_it_is_disproved():
    """cases ST06"""
    async with Edge(engine := ScriptedEngine()) as edge, edge.complete_call(stream=True, stop="lo wonder") as call:
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"))
        assert [chunk["choices"][0]["text"] for chunk in events(await call.chunk())] == ["hel"]
        engine.tokens(name, *ids(" w"))
        engine.tokens(name, *ids("im"))
        assert [chunk["choices"][0]["text"] for chunk in events(await call.chunk())] == ["lo wim"]
        engine.tokens(name, finish=FinishReason.STOP)
        await call.rest()


@BOTH_MODES
async def test_what_was_held_back_comes_out_when_the_engine_ends(stream):
    """cases ST05, ST06"""
    async with Edge(engine := ScriptedEngine()) as edge:
        task = ask(edge, "completion", stream, stop="lo wonder")
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"), *ids("lo"), finish=FinishReason.LENGTH)
        answer = read(await task)
        assert (answer.texts, answer.finish_reasons) == ({0: "hellolo"}, {0: "length"})


@BOTH_MODES
@pytest.mark.parametrize(("stop", "text", "finish_reason"), [(None, "he\ufffd", "length"), ("e\ufffd", "h", "stop")])
async def test_half_a_character_at_the_end_is_shown_as_such(stream, stop, text, finish_reason):
    """cases ST05"""
    half = next(i for i in range(tokenizer().vocab_size) if tokenizer().token_bytes(i) == b"\xc3")
    async with Edge(engine := ScriptedEngine()) as edge:
        task = ask(edge, "completion", stream, stop=stop)
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("he"), half, finish=FinishReason.LENGTH)
        answer = read(await task)
        assert (answer.texts, answer.finish_reasons) == ({0: text}, {0: finish_reason})


@BOTH_MODES
async def test_a_stop_string_that_comes_with_the_engines_own_end_is_a_stop(stream):
    async with Edge(engine := ScriptedEngine()) as edge:
        task = ask(edge, "completion", stream, stop=" w")
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"), *ids(" w"), finish=FinishReason.LENGTH)
        answer = read(await task)
        assert (answer.texts, answer.finish_reasons) == ({0: "hello"}, {0: "stop"})
        assert engine.aborted == {}


@BOTH_MODES
async def test_a_stop_string_ends_its_own_choice_only(stream):
    async with Edge(engine := ScriptedEngine()) as edge:
        task = ask(edge, "chat", stream, n=2, stop=" w")
        first, second = await submitted(engine, 2)
        engine.emit(first, *ids("hello w"))
        engine.emit(second, *ids("hell"))
        engine.step()
        await until(lambda: engine.aborted)
        engine.tokens(second, *ids("im"), finish=FinishReason.LENGTH)
        answer = read(await task)
        assert (answer.texts, answer.finish_reasons) == ({0: "hello", 1: "hellim"}, {0: "stop", 1: "length"})
        assert engine.aborted == {first: FinishReason.STOP}


@BOTH_MODES
@pytest.mark.parametrize("skip", [True, False])
async def test_special_tokens_have_text_only_if_asked_for_and_a_stop_token_never(stream, skip):
    async with Edge(engine := ScriptedEngine()) as edge:
        task = ask(edge, "completion", stream, skip_special_tokens=skip)
        (name,) = await submitted(engine)
        engine.emit(name, *ids("he"), 1, STOP_TOKEN, finish=FinishReason.STOP, stop_token_id=STOP_TOKEN)
        engine.step()
        answer = read(await task)
        assert answer.texts == {0: "he" if skip else "he<|im_start|>"}
        assert answer.token_counts[1] == 3


# Logprobs and counting


@BOTH_MODES
async def test_logprobs_come_with_their_tokens(stream):
    async with Edge(fake_engine()) as edge:
        response = await ask(edge, "chat", stream, max_tokens=4, logprobs=True, top_logprobs=2)
        bodies = events(response.content)[:-1] if stream else [response.json()]
        tokens = [
            token
            for body in bodies
            for choice in body["choices"]
            if choice["logprobs"]
            for token in choice["logprobs"]["content"]
        ]
        assert len(tokens) == 4
        assert all(len(token["top_logprobs"]) == 2 for token in tokens)


@BOTH_MODES
async def test_requests_add_up_while_they_run_and_after(stream):
    """received = ended + in flight, at any time."""
    async with Edge(engine := ScriptedEngine()) as edge:
        tasks = [ask(edge, "chat", stream) for _ in range(3)]
        names = await submitted(engine, 3)
        assert edge.count("requests_in_flight") == 3
        for name in names:
            edge.check_requests_add_up()
            engine.tokens(name, *ids("hello"), finish=FinishReason.STOP)
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks = [task for task in tasks if not task.done()]
            assert edge.count("requests_in_flight") == len(tasks)
        labels = {"route": "/v1/chat/completions", "model_name": "m", "outcome": "ok"}
        assert edge.count("requests_total", **labels) == edge.count("requests_total") == 3
        assert edge.count("request_ttft_seconds_count") == edge.count("request_e2e_seconds_count") == 3
        assert edge.count("http_requests_total", status="200") == 3
