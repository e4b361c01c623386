"""A whole app with two models, one served by our engine and one by vLLM with an adapter: as a user starts it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import lora_adapter
import openai
import psutil
import pytest
import yaml

from tests.serve.processes import Server, free_port, server, until

NATIVE, VLLM, ADAPTER = "ours", "theirs", "tuned"
HELLO = [{"role": "user", "content": "What is the capital of Italy? Answer in one word."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


class App:
    def __init__(self, port: int, started: Server) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.server = started
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def ready(self) -> dict[str, int]:
        models = httpx.get(f"{self.url}/ready", timeout=30).json()["models"]
        return {name: each["replicas_ready"] for name, each in models.items()}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("app")
    adapter = lora_adapter.make(folder / "tuned")
    port = free_port()
    cache = {"device": "cpu", "kv_cache_bytes": 2**27, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    replicas = {"num": 1, "num_cpus": 1, "health_check_period_s": 0.5}
    config = {
        "model": {"served_name": NATIVE, "max_model_len": 1024},
        "engine": {"kind": "native", **cache},
        "replicas": replicas,
        "more_fleets": [
            {
                "model": {
                    "served_name": VLLM,
                    "max_model_len": 1024,
                    "adapters": [{"name": ADAPTER, "source": str(adapter)}],
                },
                "engine": {"kind": "vllm", **cache, "vllm": {"enforce_eager": True}},
                "replicas": replicas,
            }
        ],
        "ingress": {"port": port, "expose_routing": True},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TRIESERVE_", "RAY_", "VLLM_"))}
    environment = mine | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "cluster", "up", "--config", str(folder / "config.yaml")]
    with server(command, environment, folder / "log", stop=signal.SIGINT) as started:
        started.wait_until(lambda: "ready: " in started.output(), timeout_s=400)
        yield App(port, started)


def test_every_model_and_adapter_is_listed_and_answers(app: App) -> None:
    assert [(model.id, model.parent) for model in app.client.models.list()] == [(NATIVE, None), (VLLM, None), (ADAPTER, VLLM)]
    texts = {}
    for name in (NATIVE, VLLM, ADAPTER):
        reply = app.client.chat.completions.create(model=name, messages=HELLO, max_tokens=12, temperature=0)
        texts[name] = reply.choices[0].message.content
    assert texts[VLLM] != texts[ADAPTER]


def test_a_stream_of_vllms_is_like_any_other(app: App) -> None:
    chunks = list(
        app.client.chat.completions.create(
            model=VLLM, messages=HELLO, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_a_stop_string_is_cut_where_it_begins(app: App) -> None:
    whole = app.client.completions.create(model=VLLM, prompt="1, 2, 3, 4,", max_tokens=12, temperature=0).choices[0].text
    stop = whole[4:6]
    cut = app.client.completions.create(model=VLLM, prompt="1, 2, 3, 4,", max_tokens=12, temperature=0, stop=stop)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (whole[: whole.index(stop)], "stop")


def test_structured_output_works_where_the_engine_keeps_to_it_alone(app: App) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    asked = {"messages": HELLO, "max_tokens": 60, "temperature": 0, "response_format": wanted}
    reply = app.client.chat.completions.create(model=VLLM, **asked)
    assert reply.choices[0].finish_reason == "stop"
    assert json.loads(reply.choices[0].message.content or "").keys() == {"city"}
    with pytest.raises(openai.BadRequestError) as caught:
        app.client.chat.completions.create(model=NATIVE, **asked)
    assert caught.value.param == "response_format"


def test_a_grammar_that_vllm_can_t_compile_is_a_400(app: App) -> None:
    """cases SO01"""
    with pytest.raises(openai.BadRequestError):
        app.client.chat.completions.create(model=VLLM, messages=HELLO, extra_body={"structured_outputs": {"regex": "(a"}})


def test_a_cached_prefix_is_predicted_exactly(app: App) -> None:
    body = {"model": VLLM, "prompt": "all of this is known by now. " * 20, "max_tokens": 2}
    assert httpx.post(f"{app.url}/v1/completions", json=body, timeout=60).status_code == 200
    time.sleep(0.5)  # the events are on their way
    reply = httpx.post(f"{app.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    cached = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 96
    assert int(reply.headers["x-trieserve-matched-tokens"]) == cached


def test_nothing_listens_beyond_loopback(app: App) -> None:
    """cases NS01. Ray's own processes are as they are: these are ours and vLLM's."""
    ours = [process for process in app.server.family() if any(word in _title(process) for word in ("ServeReplica", "VLLM"))]
    assert any("VLLM" in _title(process) for process in ours)
    exposed = {
        (_title(process), connection.laddr.ip, connection.laddr.port)
        for process in ours
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and not connection.laddr.ip.startswith(("127.", "::1"))
    }
    # Every worker of Ray's has a port of its own core for other nodes, whatever it runs.
    assert {entry for entry in exposed if "VLLM" in entry[0]} == set()


def test_a_dead_core_makes_its_model_unready_at_once_and_is_replaced(app: App) -> None:
    [core] = [process for process in app.server.family() if "VLLM::EngineCore" in _title(process)]
    core.send_signal(signal.SIGKILL)
    killed_at_s = time.monotonic()
    until(lambda: app.ready()[VLLM] == 0, 10, "the replica stays ready")
    assert time.monotonic() - killed_at_s < 2.0
    reply = app.client.chat.completions.create(model=NATIVE, messages=HELLO, max_tokens=4)
    assert reply.choices[0].finish_reason == "length"
    until(lambda: app.ready()[VLLM] == 1, 200, "the replica is not replaced")
    assert app.client.chat.completions.create(model=VLLM, messages=HELLO, max_tokens=4).choices[0].message.content


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
