"""OpenAI's own client against a whole app: HAProxy, two ingresses, two replicas."""

from __future__ import annotations

import asyncio

import openai
import pytest
from app_client import MODEL

MESSAGES = [{"role": "user", "content": "What is a prefix tree?"}]


@pytest.fixture
def client(app):
    with app.openai() as client:
        yield client


def test_a_chat_is_answered_with_as_many_tokens_as_asked_for(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streamed_chat_is_the_same_text_as_a_whole_one(client):
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 7}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    with_choice = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in with_choice) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in with_choice if choice.finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_streamed_completion_is_the_same_text_as_a_whole_one(client):
    fields = {"model": MODEL, "prompt": "once upon a time", "max_tokens": 12, "seed": 7}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_each_of_n_choices_is_whole_and_different(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, n=2, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens == 16


def test_several_prompts_with_several_choices_come_back_in_order(client):
    prompts = ["the first", "the second", "the third"]
    answer = client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=6, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    alone = client.completions.create(model=MODEL, prompt=prompts[1], n=2, max_tokens=6, seed=3)
    assert [choice.text for choice in answer.choices[2:4]] == [choice.text for choice in alone.choices]
    assert answer.usage.completion_tokens == 36


def test_streamed_choices_carry_their_index_and_each_ends_once(client):
    chunks = client.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=6, stream=True)
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1, 2, 3]


def test_a_stop_string_ends_the_text_before_it(client):
    fields = {"model": MODEL, "prompt": "once upon a time", "max_tokens": 30, "seed": 5}
    text = client.completions.create(**fields).choices[0].text
    stop = text[len(text) // 2 :][:6]
    [choice] = client.completions.create(**fields, stop=[stop]).choices
    assert choice.finish_reason == "stop"
    assert choice.text == text[: text.index(stop)]


def test_logprobs_come_for_each_token(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in content)


def test_the_model_is_listed_with_what_it_can_hold(client):
    [model] = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).max_model_len > 0


@pytest.mark.parametrize(
    ("fields", "error_type", "code", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "invalid_request", "temperature"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            openai.BadRequestError,
            "unsupported_parameter",
            "tools",
        ),
        ({"model": "another"}, openai.NotFoundError, "model_not_found", "model"),
        (
            {"messages": [{"role": "user", "content": "long " * 20_000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            None,
        ),
        ({"max_tokens": 10**6}, openai.BadRequestError, "context_length_exceeded", None),
    ],
    ids=["value", "unsupported", "model", "prompt", "max_tokens"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_is_the_exception_that_the_client_has_for_it(client, fields, error_type, code, param, stream):
    with pytest.raises(error_type) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "stream": stream, **fields})
    assert caught.value.code == code
    assert param is None or caught.value.param == param


def test_a_body_that_is_too_large_is_refused_as_such(client):
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=MODEL, prompt="x" * (9 * 2**20))
    assert caught.value.status_code == 413


async def test_two_hundred_requests_at_once_all_succeed(app):
    """The async client, half of them streams."""
    async with app.async_openai() as client:

        async def ask(number: int) -> int:
            fields = {"model": MODEL, "prompt": f"{number} is a number", "max_tokens": 16}
            if number % 2:
                return (await client.completions.create(**fields)).usage.completion_tokens
            options = {"stream": True, "stream_options": {"include_usage": True}}
            return [chunk async for chunk in await client.completions.create(**fields, **options)][-1].usage.completion_tokens

        assert await asyncio.gather(*map(ask, range(200))) == [16] * 200
