"""An app with two models, each with replicas of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from app_client import MODEL
from conftest import RunningApp, fake_config
from processes import free_port, until

OTHER, ADAPTER = "other", "other-tuned"
OTHER_ENGINE = f"ray::ServeReplica:trieserve:engine-{OTHER}"


@pytest.fixture(scope="module")
def app(up, tmp_path_factory) -> Iterator[RunningApp]:
    config = fake_config(free_port())
    config["replicas"]["num"] = 1
    config["more_fleets"] = [
        {
            "model": {"served_name": OTHER, "adapters": [{"name": ADAPTER, "source": str(tmp_path_factory.mktemp("adapter"))}]},
            "engine": {**config["engine"], "fake_base_s": 0.001},
            "replicas": config["replicas"],
        }
    ]
    with up(config) as running:
        yield running


def test_each_model_is_listed_and_answers(app):
    assert [model.id for model in app.openai().models.list()] == [MODEL, OTHER]
    replicas = set()
    for name in (MODEL, OTHER):
        reply = app.complete("to whom?", model=name)
        assert reply.json()["model"] == name
        replicas.add(reply.headers["x-trieserve-replica"])
    assert len(replicas) == 2
    labels = {dict(of).get("model_name") for name, of in app.metrics() if name == "vllm:num_requests_running"}
    assert labels == {MODEL, OTHER}


def test_an_adapter_of_an_engine_that_computes_none_is_the_clients_mistake(app):
    with pytest.raises(openai.BadRequestError) as caught:
        app.openai().completions.create(model=ADAPTER, prompt="x", max_tokens=1)
    assert caught.value.param == "model"


def test_structured_output_is_refused_where_no_engine_keeps_to_it(app):
    with pytest.raises(openai.BadRequestError) as caught:
        app.openai().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], response_format={"type": "json_object"}
        )
    assert caught.value.param == "response_format"


def test_one_model_without_replicas_hurts_no_other(app):
    [victim] = app.server.named(OTHER_ENGINE)
    victim.send_signal(signal.SIGKILL)
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda i: app.complete(f"question {i}").status_code, range(40)))
    assert replies == [200] * 40
    until(lambda: ready(app)[OTHER] == 1, 60, "the model's replica was not replaced")
    assert app.complete("are you back?", model=OTHER).status_code == 200


def ready(app: RunningApp) -> dict[str, int]:
    models = httpx.get(f"{app.url}/ready", timeout=30).json()["models"]
    return {name: each["replicas_ready"] for name, each in models.items()}
