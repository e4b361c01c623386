"""configs/tiny-cpu.yaml as it is: the model that comes along, on two replicas."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml
from processes import ROOT, free_port

MODEL = "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "Name the capital city of France."}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def app(up):
    config = yaml.safe_load((ROOT / "configs" / "tiny-cpu.yaml").read_text())
    config["ingress"]["port"] = free_port()
    with up(config) as running:
        yield running


@pytest.fixture
def client(app):
    with app.openai() as client:
        yield client


def test_a_question_gets_a_sensible_answer(client):
    answer = client.chat.completions.create(messages=QUESTION, **GREEDY)
    assert "Paris" in answer.choices[0].message.content


def test_streamed_text_is_the_same_as_whole_text(client):
    whole = client.chat.completions.create(messages=QUESTION, **GREEDY).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(messages=QUESTION, stream=True, **GREEDY)]
    assert "".join(choice.delta.content or "" for choice in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason


def test_a_second_turn_finds_the_first_in_the_cache(client):
    talk = [{"role": "user", "content": "Tell me about the river Rhine, its source, its cities and where it ends."}]
    first = client.chat.completions.create(messages=talk, **GREEDY)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    second = client.chat.completions.create(messages=[*talk, answer, {"role": "user", "content": "And the Elbe?"}], **GREEDY)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16


def test_status_tells_of_both_replicas(app):
    command = [sys.executable, "-m", "cluster", "status", "--url", app.url, "--json"]
    status = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert status.returncode == 0, status.stderr
    found = json.loads(status.stdout)
    assert found["ready"] is True
    assert len(found["replicas"]) == 2
    assert sum(replica["generated_tokens"] for replica in found["replicas"].values()) > 0
