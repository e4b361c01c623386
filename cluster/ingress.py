"""The ingress deployment: HTTP in, the routers and the token client inside, and this process's part of the metrics.

Which routes there are and what they answer is cluster.http_app's; this file only ties it to Ray Serve.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster.auth import Authenticator, hash_api_key, probe_key
from cluster.catalog import Catalog, Fleet, Metrics
from cluster.http_app import Api, make_app
from cluster.metrics import IngressMetrics
from cluster.prepare import Preparer
from cluster.serve_backend import ServeBackend, metrics_of
from cluster.stream_client import StreamClient
from configs.load import from_mapping
from configs.schema import ApiKey, AppConfig, FleetConfig
from replicas.model_source import adapter_revision
from replicas.tokenizer import Tokenizer, load_tokenizer
from router import runtime
from router.trie import BYTES_PER_ENTRY

_LAG_PERIOD_S = 0.25
_INTRODUCTION_TIMEOUT_S = 15.0


@serve.ingress()
class Ingress:
    """One ingress process. `engines` are the handles of the fleets' deployments, on each of which a router of ours runs."""

    async def __init__(self, settings: Mapping[str, Any], secret: bytes, *engines: DeploymentHandle) -> None:  # type: ignore[misc]
        config = from_mapping(settings)
        runtime.configure(runtime.RouterContext(config.router, secret))
        self._label = secrets.token_hex(4)
        self._client = StreamClient(secret)
        tokenizers = await asyncio.to_thread(_tokenizers, config)
        backends = [
            ServeBackend(fleet.model.served_name, engine, self._client, data_path=config.ingress.data_path)
            for fleet, engine in zip(config.fleets, engines, strict=True)
        ]
        catalog = Catalog(
            [
                Fleet(fleet, backend, tokenizers[_tokenizer_key(fleet)])
                for fleet, backend in zip(config.fleets, backends, strict=True)
            ],
            adapter_revision=adapter_revision,
            own_metrics=_own_metrics,
        )
        self._metrics = IngressMetrics(self._label, model_names=catalog.names)
        probe = ApiKey(name="probe", sha256=hash_api_key(probe_key(secret)))
        keys = (*config.ingress.api_keys, probe) if config.ingress.api_keys else ()
        preparer = Preparer(config, secret, catalog, self._metrics)
        self._api = Api(config, catalog, preparer, self._metrics, Authenticator(keys))
        work = [self._watch_loop(), *(backend.follow() for backend in backends)]
        self._tasks = [asyncio.ensure_future(each) for each in work]
        # An ingress that takes another's place must not answer 503 for models that are there. It doesn't wait for ever: one
        # model that doesn't start is no reason to keep the others from being served.
        introductions = [asyncio.ensure_future(backend.introduced()) for backend in backends]
        await asyncio.wait(introductions, timeout=_INTRODUCTION_TIMEOUT_S)
        for introduction in introductions:
            introduction.cancel()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_app(self._api)

    async def metrics_text(self) -> tuple[str, bytes]:
        num_blocks = sum(core.trie.num_entries for core in runtime.routers())
        self._metrics.on_trie_size(num_blocks=num_blocks, num_bytes=num_blocks * BYTES_PER_ENTRY)
        return f"ingress-{self._label}", self._metrics.render()

    async def __del__(self) -> None:
        if hasattr(self, "_tasks"):
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._client.close()

    async def _watch_loop(self) -> None:
        """What blocks this loop delays every stream; how late a timer fires shows it."""
        while True:
            due = time.monotonic() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self._metrics.on_loop_lag(max(0.0, time.monotonic() - due))


def _tokenizers(config: AppConfig) -> dict[tuple[str, str], Tokenizer]:
    """Fleets of the same files share one."""
    fleets = {_tokenizer_key(fleet): fleet for fleet in config.fleets}
    return {key: load_tokenizer(fleet.model) for key, fleet in fleets.items()}


def _tokenizer_key(fleet: FleetConfig) -> tuple[str, str]:
    return fleet.model.source, fleet.model.chat_template


async def _own_metrics() -> Metrics:
    """Of all ingresses, so that each of them answers alike."""
    context = serve.get_replica_context()
    return await metrics_of(serve.get_deployment_handle(context.deployment, context.app_name), "ingress")
