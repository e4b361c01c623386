"""However an answer was computed, it is the same: alone or among others, from the cache or not, in pieces, interrupted.

The plain way is one request at a time, each prompt in one step, without prefix cache, over the reference attention.
"""

from __future__ import annotations

import random

import pytest
import tiny_models
import torch
from engine_rig import (
    Answer,
    assert_nothing_is_held,
    collect,
    make_engine,
    request,
    resumed,
    serve,
    serve_alone,
    tokens,
)
from paged_model import load_model, load_native

from configs.schema import ModelConfig
from replicas.blocks import BLOCK_SIZE, chain_root
from replicas.contract import FinishReason
from replicas.engine.step import StepPlan, StepResult
from replicas.tokenizer import load_tokenizer

PLAIN = {"attention": "reference", "prefix_caching": False, "chunked_prefill": False, "max_num_seqs": 1}
SAMPLING = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "num_logprobs": 2},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"temperature": 0.9, "repetition_penalty": 1.1, "logit_bias": ((7, 4.0), (9, -100.0))},
    {"temperature": 1.0, "ignore_eos": False, "stop_token_ids": tuple(range(20, 30)), "min_tokens": 6},
    {"num_logprobs": 0},
)


def random_tokens(rng, count):
    return [rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(count)]


def make_workload(num_requests, seed, max_tokens=30):
    """Each way of sampling in turn; every third prompt begins like one of two that others begin like as well."""
    rng = random.Random(seed)
    shared = [random_tokens(rng, 70) for _ in range(2)]
    requests = []
    for index in range(num_requests):
        prompt = random_tokens(rng, rng.randint(1, 120))
        if index % 3 == 0:
            prompt = shared[index % 2][: rng.randint(20, 70)] + prompt
        sampling = {**SAMPLING[index % len(SAMPLING)], "seed": rng.getrandbits(60)}
        requests.append(request(f"r{index}", prompt, rng.randint(8, max_tokens), choice=index % 2, **sampling))
    return requests


WORKLOAD = make_workload(32, seed=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_models.make("llama", path)
    return path


LOADERS = {"torch": load_model, "native": load_native}


@pytest.fixture(scope="module", params=LOADERS)
def load(request):
    return LOADERS[request.param]


@pytest.fixture(scope="module")
def model(directory, load):
    return load(directory)


@pytest.fixture(scope="module")
def plain(directory):
    """The workload's answers, the plain way."""
    answers = serve_alone(make_engine(load_model(directory), **PLAIN), *WORKLOAD)
    assert {answer.finish_reason for answer in answers.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    return answers


def assert_same_answers(answers, expected):
    assert tokens(answers) == tokens(expected)
    for request_id, answer in answers.items():
        assert answer.finish_reason is expected[request_id].finish_reason
        assert_same_logprobs(answer, expected[request_id])


def assert_same_logprobs(answer, expected):
    assert [one.logprob for one in answer.logprobs] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-3)


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_an_answer_is_the_same_alone_and_among_31_others(model, plain, attention):
    assert_same_answers(serve_alone(make_engine(model, attention=attention), *WORKLOAD), plain)
    assert_same_answers(serve(make_engine(model, attention=attention, max_num_seqs=32), *WORKLOAD), plain)


@pytest.mark.parametrize(("max_num_batched_tokens", "max_num_seqs"), [(16, 5), (33, 32), (50, 16), (128, 32), (2048, 64)])
def test_an_answer_is_the_same_however_the_prompts_are_chunked(model, plain, max_num_batched_tokens, max_num_seqs):
    engine = make_engine(model, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
    assert_same_answers(serve(engine, *WORKLOAD), plain)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_an_answer_is_the_same_without_chunks(model, plain, prefix_caching):
    engine = make_engine(model, chunked_prefill=False, prefix_caching=prefix_caching, max_num_batched_tokens=64)
    assert_same_answers(serve(engine, *WORKLOAD), plain)


def test_an_answer_is_the_same_cold_and_from_the_cache(model, plain):
    engine = make_engine(model, num_blocks=1024)
    cold = serve(engine, *WORKLOAD)
    warm = serve(engine, *WORKLOAD)
    assert_same_answers(cold, plain)
    assert_same_answers(warm, plain)
    for one in WORKLOAD:
        num_reusable = (len(one.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert warm[one.request_id].num_cached_tokens == num_reusable
    uncached = serve(make_engine(model, prefix_caching=False), *WORKLOAD)
    assert_same_answers(uncached, plain)
    assert {answer.num_cached_tokens for answer in uncached.values()} == {0}


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_an_answer_is_the_same_after_preemptions(model, plain, prefix_caching):
    engine = make_engine(model, num_blocks=20, prefix_caching=prefix_caching, max_num_batched_tokens=64)
    assert_same_answers(serve(engine, *WORKLOAD), plain)
    assert engine.stats().preemptions_total > 0
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("num_done", [1, 5, -1])
def test_an_answer_that_continues_elsewhere_goes_on_the_same(model, plain, num_done):
    rest, expected = [], {}
    for one in WORKLOAD:
        token_ids = plain[one.request_id].token_ids
        done = num_done % len(token_ids)
        rest.append(resumed(one, token_ids, done))
        expected[one.request_id] = token_ids[done:]
    assert tokens(serve(make_engine(model), *rest)) == expected


def test_no_secret_of_one_prompt_shows_in_the_answer_to_another(model):
    """cases NS11"""
    rng = random.Random(2)
    before, after = random_tokens(rng, 40), random_tokens(rng, 20)
    secrets = [random_tokens(rng, 12) for _ in range(32)]
    requests = [request(f"s{i}", before + secret + after, 48, num_logprobs=3) for i, secret in enumerate(secrets)]
    expected = serve_alone(make_engine(model, **PLAIN), *requests)
    assert len({tuple(token_ids) for token_ids in tokens(expected).values()}) == len(secrets)
    engine = make_engine(model, num_blocks=96, max_num_batched_tokens=100)  # blocks change hands while others run
    for _ in range(2):
        assert_same_answers(serve(engine, *requests), expected)
    assert engine.stats().preemptions_total > 0


def test_tenants_share_no_block_and_one_tenant_does(model):
    engine = make_engine(model)
    prompt = random_tokens(random.Random(3), 100)
    mine, theirs = (chain_root(b"deployment", salt=salt) for salt in ("mine", "theirs"))
    requests = [request(name, prompt, 8, root=root) for name, root in (("a", mine), ("b", theirs), ("c", mine), ("d", theirs))]
    answers = serve_alone(engine, *requests)
    assert [answers[name].num_cached_tokens for name in "abcd"] == [0, 0, 96, 96]
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 1
    together = serve(make_engine(model), *requests)
    assert [together[name].num_cached_tokens for name in "abcd"] == [0, 0, 96, 96]


def test_an_abort_frees_the_blocks_within_a_step_and_changes_nobody_elses_answer(model, plain):
    engine = make_engine(model, prefix_caching=False)
    expected = {name: plain[name].token_ids for name in ("r1", "r2", "r4")}
    for one in WORKLOAD[1:5]:
        engine.submit(one)
    answers: dict[str, Answer] = {}
    for _ in range(4):
        collect(answers, engine.step_once())
    engine.abort("r3")
    collect(answers, engine.step_once())
    aborted = answers["r3"]
    assert aborted.finish_reason is FinishReason.ABORT
    assert aborted.token_ids == plain["r3"].token_ids[: len(aborted.token_ids)] != []
    # What was drawn last has no block yet.
    num_held = [len(WORKLOAD[int(name[1:])].prompt_token_ids) + len(answers[name].token_ids) - 1 for name in expected]
    assert engine.stats().num_blocks_used == sum(-(-num_tokens // BLOCK_SIZE) for num_tokens in num_held)
    while (output := engine.step_once()) is not None:
        collect(answers, output)
    assert {name: answers[name].token_ids for name in expected} == expected
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("attention", ["auto", "reference"])
def test_a_request_whose_logits_are_not_finite_ends_alone(tmp_path, load, plain, attention):
    poison = 2
    tiny_models.make("llama", tmp_path)
    tiny_models.poison(tmp_path, poison)
    model = load(tmp_path)
    assert all(poison not in one.prompt_token_ids for one in WORKLOAD)
    engine = make_engine(model, attention=attention, num_blocks=64)
    bad = [request(f"bad{i}", [poison] * (5 + 20 * i), 10) for i in range(3)]
    clean = [one for one in WORKLOAD if poison not in plain[one.request_id].token_ids]
    answers = serve(engine, *clean[:4], *bad, *clean[4:])
    for one in bad:
        answer = answers.pop(one.request_id)
        assert (answer.token_ids, answer.finish_reason) == ([], FinishReason.ERROR)
        assert "not finite" in answer.error.message
    assert_same_answers(answers, {one.request_id: plain[one.request_id] for one in clean})
    assert_nothing_is_held(engine)


class FailingRunner:
    """Computes a step whole, and raises then if `request_id` was in it."""

    def __init__(self, runner, request_id):
        self._runner = runner
        self._request_id = request_id

    def run(self, plan: StepPlan) -> StepResult:
        result = self._runner.run(plan)
        if any(chunk.request_id == self._request_id for chunk in plan.chunks):
            raise RuntimeError("a kernel failed")
        return result


def test_a_request_on_which_the_runner_fails_ends_alone(model, plain):
    engine = make_engine(model, wrap=lambda runner: FailingRunner(runner, "r3"), max_num_batched_tokens=200)
    answers = serve(engine, *WORKLOAD)
    failed = answers.pop("r3")
    assert (failed.token_ids, failed.finish_reason) == ([], FinishReason.ERROR)
    assert_same_answers(answers, {name: answer for name, answer in plain.items() if name != "r3"})
    assert_nothing_is_held(engine)


def serve_at_random(engine, requests, rng):
    """Submit a few before each step, abort one now and then. (answers, names of the blocks that the KV events leave.)"""
    arrivals, answers, named = list(reversed(requests)), {}, set()
    while arrivals or engine.stats().started_total > sum(engine.stats().finished_total.values()):
        for _ in range(min(rng.choice((0, 0, 1, 2)), len(arrivals))):
            engine.submit(arrivals.pop())
        if rng.random() < 0.1:
            engine.abort(rng.choice(requests).request_id)
        output = engine.step_once()
        if output is None:
            continue
        collect(answers, output)
        if output.kv_events is not None:
            assert named.issuperset(output.kv_events.removed)
            assert named.isdisjoint(output.kv_events.stored)
            named = named.difference(output.kv_events.removed).union(output.kv_events.stored)
        stats = output.stats
        assert stats.num_blocks_free + stats.num_blocks_cached + stats.num_blocks_used == stats.num_blocks_total
        assert stats.started_total == sum(stats.finished_total.values()) + stats.num_running + stats.num_waiting
    return answers, named


def test_the_books_are_straight_after_300_random_requests(model):
    requests = make_workload(300, seed=5, max_tokens=50)
    engine = make_engine(model, num_blocks=40, max_num_batched_tokens=100, max_num_seqs=24)
    answers, named = serve_at_random(engine, requests, random.Random(4))
    assert_nothing_is_held(engine)
    stats = engine.stats()
    assert stats.started_total == len(requests) == len(answers)
    num_ended = {reason: sum(answer.finish_reason is reason for answer in answers.values()) for reason in FinishReason}
    assert stats.finished_total == num_ended
    assert min(num_ended[reason] for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)) > 0
    assert stats.preemptions_total > 0
    assert stats.generation_tokens_total == sum(len(answer.token_ids) for answer in answers.values())
    scheduled = [one for one in requests if answers[one.request_id].num_cached_tokens is not None]
    assert stats.prompt_tokens_total == sum(len(one.prompt_token_ids) for one in scheduled)
    assert stats.prefix_hits_total == sum(answers[one.request_id].num_cached_tokens for one in scheduled)
    assert stats.num_blocks_cached == len(named)
    for request_id, alone in serve_alone(make_engine(model, **PLAIN), *requests[::15]).items():
        got = answers[request_id].token_ids
        assert got == alone.token_ids[: len(got)]
    engine.clear_cache()
    engine.step_once()
    assert engine.stats().num_blocks_free == engine.stats().num_blocks_total


@pytest.fixture(scope="module")
def embedded():
    """The embedded model in fp32."""
    return load_model(ModelConfig().source)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelConfig())


SECRETS = ("tangerine", "umbrella", "volcano", "saxophone", "lighthouse", "penguin", "marmalade", "telescope")


def test_the_embedded_model_tells_each_its_own_secret_whichever_way_it_is_computed(embedded, tokenizer):
    """cases NS11"""
    ask = "The password of Anna is {}. Question: What is the password of Anna? Answer: The password of Anna is"
    requests = [
        request(
            word, tokenizer.encode(ask.format(word), add_special_tokens=False), 5, temperature=0.4 * (index % 2), seed=index
        )
        for index, word in enumerate(SECRETS)
    ]
    expected = tokens(serve_alone(make_engine(embedded, num_blocks=16, **PLAIN), *requests))
    for word, token_ids in expected.items():
        text = tokenizer.decode(token_ids)
        assert [secret for secret in SECRETS if secret in text] == [word]
    engine = make_engine(embedded, num_blocks=32)
    assert tokens(serve(engine, *requests)) == expected
    assert tokens(serve_alone(engine, *requests)) == expected
    assert engine.stats().prefix_hits_total > 0
    chunked = make_engine(embedded, num_blocks=24, max_num_batched_tokens=23, max_num_seqs=6)
    assert tokens(serve(chunked, *requests)) == expected
    rest = [resumed(one, expected[one.request_id], 2) for one in requests]
    assert tokens(serve(engine, *rest)) == {word: token_ids[2:] for word, token_ids in expected.items()}


def test_logprobs_of_the_embedded_model_are_those_of_transformers(embedded, embedded_reference, tokenizer):
    texts = ("The capital of France is", "def fibonacci(n):\n    if n < 2:\n")
    requests = [request(text, tokenizer.encode(text, add_special_tokens=False), 16, num_logprobs=1) for text in texts]
    for text, answer in serve(make_engine(embedded, num_blocks=16), *requests).items():
        prompt = next(one.prompt_token_ids for one in requests if one.request_id == text)
        with torch.inference_mode():
            logits = embedded_reference(torch.tensor([[*prompt, *answer.token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
        expected, greedy = torch.log_softmax(logits, dim=-1).max(dim=-1)
        assert answer.token_ids == greedy.tolist()
        assert [one.logprob for one in answer.logprobs] == pytest.approx(expected.tolist(), abs=1e-3)
        assert [one.top for one in answer.logprobs] == [((one.token_id, one.logprob),) for one in answer.logprobs]
