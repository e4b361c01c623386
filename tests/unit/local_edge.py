"""The whole HTTP side of an ingress over a fleet in this process; what it must never leak is checked when a test is done."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from pathlib import Path
from typing import Any

import httpx
import tiny_tokenizer
from asgi_call import AsgiCall
from local_fleet import LocalFleet
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine

from cluster.auth import Authenticator, hash_api_key
from cluster.catalog import Catalog, Fleet
from cluster.http_app import Api, make_app
from cluster.metrics import IngressMetrics
from cluster.prepare import Preparer
from configs.schema import ApiKey, AppConfig, IngressConfig, ModelConfig
from replicas.blocks import BLOCK_SIZE
from replicas.contract import EngineInfo, StepTimeCoefficients
from replicas.fake_engine import FakeEngine, FakeRunner
from replicas.step_time import StepTimeModel
from replicas.tokenizer import Tokenizer

MODEL = "m"
SECRET = b"the deployment's secret"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}
API_KEYS = tuple(ApiKey(name, hash_api_key(key)) for name, key in KEYS.items())


@functools.cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return tiny_tokenizer.make(Path(directory))


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def fake_engine(num_answer_tokens: int | None = None) -> FakeEngine:
    """Steps that take no time."""
    law = StepTimeCoefficients(base_s=0.0, per_token_s=0.0, per_context_s=0.0, per_sequence_s=0.0)
    runner = FakeRunner(law, tokenizer().vocab_size, eos_token_id=2, num_answer_tokens=num_answer_tokens)
    info = EngineInfo("fake", "1", tokenizer().vocab_size, 400, BLOCK_SIZE, 100, (2,), 64, 8)
    return FakeEngine(runner, info, StepTimeModel())


def pass_time(seconds: float) -> None:
    """Move the running loop's clock on: timers that are due by then fire next, and nobody has to wait for them."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


def bearer(name: str | None) -> dict[str, str]:
    return {} if name is None else {"authorization": f"Bearer {KEYS[name]}"}


class Edge:
    """`app` is what `make_app` makes, over `fleet`. Keyword arguments are fields of IngressConfig."""

    def __init__(self, *engines: ScriptedEngine | FakeEngine, **ingress: Any) -> None:
        config = AppConfig(model=ModelConfig(served_name=MODEL), ingress=IngressConfig(**ingress))
        self.fleet = LocalFleet(*engines)
        loop = asyncio.get_running_loop()
        self.metrics = IngressMetrics("i0", model_names=(MODEL,), clock=lambda: loop.time())
        catalog = Catalog([Fleet(config.fleets[0], self.fleet, tokenizer())])
        self.preparer = Preparer(config, SECRET, catalog, self.metrics)
        self.app = make_app(Api(config, catalog, self.preparer, self.metrics, Authenticator(config.ingress.api_keys)))
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://edge")

    async def __aenter__(self) -> Edge:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        await self._client.aclose()
        if exc_type is None:
            self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """Every request has ended, and what it held is free again."""
        self.check_requests_add_up()
        assert self.count("requests_in_flight") == 0
        assert self.fleet.num_held == 0
        assert all(not each.streams and each.hub.num_streams == 0 for each in self.fleet.replicas.values())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def check_requests_add_up(self) -> None:
        assert self.count("requests_received_total") == self.count("requests_total") + self.count("requests_in_flight")

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self._client.get(path, headers=headers)

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """`body` becomes JSON unless it is bytes."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await self._client.post(path, headers=headers, **content)

    async def send(self, method: str, path: str) -> httpx.Response:
        return await self._client.request(method, path)

    async def chat(self, *, who: str | None = None, **fields: Any) -> httpx.Response:
        return await self.post(CHAT, {"model": MODEL, "messages": HELLO, **fields}, **bearer(who))

    async def complete(self, *, who: str | None = None, **fields: Any) -> httpx.Response:
        return await self.post(COMPLETIONS, {"model": MODEL, "prompt": "hello", **fields}, **bearer(who))

    def chat_call(self, *, who: str | None = None, **fields: Any) -> AsgiCall:
        return AsgiCall(self.app, "POST", CHAT, {"model": MODEL, "messages": HELLO, **fields}, headers=bearer(who))

    def complete_call(self, *, who: str | None = None, **fields: Any) -> AsgiCall:
        return AsgiCall(self.app, "POST", COMPLETIONS, {"model": MODEL, "prompt": "hello", **fields}, headers=bearer(who))

    def count(self, name: str, **labels: str) -> float:
        """The sum over the series of `trieserve:name` that have these labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.metrics.render().decode())
            for sample in family.samples
            if sample.name == f"trieserve:{name}" and labels.items() <= sample.labels.items()
        )
