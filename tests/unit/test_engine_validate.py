"""The second wall: no value of a request may raise inside a step, so each bad one is refused here with its name."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scripted_runner import make_request

from replicas.blocks import hash_blocks
from replicas.contract import EngineInfo
from replicas.engine.validate import validate
from replicas.errors import ContextLengthError, RequestError

INFO = EngineInfo("m", "1", 100, 256, 16, 32, (0,), 64, 4)
GOOD = make_request("a", range(40), 10)
BAD_FLOATS = (math.nan, math.inf, -math.inf, -1e30, 1e30, 10**400, "nan", None, True)


def refusal(**changes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        validate(replace(GOOD, **changes), INFO)
    return caught.value


def test_a_good_request_passes_unchanged():
    assert validate(GOOD, INFO) is GOOD


@pytest.mark.parametrize("value", BAD_FLOATS)
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_a_float_that_is_not_finite_or_out_of_range_is_refused(name, value):
    """cases SP01"""
    assert refusal(sampling=replace(GOOD.sampling, **{name: value})).param == name


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("top_p", 0.0, "top_p"),
        ("repetition_penalty", 0.0, "repetition_penalty"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 2**63, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("min_tokens", 11, "min_tokens"),
        ("top_k", -1, "top_k"),
        ("seed", 2**63, "seed"),
        ("seed", -(2**63) - 1, "seed"),
        ("num_logprobs", 1_000_000, "logprobs"),
        ("num_logprobs", -1, "logprobs"),
        ("stop_token_ids", (100,), "stop_token_ids"),
        ("stop_token_ids", ("5",), "stop_token_ids"),
        ("logit_bias", ((5, 1.0), (100, 1.0)), "logit_bias"),
        ("logit_bias", (("AI", -100),), "logit_bias"),
        ("logit_bias", ((5, math.nan),), "logit_bias"),
        ("logit_bias", ((5, 101.0),), "logit_bias"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused(name, value, param):
    """cases SP02, SP05, SP07, SP08, SP13"""
    assert refusal(sampling=replace(GOOD.sampling, **{name: value})).param == param


def test_the_refusal_of_a_logit_bias_lists_the_wrong_ids():
    """cases SP07"""
    error = refusal(sampling=replace(GOOD.sampling, logit_bias=((3, 1.0), (123, 1.0), (-4, 1.0))))
    assert "123, -4" in error.message


@pytest.mark.parametrize("prompt", [(), (100,), (-1,), (2**63,), (10**5000,), (1.0,), ("1",), (None,), (True,)])
def test_an_empty_prompt_or_one_outside_the_vocabulary_is_refused(prompt):
    """cases SP09, SP10"""
    assert refusal(prompt_token_ids=prompt, block_hashes=()).param == "prompt"


@pytest.mark.parametrize(("num_prompt", "max_tokens", "param"), [(256, 1, "prompt"), (250, 7, "max_tokens")])
def test_a_request_longer_than_the_model_is_refused(num_prompt, max_tokens, param):
    """cases SP02, KV01"""
    with pytest.raises(ContextLengthError) as caught:
        validate(make_request("a", [1] * num_prompt, max_tokens), INFO)
    assert caught.value.param == param
    validate(make_request("a", [1] * 250, 6), INFO)


@pytest.mark.parametrize("num_prior", [-1, 40, 41])
def test_prior_output_leaves_at_least_one_token_of_prompt(num_prior):
    assert refusal(num_prior_output_tokens=num_prior).param == "num_prior_output_tokens"


def test_min_tokens_may_count_prior_output():
    sampling = replace(GOOD.sampling, min_tokens=15)
    validate(replace(GOOD, sampling=sampling, num_prior_output_tokens=5), INFO)


@pytest.mark.parametrize(
    "block_hashes",
    [
        GOOD.block_hashes[:1],
        (*GOOD.block_hashes, b"x"),
        hash_blocks(b"another root", range(40)),
        hash_blocks(b"root", range(1, 41)),
        ("text", "text"),
    ],
)
def test_block_names_that_do_not_belong_to_the_prompt_are_refused(block_hashes):
    """cases NS07"""
    assert refusal(block_hashes=block_hashes).param == "block_hashes"


def test_the_engine_names_the_blocks_if_the_sender_did_not():
    assert validate(replace(GOOD, block_hashes=()), INFO) == GOOD
    short = make_request("a", range(15))
    assert validate(short, INFO).block_hashes == ()


@pytest.mark.parametrize("request_id", ["", None, 5])
def test_a_request_needs_an_id(request_id):
    assert refusal(request_id=request_id).param == "request_id"
