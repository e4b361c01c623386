"""Every route: who may call it, what it answers, and that whatever is wrong is answered in OpenAI's error format."""

from __future__ import annotations

import asyncio
import json
import logging

import httpx
import pytest
from asgi_call import AsgiCall
from local_edge import API_KEYS, CHAT, COMPLETIONS, HELLO, MODEL, Edge, bearer, fake_engine, ids, pass_time, tokenizer
from local_fleet import submitted
from scripted_engine import ScriptedEngine

from cluster.http_app import ROUTES
from configs.schema import LimitsConfig
from replicas.errors import NoReplicaError
from router.policy import Decision, Reason

PRIVATE = [spec for spec in ROUTES if not spec.public]
POSTS = [spec.path for spec in ROUTES if spec.method == "POST"]


def error_of(response: httpx.Response) -> dict[str, str | None]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


def a_path_of(template: str) -> str:
    return template.replace("{model:path}", MODEL)


# Who may call


def test_only_the_probes_and_the_metrics_are_public():
    assert {spec.path for spec in ROUTES if spec.public} == {"/health", "/ready", "/metrics"}


@pytest.mark.parametrize("spec", PRIVATE, ids=lambda spec: spec.path)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}], ids=["no key", "wrong key"])
async def test_no_other_route_answers_without_a_key(spec, headers):
    async with Edge(ScriptedEngine(), api_keys=API_KEYS) as edge:
        call = AsgiCall(edge.app, spec.method, a_path_of(spec.path), {}, headers=headers)
        async with call:
            error = json.loads(await call.rest())["error"]
        assert (call.status, error["type"]) == (401, "authentication_error")
        assert edge.count("requests_received_total") == 0
        assert edge.count("http_requests_total", status="401") == 1


@pytest.mark.parametrize("spec", PRIVATE, ids=lambda spec: spec.path)
async def test_every_other_route_opens_with_a_key(spec):
    async with Edge(ScriptedEngine(), api_keys=API_KEYS) as edge:
        call = AsgiCall(edge.app, spec.method, a_path_of(spec.path), {}, headers=bearer("alice"))
        async with call:
            await call.rest()
        assert call.status == (200 if spec.method == "GET" else 400)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_public_routes_need_no_key(path):
    async with Edge(ScriptedEngine(), api_keys=API_KEYS) as edge:
        assert (await edge.get(path)).status_code == 200


# Routes that generate nothing


async def test_models_tell_what_clients_look_for():
    async with Edge(ScriptedEngine()) as edge:
        listed = (await edge.get("/v1/models")).json()
        (model,) = listed["data"]
        assert (listed["object"], model["object"], model["owned_by"]) == ("list", "model", "trieserve")
        assert (model["id"], model["root"], model["parent"], model["max_model_len"]) == (MODEL, MODEL, None, 10_000)
        assert (await edge.get(f"/v1/models/{MODEL}")).json() == model


@pytest.mark.parametrize("name", ["other", "org/other", "m/"])
async def test_a_model_that_is_not_here_is_404(name):
    async with Edge(ScriptedEngine()) as edge:
        response = await edge.get(f"/v1/models/{name}")
        assert response.status_code == 404
        assert (error_of(response)["code"], error_of(response)["param"]) == ("model_not_found", "model")
        assert edge.count("http_requests_total", route="/v1/models/{model}", status="404") == 1


async def test_health_is_the_process_and_ready_is_the_fleet():
    async with Edge(ScriptedEngine(), ScriptedEngine()) as edge:
        numbers = {"replicas_ready": 2, "replicas_wanted": 2}
        assert (await edge.get("/ready")).json() == {"ready": True, **numbers, "models": {MODEL: numbers}}
        for replica in edge.fleet.replicas.values():
            replica.kill()
        response = await edge.get("/ready")
        assert (response.status_code, response.json()["ready"]) == (503, False)
        assert (await edge.get("/health")).status_code == 200


async def test_the_version_is_the_distributions():
    async with Edge(ScriptedEngine()) as edge:
        assert (await edge.get("/version")).json()["version"]


async def test_metrics_are_everybodys_and_those_that_are_missing_are_unknown():
    async with Edge(ScriptedEngine(), ScriptedEngine()) as edge:
        edge.fleet.replicas["r1"].kill()
        response = await edge.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "replica_is_here 1\n" in response.text
        assert 'scrape_up{source="r0"} 1.0' in response.text
        assert 'scrape_up{source="r1"} 0.0' in response.text


async def test_tokens_of_a_text_and_back():
    async with Edge(ScriptedEngine()) as edge:
        answer = (await edge.post("/tokenize", {"model": MODEL, "prompt": "hello é", "return_token_strs": True})).json()
        assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids("hello é"), len(ids("hello é")), 10_000)
        assert "".join(answer["token_strs"]) == "hello é"
        back = await edge.post("/detokenize", {"model": MODEL, "tokens": answer["tokens"]})
        assert back.json() == {"prompt": "hello é"}


async def test_tokens_of_a_conversation_are_those_that_the_engine_gets():
    async with Edge(engine := ScriptedEngine()) as edge:
        answer = (await edge.post("/tokenize", {"messages": HELLO})).json()
        assert answer["token_strs"] is None
        assert tokenizer().decode(answer["tokens"], skip_special_tokens=False).endswith("<|im_start|>assistant\n")
        async with edge.chat_call():
            await submitted(engine)
        (request,) = engine.submitted.values()
        assert list(request.prompt_token_ids) == answer["tokens"]


# What is wrong


async def test_an_unknown_route_is_404_in_openais_format():
    async with Edge(ScriptedEngine(), api_keys=API_KEYS) as edge:
        response = await edge.get("/v1/embeddings")
        assert (response.status_code, error_of(response)["type"]) == (404, "not_found_error")
        assert edge.count("http_requests_total", route="unmatched", status="404") == 1


@pytest.mark.parametrize("spec", ROUTES, ids=lambda spec: spec.path)
async def test_a_wrong_method_is_405_in_openais_format(spec):
    async with Edge(ScriptedEngine()) as edge:
        response = await edge.send("DELETE", a_path_of(spec.path))
        assert (response.status_code, error_of(response)["type"]) == (405, "invalid_request_error")
        assert spec.method in response.headers["allow"]


@pytest.mark.parametrize("path", POSTS)
async def test_a_body_over_the_limit_is_413_before_it_is_whole(path):
    """cases RQ05"""

    async def endless():
        while True:
            yield b"x" * 100

    async with Edge(ScriptedEngine(), limits=LimitsConfig(max_body_bytes=1024)) as edge:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(edge.app), base_url="http://edge")
        async with client:
            response = await client.post(path, content=endless())
        assert (response.status_code, error_of(response)["code"]) == (413, "payload_too_large")


@pytest.mark.parametrize("path", POSTS)
async def test_a_body_that_does_not_come_is_408(path):
    """cases RQ05"""

    async def nothing():
        yield b"{"
        asyncio.get_running_loop().call_soon(pass_time, 31)
        await asyncio.Event().wait()

    async with Edge(ScriptedEngine()) as edge:
        client = httpx.AsyncClient(transport=httpx.ASGITransport(edge.app), base_url="http://edge")
        async with client:
            response = await client.post(path, content=nothing())
        assert (response.status_code, error_of(response)["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_client_that_leaves_while_it_sends_is_counted_as_cancelled(path):
    """cases ST01"""
    async with Edge(ScriptedEngine()) as edge:

        async def receive():
            return {"type": "http.disconnect"}

        sent = []

        async def send(message):
            sent.append(message)

        await edge.app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
        assert sent == []
        assert edge.count("requests_total", outcome="cancelled") == 1
        assert edge.count("http_requests_total", route=path, status="499") == 1


RQ07 = {
    "stream_options without stream": ({"stream_options": {"include_usage": True}}, 400, "stream_options", None),
    "model null": ({"model": None}, 400, "model", None),
    "another model": ({"model": "gpt-4o"}, 404, "model", "model_not_found"),
    "no messages": ({"messages": []}, 400, "messages", None),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role", None),
    "unknown part": (
        {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
        400,
        "messages[0].content[0].type",
        None,
    ),
    "tools": ({"tools": [{"type": "function"}]}, 400, "tools", "unsupported_parameter"),
}


@pytest.mark.parametrize(("fields", "status", "param", "code"), RQ07.values(), ids=RQ07)
async def test_a_request_that_is_wrong_says_where(fields, status, param, code):
    """cases RQ07"""
    async with Edge(engine := ScriptedEngine()) as edge:
        response = await edge.chat(**fields)
        error = error_of(response)
        assert (response.status_code, error["param"]) == (status, param)
        assert error["code"] == (code or error["code"])
        assert not engine.submitted
        assert edge.count("requests_total", outcome="client_error", model_name="unknown") == 1


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", [b"", b"{", b'{"temperature":NaN}', b'{"prompt":"\\ud800"}', b"\xff"])
async def test_bytes_that_are_no_json_are_400(path, body):
    """cases RQ01, RQ02"""
    async with Edge(ScriptedEngine()) as edge:
        response = await edge.post(path, body)
        assert (response.status_code, error_of(response)["type"]) == (400, "invalid_request_error")


async def test_unknown_fields_are_counted_each_time_and_logged_once(caplog):
    """cases RQ07"""
    caplog.set_level(logging.WARNING, "cluster.http_app")
    async with Edge(fake_engine(num_answer_tokens=2)) as edge:
        for _ in range(3):
            assert (await edge.chat(frobnicate=1, user="u")).status_code == 200
        assert edge.count("unknown_fields_total", field="frobnicate") == 3
        assert edge.count("unknown_fields_total") == 3
    assert [record.message.count("frobnicate") for record in caplog.records] == [1]


async def test_a_client_cannot_fill_the_log_with_field_names(caplog):
    caplog.set_level(logging.WARNING, "cluster.http_app")
    async with Edge(fake_engine(num_answer_tokens=2)) as edge:
        for start in range(0, 160, 16):
            await edge.chat(**{f"x{number}": 1 for number in range(start, start + 16)})
    assert len(caplog.records) == 100


# Why this replica

ROUTING_HEADERS = {
    "x-trieserve-replica": "r1",
    "x-trieserve-reason": "longest_match",
    "x-trieserve-matched-tokens": "16",
    "x-trieserve-predicted-ttft-ms": "12.5",
    "x-trieserve-candidates": "r1=12.5,r0=80.0",
}
DECISION = Decision(("r1", "r0"), Reason.LONGEST_MATCH, (16, 0), (0.0125, 0.08))


def routing(headers):
    return {name: value for name, value in headers.items() if name.startswith("x-trieserve-")}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("exposed", "decision", "expected"),
    [
        (True, DECISION, ROUTING_HEADERS),
        (True, None, {"x-trieserve-replica": "r1", "x-trieserve-reason": "fallback_serve"}),
        (False, DECISION, {}),
    ],
)
async def test_routing_headers_are_there_for_those_who_asked(stream, exposed, decision, expected):
    async with Edge(fake_engine(2), fake_engine(2), expose_routing=exposed) as edge:
        edge.fleet.decision = decision
        edge.fleet.order.append("r1")
        response = await edge.chat(stream=stream)
        assert response.status_code == 200
        assert routing(response.headers) == expected


async def test_a_policy_that_predicts_nothing_says_unknown():
    async with Edge(fake_engine(2), expose_routing=True) as edge:
        edge.fleet.decision = Decision(("r0",), Reason.ROUND_ROBIN, (0,), None)
        headers = routing((await edge.chat()).headers)
        assert headers["x-trieserve-predicted-ttft-ms"] == "unknown"
        assert headers["x-trieserve-candidates"] == "r0=unknown"


async def test_a_request_that_no_replica_took_has_no_routing_headers():
    async with Edge(ScriptedEngine(), expose_routing=True) as edge:
        edge.fleet.failure = NoReplicaError("no replica is ready")
        response = await edge.chat()
        assert (response.status_code, routing(response.headers)) == (503, {})


async def test_decisions_and_what_came_of_them_are_counted():
    async with Edge(fake_engine(2), fake_engine(2)) as edge:
        edge.fleet.decision = DECISION
        edge.fleet.order.append("r1")
        num_prompt_tokens = (await edge.chat()).json()["usage"]["prompt_tokens"]
        assert edge.count("router_decisions_total", reason="longest_match") == 1
        assert edge.count("router_prompt_tokens_total") == num_prompt_tokens
        assert edge.count("router_matched_tokens_total") == 16
        assert edge.count("router_predicted_match_errors_total") == 1, "nothing was cached"
        edge.fleet.decision = None
        await edge.chat()
        assert edge.count("router_fallback_total", cause="serve") == 1
        assert edge.fleet.num_first_tokens == 2
