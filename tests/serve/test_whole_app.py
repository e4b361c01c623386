"""What an operator sees of a whole app: metrics that agree and add up, routing that says why, ports, keys."""

from __future__ import annotations

import asyncio

import httpx
import psutil
import pytest
from app_client import MODEL, gauges_at_rest, total
from conftest import BOB
from processes import until

LONG_PROMPT = "A long text that many requests begin with. " * 30


def labels_of(series, name: str, label: str) -> set[str]:
    return {dict(labels)[label] for found, labels in series if found == name}


# Metrics


def test_every_ingress_shows_the_same_series(app):
    def answered() -> set[str]:
        series = app.metrics()
        return {
            dict(labels)["ingress"]
            for name, labels in series
            if name == "trieserve:http_requests_total" and ("route", "/metrics") in labels
        }

    until(lambda: len(answered()) == 2, 30, "only one of the ingresses is ever asked")
    first = app.metrics().keys()
    assert all(app.metrics().keys() == first for _ in range(20))
    assert len(labels_of(first, "vllm:num_requests_running", "engine")) == 2
    assert len(labels_of(first, "trieserve:event_loop_lag_seconds_count", "ingress")) == 2


async def test_started_is_finished_and_running_and_waiting_at_any_moment(app):
    async with app.async_openai() as client:
        asks = [
            asyncio.ensure_future(client.completions.create(model=MODEL, prompt=f"{number} of many", max_tokens=5 * number + 1))
            for number in range(60)
        ]
        looks = []
        while not all(ask.done() for ask in asks):
            looks.append(await asyncio.to_thread(app.metrics))
        await asyncio.gather(*asks)
    for series in looks:
        now = total(series, "vllm:num_requests_running") + total(series, "vllm:num_requests_waiting")
        assert total(series, "trieserve:requests_started_total") == now + total(series, "trieserve:requests_finished_total")
    assert max(total(series, "vllm:num_requests_running") for series in looks) > 1
    until(lambda: set(gauges_at_rest(app.metrics()).values()) == {0}, 5)


# Routing


def test_a_prompt_goes_where_its_beginning_is_cached(app):
    cold = app.complete(LONG_PROMPT)
    until(lambda: both_know_everything(app), 5, "an ingress did not hear of the cached blocks")
    for question in ("What next?", "And then?", "And in the end?"):
        warm = app.complete(LONG_PROMPT + question)
        assert warm.headers["x-trieserve-replica"] == cold.headers["x-trieserve-replica"]
        assert warm.headers["x-trieserve-reason"] == "longest_match"
        matched = int(warm.headers["x-trieserve-matched-tokens"])
        assert matched == warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 250


def both_know_everything(app) -> bool:
    series = app.metrics()
    tries = {value for (name, _), value in series.items() if name == "trieserve:trie_blocks"}
    kept = total(series, "trieserve:kv_blocks", state="cached") + total(series, "trieserve:kv_blocks", state="used")
    return tries == {kept}


def test_an_answer_tells_why_it_was_routed_so(app):
    headers = app.complete("why here?").headers
    candidates = dict(pair.split("=") for pair in headers["x-trieserve-candidates"].split(","))
    assert len(candidates) == 2
    assert headers["x-trieserve-replica"] in candidates
    assert float(headers["x-trieserve-predicted-ttft-ms"]) >= 0


# Keys


@pytest.mark.parametrize("authorization", [None, "Bearer wrong", "Basic key"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/version"),
    ],
)
def test_without_a_key_every_route_but_the_public_ones_is_closed(app, method, path, authorization):
    headers = {"Authorization": authorization} if authorization else {}
    assert httpx.request(method, app.url + path, headers=headers).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_the_public_routes_need_no_key(app, path):
    assert httpx.get(app.url + path).status_code == 200


def test_the_holders_of_two_keys_share_no_cache(app):
    prompt = "What alice asks is nobody's business. " * 20

    def cached(key: str | None = None) -> int:
        with app.openai(key) as client:
            return client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage.prompt_tokens_details.cached_tokens

    assert cached() == 0
    assert until(cached, 5) > 100
    assert cached(BOB) == 0
    assert until(lambda: cached(BOB), 5) > 100


# Processes


def test_haproxy_listens_to_others_on_the_public_port_alone(app):
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for haproxy in app.server.named("haproxy")
        for connection in haproxy.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {port for ip, port in listening if not ip.startswith("127.")} == {app.port}
