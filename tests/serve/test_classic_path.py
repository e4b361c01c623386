"""The fallback: Serve's Python proxy and its streaming calls instead of HAProxy and the token sockets."""

from __future__ import annotations

import signal

import openai
import pytest
from app_client import MODEL, endless_body, gauges_at_rest
from conftest import fake_config
from processes import free_port, until

MESSAGES = [{"role": "user", "content": "What is a prefix tree?"}]


@pytest.fixture(scope="module")
def app(up):
    with up(fake_config(free_port(), haproxy=False, data_path="classic"), stop=signal.SIGTERM) as running:
        yield running


@pytest.fixture
def client(app):
    with app.openai() as client:
        yield client


def test_no_haproxy_is_started(app):
    assert app.server.named("haproxy") == []


def test_a_streamed_chat_is_the_same_text_as_a_whole_one(client):
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 7, "n": 2}
    whole = client.chat.completions.create(**fields)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert whole.usage.completion_tokens == 24


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_ends_its_request(app, stream):
    with app.request_in_two_packets(endless_body(stream=stream, num_bytes=0)) as connection:
        until(app.num_running, 10, "the request did not start")
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: app.num_running() == 0, 2, "the engine went on for nobody")
    assert set(gauges_at_rest(app.metrics()).values()) == {0}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_what_only_the_engine_refuses_is_the_clients_mistake_here_too(client, stream):
    fields = {"model": MODEL, "prompt": "long " * 20_000, "stream": stream}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**fields)
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_goes_where_its_beginning_is_cached(app):
    prompt = "A long text that many requests begin with. " * 30
    cold = app.complete(prompt)
    warm = until(lambda: matching(app, prompt), 5, "the router did not hear of the cached blocks")
    assert warm.headers["x-trieserve-replica"] == cold.headers["x-trieserve-replica"]
    assert int(warm.headers["x-trieserve-matched-tokens"]) == warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def matching(app, prompt):
    reply = app.complete(prompt + "What next?")
    return reply if reply.headers["x-trieserve-reason"] == "longest_match" else None
