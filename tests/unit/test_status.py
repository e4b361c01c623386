"""What `status` makes of an app's answers, and of those of something else at its address."""

from __future__ import annotations

import httpx
import pytest

from cluster import status

READY = {
    "ready": False,
    "models": {
        "one": {"replicas_ready": 1, "replicas_wanted": 2},
        "other": {"replicas_ready": 0, "replicas_wanted": 1},
    },
}
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="one",engine="a"} 3
vllm:num_requests_running{model_name="other",engine="b"} 0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="one",engine="a"} 0.25
"""


@pytest.fixture
def app(monkeypatch):
    """Answers by path; everything else is not found."""
    answers: dict[str, httpx.Response] = {}

    def respond(request: httpx.Request) -> httpx.Response:
        return answers.get(request.url.path, httpx.Response(404, text="no such thing"))

    client = httpx.Client
    monkeypatch.setattr(status.httpx, "Client", lambda **options: client(**options, transport=httpx.MockTransport(respond)))
    return answers


def test_each_model_and_each_replica_is_told_of(app, capsys):
    app["/ready"] = httpx.Response(503, json=READY)
    app["/version"] = httpx.Response(401)
    app["/metrics"] = httpx.Response(200, text=METRICS)
    found = status.collect("http://app")
    assert (found.ready, found.version, found.models) == (False, "", READY["models"])
    assert found.replicas["a"] == {"model": "one", "running": 3.0, "kv_usage": 0.25}
    assert not status.status("http://app")
    shown = capsys.readouterr().out
    assert "NOT READY" in shown
    assert "one: 1 of 2 replicas ready" in shown
    assert "unknown" in shown


def test_something_else_that_answers_there_is_quoted(app):
    found = status.collect("http://app")
    assert (found.ready, found.detail, found.models, found.replicas) == (False, "no such thing", {}, {})
