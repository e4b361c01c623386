"""What a request becomes before it goes to a replica: names of its blocks, ids, seeds; and where that work is done."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from local_edge import API_KEYS, HELLO, MODEL, Edge, fake_engine, ids, pass_time, tokenizer
from local_fleet import submitted
from scripted_engine import ScriptedEngine, until

from configs.schema import LimitsConfig
from replicas.blocks import hash_blocks
from replicas.contract import FinishReason, GenerationRequest

LONG = "x" * 40  # tokens, and two full blocks
TOKENIZE = json.dumps({"model": MODEL, "prompt": "hello"}).encode()


async def sent(edge: Edge, num_requests: int = 1, **fields) -> list[GenerationRequest]:
    """What reaches the engine; the client leaves then."""
    engine = edge.fleet.replicas["r0"].engine
    num_before = len(engine.submitted)
    async with edge.complete_call(**{"prompt": LONG, **fields}):
        await submitted(engine, num_before + num_requests)
    return list(engine.submitted.values())[num_before:]


# Names of blocks


async def test_the_blocks_of_a_prompt_are_named_from_its_root():
    async with Edge(ScriptedEngine()) as edge:
        (request,) = await sent(edge)
        assert list(request.prompt_token_ids) == ids(LONG)
        assert request.block_hashes == hash_blocks(request.hash_root, request.prompt_token_ids)
        assert len(request.block_hashes) == 2


async def test_the_same_tenant_and_salt_name_a_prompt_alike():
    """cases NS06"""
    async with Edge(ScriptedEngine(), api_keys=API_KEYS) as edge:
        for salt in (None, "mine"):
            (one,), (other,) = [await sent(edge, who="alice", cache_salt=salt) for _ in range(2)]
            assert one.block_hashes == other.block_hashes


async def test_other_tenants_and_other_salts_share_no_name():
    """cases NS06"""
    async with Edge(ScriptedEngine(), api_keys=API_KEYS) as edge:
        names = set()
        for who in ("alice", "bob"):
            for salt in (None, "mine", "yours"):
                (request,) = await sent(edge, who=who, cache_salt=salt)
                names |= {request.hash_root, *request.block_hashes}
        assert len(names) == 2 * 3 * 3


async def test_a_tenant_finds_its_own_blocks_and_nobody_elses():
    """cases NS06"""
    async with Edge(fake_engine(), api_keys=API_KEYS) as edge:

        async def cached(who, salt=None):
            answer = await edge.complete(who=who, prompt=LONG, max_tokens=2, cache_salt=salt)
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [await cached("alice"), await cached("alice")] == [0, 32]
        assert [await cached("bob"), await cached("bob")] == [0, 32]
        assert [await cached("alice", "mine"), await cached("alice", "mine"), await cached("bob", "mine")] == [0, 32, 0]


# Ids, seeds, choices


async def test_ids_are_ours_and_new_for_every_sequence():
    """cases RQ06"""
    async with Edge(ScriptedEngine()) as edge:
        fields = {"request_id": "the same", "prompt": ["hello", "hello"], "n": 3}
        requests = await sent(edge, 6, **fields) + await sent(edge, 6, **fields)
        assert len({request.request_id for request in requests}) == 12


async def test_answers_have_ids_of_their_own():
    async with Edge(fake_engine()) as edge:
        answers = [(await edge.chat(max_tokens=1)).json()["id"] for _ in range(2)]
        answers += [(await edge.complete(max_tokens=1)).json()["id"] for _ in range(2)]
        assert len(set(answers)) == 4
        assert [each.split("-")[0] for each in answers] == ["chatcmpl", "chatcmpl", "cmpl", "cmpl"]


@pytest.mark.parametrize("seed", [0, 7, -(2**63), 2**63 - 1])
async def test_a_clients_seed_is_passed_on(seed):
    async with Edge(ScriptedEngine()) as edge:
        requests = await sent(edge, 4, prompt=["hello", "he"], n=2, seed=seed)
        assert {request.sampling.seed for request in requests} == {seed}


async def test_without_a_seed_each_prompt_gets_another_and_its_choices_share_it():
    async with Edge(ScriptedEngine()) as edge:
        requests = await sent(edge, 4, prompt=["hello", "hello"], n=2) + await sent(edge, 2, prompt="hello", n=2)
        assert [request.choice for request in requests] == [0, 1] * 3
        seeds = [request.sampling.seed for request in requests]
        assert seeds[::2] == seeds[1::2]
        assert len(set(seeds)) == 3


async def test_choices_differ_in_nothing_but_their_number_and_id():
    async with Edge(ScriptedEngine()) as edge:
        first, *others = await sent(edge, 3, n=3)
        for other in others:
            assert (other.prompt_token_ids, other.sampling) == (first.prompt_token_ids, first.sampling)
            assert (other.hash_root, other.block_hashes) == (first.hash_root, first.block_hashes)


async def test_a_prompt_of_token_ids_is_passed_on_as_it_is():
    async with Edge(ScriptedEngine()) as edge:
        requests = await sent(edge, 2, prompt=[[1, 2, 3], [999]])
        assert [request.prompt_token_ids for request in requests] == [(1, 2, 3), (999,)]


async def test_without_max_tokens_the_answer_may_fill_the_context():
    """cases SP02"""
    async with Edge(ScriptedEngine()) as edge:
        (request,) = await sent(edge)
        assert request.sampling.max_tokens == 10_000 - 40


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_tokens": 10_000}, "max_tokens", "context_length_exceeded"),
        ({"prompt": [1] * 10_000}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 1_000_000}, "prompt", "context_length_exceeded"),
        ({"prompt": ["x"] * 129}, "prompt", "invalid_request"),
        ({"prompt": [1000]}, "prompt", "invalid_request"),
    ],
)
async def test_what_can_never_be_served_goes_to_no_replica(fields, param, code):
    """cases SP02, SP09, RQ08"""
    async with Edge(ScriptedEngine()) as edge:
        response = await edge.complete(**fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, code)
        assert edge.fleet.dispatches == []


# Where it is done


class Gate:
    """Holds up whoever tokenizes until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: set[threading.Thread] = set()
        self._is_open = threading.Event()
        for name in ("encode", "render_chat"):
            monkeypatch.setattr(tokenizer(), name, self._gated(getattr(tokenizer(), name)))

    def open(self) -> None:
        self._is_open.set()

    async def reached(self, num_threads: int = 1) -> None:
        await until(lambda: len(self.threads) >= num_threads)

    def _gated(self, work):
        def wait_and_work(*args, **options):
            self.threads.add(threading.current_thread())
            assert self._is_open.wait(10)
            return work(*args, **options)

        return wait_and_work


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.open()  # a thread that waits would hold up the interpreter's exit


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_the_loop_serves_others_while_a_prompt_is_tokenized(gate, path):
    """cases TP01"""
    async with Edge(fake_engine()) as edge:
        prompt = {"messages": HELLO} if "chat" in path else {"prompt": "hello"}
        task = asyncio.ensure_future(edge.post(path, {"model": MODEL, **prompt}))
        await gate.reached()
        assert threading.current_thread() not in gate.threads
        assert (await edge.get("/health")).status_code == 200
        assert not task.done()
        gate.open()
        assert (await task).status_code == 200


async def test_a_prompt_that_takes_too_long_is_the_clients_error(gate):
    """cases TP01"""
    async with Edge(engine := ScriptedEngine()) as edge:
        task = asyncio.ensure_future(edge.chat())
        await gate.reached()
        pass_time(6)
        response = await task
        assert (response.status_code, response.json()["error"]["code"]) == (400, "prompt_timeout")
        assert not engine.submitted
        assert edge.count("requests_total", outcome="client_error") == 1


async def test_too_many_prompts_that_wait_are_refused(gate):
    async with Edge(fake_engine()) as edge:
        waiting = [asyncio.ensure_future(edge.preparer.tokenize(TOKENIZE)) for _ in range(256)]
        await gate.reached(2)
        response = await edge.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert response.headers["retry-after"] == "1"
        assert edge.count("requests_total", outcome="shed") == 1
        assert len(gate.threads) == 2
        gate.open()
        assert all(answer["count"] == 1 for answer in await asyncio.gather(*waiting))
        assert (await edge.chat(max_tokens=1)).status_code == 200


async def test_prompts_that_took_too_long_make_room(gate):
    async with Edge(fake_engine(), limits=LimitsConfig(template_timeout_s=5)) as edge:
        waiting = [asyncio.ensure_future(edge.preparer.tokenize(TOKENIZE)) for _ in range(256)]
        await gate.reached(2)
        pass_time(6)
        refusals = await asyncio.gather(*waiting, return_exceptions=True)
        assert {refusal.code for refusal in refusals} == {"prompt_timeout"}
        gate.open()
        assert (await edge.chat(max_tokens=1)).status_code == 200


async def test_a_request_is_in_flight_from_its_arrival(gate):
    """Tokenizing is part of the time to the first token."""
    async with Edge(engine := ScriptedEngine()) as edge:
        task = asyncio.ensure_future(edge.chat())
        await gate.reached()
        assert edge.count("requests_in_flight") == edge.count("requests_received_total") == 1
        pass_time(3)
        gate.open()
        (name,) = await submitted(engine)
        engine.tokens(name, *ids("hello"), finish=FinishReason.STOP)
        assert (await task).status_code == 200
        assert 3 <= edge.count("request_ttft_seconds_sum") < 13


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_while_its_prompt_was_tokenized_is_cancelled(gate, stream):
    """cases ST01"""
    async with Edge(engine := ScriptedEngine()) as edge:
        async with edge.chat_call(stream=stream) as call:
            await gate.reached()
            call.disconnect()
            gate.open()
            await call.ended()
        assert call.status is None
        assert edge.count("requests_total", outcome="cancelled") == 1
        assert engine.aborted.keys() == engine.submitted.keys()
