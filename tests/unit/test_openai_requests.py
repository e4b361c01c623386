"""What a client may ask, row by row (openai_cases.yaml), and what becomes of it."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_tokenizer
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.openai_api import (
    Conversation,
    Kind,
    detokenize,
    prompt_token_ids,
    require_grammar,
    to_sampling,
)
from cluster.openai_errors import error_body
from cluster.openai_models import ChatBody, CompletionBody
from cluster.openai_parse import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from configs.schema import LimitsConfig
from replicas.errors import ContextLengthError, PayloadTooLarge, RequestError, UnsupportedError

LIMITS = LimitsConfig()
VOCAB_SIZE = 49152
VALID = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    "completion": {"model": "m", "prompt": "hello"},
    "tokenize": {"prompt": "hello"},
    "detokenize": {"tokens": [5, 6]},
}


def _expanded(value):
    """`{repeat: [x, n]}` in the table is x n times."""
    if isinstance(value, dict):
        if value.keys() == {"repeat"}:
            what, times = value["repeat"]
            return what * times
        return {name: _expanded(each) for name, each in value.items()}
    return [_expanded(each) for each in value] if isinstance(value, list) else value


_TABLE = _expanded(yaml.safe_load((Path(__file__).parent / "openai_cases.yaml").read_text()))
ROWS = [pytest.param(route, row, id=f"{route}-{row['id']}") for route, rows in _TABLE.items() for row in rows]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_tokenizer.make(tmp_path_factory.mktemp("tiny"))


def handle(route, body, tokenizer):
    """All that the ingress does to a request before it goes to a replica."""
    if route == "detokenize":
        return detokenize(parse_detokenize(body, LIMITS), tokenizer)
    if route == "tokenize":
        return prompt_token_ids(parse_tokenize(body, LIMITS).prompt, tokenizer, vocab_size=VOCAB_SIZE)
    call = (parse_chat if route == "chat" else parse_completion)(body, LIMITS)
    for prompt in call.prompts:
        ids = prompt_token_ids(prompt, tokenizer, vocab_size=VOCAB_SIZE)
        require_grammar(call, ())
        to_sampling(call, num_prompt_tokens=len(ids), max_model_len=1000, vocab_size=VOCAB_SIZE, default_seed=1)
    return call


def body_of(route, **fields):
    return json.dumps({**VALID[route], **fields}).encode()


@pytest.mark.parametrize(("route", "row"), ROWS)
def test_each_row_of_the_table(tokenizer, route, row):
    """cases RQ01, RQ02, RQ07, RQ08, SP01-SP11, SP13, SO01-SO04, TP01, TP02, MD01, MD02"""
    body = row["raw"].encode() if "raw" in row else body_of(route, **row["body"])
    if row["status"] == 200:
        handle(route, body, tokenizer)
        return
    with pytest.raises(RequestError) as caught:
        handle(route, body, tokenizer)
    assert (caught.value.status, caught.value.param) == (row["status"], row.get("param"))
    assert caught.value.code == row.get("code", caught.value.code)


@pytest.mark.parametrize("where", ['"temperature"', '"never_heard_of"', '"metadata"', '"messages"'])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_a_clean_error(where, opening, closing):
    """cases RQ03"""
    depth = 50_000
    body = f'{{"model":"m","messages":[],{where}:{opening * depth}1{closing * depth}}}'
    with pytest.raises(RequestError):
        parse_chat(body.encode(), LIMITS)


def test_a_number_of_thousands_of_digits_is_a_clean_error():
    for digits in (400, 5000):
        for field in ("seed", "temperature", "n", "zz"):
            body = f'{{"model":"m","messages":[{{"role":"user","content":"x"}}],"{field}":1{"0" * digits}}}'.encode()
            if field == "zz" and digits == 400:
                assert parse_chat(body, LIMITS).unknown_fields == ("zz",)
            else:
                with pytest.raises(RequestError):
                    parse_chat(body, LIMITS)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
field_names = st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tools", "role"}))


@settings(deadline=None)
@given(st.dictionaries(field_names | st.text(max_size=5), json_values, max_size=6), st.sampled_from(["chat", "completion"]))
def test_any_json_is_answered_or_refused_but_never_crashes(fields, route):
    body = json.dumps({**VALID[route], **fields}).encode()
    with suppress(RequestError):
        (parse_chat if route == "chat" else parse_completion)(body, LIMITS)


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_refused(body):
    with pytest.raises(RequestError):
        parse_chat(body, LIMITS)


def test_errors_never_repeat_what_the_client_sent():
    secret = "MySecretCanary"
    bodies = [
        body_of("chat", temperature=secret),
        body_of("chat", messages=[{"role": secret, "content": "x"}]),
        body_of("chat", messages=[{"role": "user", "content": {secret: secret}}]),
        body_of("chat", messages=[{"role": "user", "content": [{"type": secret}]}]),
        body_of("chat", logit_bias={secret: 1}),
        body_of("chat", logit_bias={secret: 1000}),
        body_of("chat", chat_template_kwargs={secret: 1}),
        body_of("chat", tools=[secret]),
        b'{"' + secret.encode() + b'": \xff}',
    ]
    for body in bodies:
        with pytest.raises(RequestError) as caught:
            parse_chat(body, LIMITS)
        assert secret not in json.dumps(error_body(caught.value))


def test_unknown_fields_are_ignored_and_named_safely_for_the_log():
    """cases RQ07"""
    unknown = {"frobnicate": 1, "bad name\n": 2, **{f"x{i}": 0 for i in range(50)}}
    message = {"role": "user", "content": "hi", "mood": "good", "refusal": None}
    call = parse_chat(body_of("chat", messages=[message], user="u", **unknown), LIMITS)
    assert call.unknown_fields[:3] == ("frobnicate", "?", "x0")
    assert len(call.unknown_fields) == 16
    assert parse_chat(body_of("chat", messages=[message]), LIMITS).unknown_fields == ("messages.mood",)
    assert parse_chat(body_of("chat", user="u", metadata={}), LIMITS).unknown_fields == ()


def test_a_body_over_the_limit_is_413():
    with pytest.raises(PayloadTooLarge):
        parse_chat(body_of("chat"), replace(LIMITS, max_body_bytes=10))


def test_all_fields_arrive():
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1}
    fields |= {"repetition_penalty": 1.5, "logit_bias": {"7": 2}, "seed": -3, "stop": "END", "stop_token_ids": [9], "n": 2}
    fields |= {"ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True, "cache_salt": "s"}
    fields |= {"min_tokens": 1, "max_tokens": 9}
    call = parse_completion(body_of("completion", stream=True, stream_options=options, logprobs=3, **fields), LIMITS)
    assert (call.kind, call.model, call.prompts, call.stop, call.n) == (Kind.COMPLETION, "m", ("hello",), ("END",), 2)
    assert (call.stream, call.include_usage, call.continuous_usage) == (True, True, True)
    assert (call.include_stop, call.skip_special_tokens, call.cache_salt) == (True, False, "s")
    sampling = to_sampling(call, num_prompt_tokens=3, max_model_len=100, vocab_size=50, default_seed=1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert (sampling.logit_bias, sampling.seed, sampling.stop_token_ids) == (((7, 2),), -3, (9,))
    assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos, sampling.num_logprobs) == (1, 9, True, 3)


def test_without_max_tokens_the_answer_may_fill_the_context():
    """cases SP02"""
    call = parse_chat(body_of("chat"), LIMITS)
    sampling = to_sampling(call, num_prompt_tokens=30, max_model_len=100, vocab_size=50, default_seed=77)
    assert (sampling.max_tokens, sampling.seed, sampling.temperature, sampling.num_logprobs) == (70, 77, 1.0, None)


@pytest.mark.parametrize(("prompt", "max_tokens", "counts"), [(100, None, "100"), (101, 5, "101"), (60, 41, "101")])
def test_what_does_not_fit_says_the_counts(prompt, max_tokens, counts):
    """cases SP02"""
    call = parse_chat(body_of("chat", max_tokens=max_tokens), LIMITS)
    with pytest.raises(ContextLengthError, match=counts):
        to_sampling(call, num_prompt_tokens=prompt, max_model_len=100, vocab_size=50, default_seed=1)


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(tokenizer):
    call = parse_completion(body_of("completion", prompt="x" * 100_000), LIMITS)
    with pytest.raises(ContextLengthError, match="100000 characters"):
        prompt_token_ids(call.prompts[0], tokenizer, vocab_size=VOCAB_SIZE, max_model_len=1000)
    assert prompt_token_ids("hello", tokenizer, vocab_size=VOCAB_SIZE, max_model_len=1)


def test_offending_ids_are_listed():
    """cases SP07"""
    call = parse_chat(body_of("chat", logit_bias={"50": 1, "3": 1, "99": 1}), LIMITS)
    with pytest.raises(RequestError, match=r"50, 99$"):
        to_sampling(call, num_prompt_tokens=1, max_model_len=100, vocab_size=50, default_seed=1)


def test_parts_are_joined_and_developers_are_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = parse_chat(body_of("chat", messages=[{"role": "developer", "content": parts, "name": "x"}]), LIMITS)
    (prompt,) = call.prompts
    assert isinstance(prompt, Conversation)
    assert [(m.role, m.content, m.name) for m in prompt.messages] == [("system", "a\nb", "x")]


def test_special_tokens_in_a_prompt_stay_text(tokenizer):
    """cases SP12"""
    call = parse_completion(body_of("completion", prompt="<|im_end|>"), LIMITS)
    ids = prompt_token_ids(call.prompts[0], tokenizer, vocab_size=VOCAB_SIZE)
    assert not tokenizer.special_ids.intersection(ids)


def test_unsupported_fields_have_their_own_code():
    with pytest.raises(UnsupportedError) as caught:
        parse_chat(body_of("chat", tools=[{}]), LIMITS)
    assert error_body(caught.value)["error"]["code"] == "unsupported_parameter"
