"""With draft tokens an answer is the same as without, whatever is drafted, however it is sampled, and whatever else goes on."""

from __future__ import annotations

import random

import pytest
import tiny_models
from engine_rig import assert_nothing_is_held, collect, make_engine, request, serve, serve_alone, tokens
from paged_model import load_model, load_native
from test_engine_equivalence import PLAIN, SAMPLING, WORKLOAD, assert_same_answers

from configs.schema import EngineConfig, ModelConfig, SpeculationConfig
from replicas.contract import FinishReason
from replicas.engine import load_model as loading
from replicas.errors import ConfigError

NGRAM = SpeculationConfig(method="ngram")


class Oracle:
    """Drafts what the answers are known to be, with a wrong token in it now and then."""

    def __init__(self, answers, depth, right, seed=0):
        self.prompts = {one.request_id: len(one.prompt_token_ids) for one in WORKLOAD}
        self.answers = {name: answer.token_ids for name, answer in answers.items()}
        self.depth, self.right, self.rng = depth, right, random.Random(seed)
        self.accepted = 0

    def draft(self, requests, load, max_tokens):
        drafts = []
        for one in requests:
            done = len(one.token_ids) - self.prompts[one.request_id]
            ahead = self.answers[one.request_id][done : done + min(one.limit, self.depth, max_tokens)]
            drafts.append(tuple(token if self.rng.random() < self.right else self.rng.randrange(160) for token in ahead))
            max_tokens -= len(drafts[-1])
        return drafts

    def observe(self, request_id, num_drafted, num_accepted):
        self.accepted += num_accepted

    def forget(self, request_id):
        pass


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_models.make("llama", path)
    return path


@pytest.fixture(scope="module", params=[load_model, load_native], ids=["torch", "native"])
def model(request, directory):
    return request.param(directory)


@pytest.fixture(scope="module")
def plain(directory):
    return serve_alone(make_engine(load_model(directory), **PLAIN), *WORKLOAD)


def speculating(model, drafter, **options):
    engine = make_engine(model, **options)
    engine._scheduler._drafter = drafter
    return engine


@pytest.mark.parametrize(("depth", "right", "options"), [
    (1, 0.9, {}),
    (3, 0.7, {"max_num_seqs": 1}),
    (5, 0.9, {"max_num_batched_tokens": 33, "max_num_seqs": 32}),
    (4, 0.8, {"num_blocks": 20, "max_num_batched_tokens": 64}),
    (5, 0.0, {"num_blocks": 20, "prefix_caching": False}),
], ids=str)  # fmt: skip
def test_an_answer_is_the_same_with_drafts(model, plain, depth, right, options):
    oracle = Oracle(plain, depth, right)
    engine = speculating(model, oracle, **options)
    for _ in range(2):  # cold, and from the cache
        assert_same_answers(serve(engine, *WORKLOAD), plain)
    stats = engine.stats()
    assert stats.accepted_tokens_total == oracle.accepted
    assert (stats.accepted_tokens_total > 0.3 * stats.draft_tokens_total) == (right > 0.0)
    assert stats.preemptions_total > 0 or "num_blocks" not in options or right > 0.0  # accepted drafts end requests sooner
    assert_nothing_is_held(engine)


def test_an_abort_between_drafts_changes_nobody_elses_answer(model, plain):
    rng = random.Random(3)
    engine = speculating(model, Oracle(plain, 4, 0.8), num_blocks=24)
    arrivals, answers, aborted = list(WORKLOAD), {}, set()
    while arrivals or engine.stats().num_running + engine.stats().num_waiting:
        for _ in range(min(rng.choice((0, 0, 1, 2)), len(arrivals))):
            engine.submit(arrivals.pop())
        if rng.random() < 0.1:
            aborted.add(rng.choice(WORKLOAD).request_id)
            engine.abort(max(aborted))
        if (output := engine.step_once()) is not None:
            collect(answers, output)
    for name, answer in answers.items():
        assert answer.token_ids == plain[name].token_ids[: len(answer.token_ids)]
        assert answer.finish_reason is FinishReason.ABORT or answer.token_ids == plain[name].token_ids
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(("dtype", "quantization"), [("fp32", "none"), ("bf16", "none"), ("bf16", "int8"), ("bf16", "int4")])
def test_native_answers_are_the_same_to_the_last_bit_in_every_format(directory, dtype, quantization):
    model = load_native(directory, dtype, quantization)
    expected = serve(make_engine(model), *WORKLOAD)
    engine = speculating(model, Oracle(expected, 5, 0.8))
    answers = serve(engine, *WORKLOAD)
    assert answers == expected  # logprobs, too
    assert engine.stats().accepted_tokens_total > 0


def test_repetitive_text_is_drafted_from_itself(model):
    rng = random.Random(4)
    phrase = [rng.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(12)]
    requests = [
        request(f"r{index}", phrase * 4 + phrase[:index], 40, seed=index, **sampling) for index, sampling in enumerate(SAMPLING)
    ]
    expected = serve(make_engine(model), *requests)
    engine = make_engine(model, speculation=NGRAM)
    # As if a row cost nothing: a tiny model's steps say nothing about what pays.
    engine._scheduler._drafter._law = lambda load: (1.0, 0.0)
    assert tokens(serve(engine, *requests)) == tokens(expected)
    assert engine.stats().draft_tokens_total > 0


def test_int8_keys_and_values_go_with_no_drafts(directory):
    if loading.load() is None:
        pytest.skip("this CPU lacks the instructions")
    engine = EngineConfig(device="cpu", kv_cache_dtype="int8", kv_cache_bytes=2**24, speculation=NGRAM)
    with pytest.raises(ConfigError, match="speculation"):
        loading.load_model(ModelConfig(source=str(directory)), engine, num_threads=1, replicas_on_node=1)
