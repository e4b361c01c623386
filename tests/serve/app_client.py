"""How the tests talk to a running app: OpenAI's own client, plain HTTP, bytes on a socket, and its metrics as numbers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

MODEL = "fake"
TIMEOUT_S = 60.0
# At 8 ms a token it takes longer than any test waits.
ENDLESS = {"max_tokens": 4000, "ignore_eos": True}

Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True, slots=True)
class App:
    """Where an app answers, and the API key to use (any will do where there are none)."""

    port: int
    key: str = "none"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def openai(self, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=0, timeout=TIMEOUT_S)

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=TIMEOUT_S)

    def complete(self, prompt: str, **fields: Any) -> httpx.Response:
        """POST /v1/completions on a connection of its own."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=self.headers, timeout=TIMEOUT_S)

    def metrics(self) -> Series:
        text = httpx.get(f"{self.url}/metrics", timeout=TIMEOUT_S).text
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float:
        """Sum over the series that carry `labels`; fails where there is none."""
        return total(self.metrics(), name, **labels)

    def num_running(self) -> float:
        return self.total("vllm:num_requests_running")

    def num_ready(self) -> int:
        count: int = httpx.get(f"{self.url}/ready", timeout=TIMEOUT_S).json()["replicas_ready"]
        return count

    @contextmanager
    def request_in_two_packets(self, body: bytes) -> Iterator[socket.socket]:
        """POST /v1/completions whose body leaves later than its headers; leaving closes the connection at once."""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(head.encode())
            time.sleep(0.05)
            connection.sendall(body)
            yield connection


def endless_body(*, stream: bool, num_bytes: int) -> bytes:
    """A request that goes on until somebody ends it, padded with blanks behind the JSON text."""
    body = json.dumps({"model": MODEL, "prompt": "on and on", "stream": stream, **ENDLESS}).encode()
    return body.ljust(num_bytes)


def total(series: Series, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    values = [value for (found, of), value in series.items() if found == name and wanted <= of]
    assert values, f"no series {name} with {labels}"
    return sum(values)


def gauges_at_rest(series: Series) -> dict[str, float]:
    """What must be 0 when nobody waits for an answer. An ingress that never was asked has no `requests_in_flight` yet."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "trieserve:pending_tokens")
    return {
        **{name: total(series, name) for name in names},
        "used": total(series, "trieserve:kv_blocks", state="used"),
        "in flight": sum(value for (name, _), value in series.items() if name == "trieserve:requests_in_flight"),
    }


def sse_events(lines: Iterator[str]) -> Iterator[str]:
    """The data of each server-sent event, comments left out."""
    for line in lines:
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
