"""The ingress deployment: HTTP in, the router and the token client inside, and this process's part of the metrics.

Which routes there are and what they answer is cluster.http_app's; this file only ties it to Ray Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from cluster.auth import Authenticator, hash_api_key, probe_key
from cluster.http_app import Api, make_app
from cluster.metrics import IngressMetrics
from cluster.prepare import Preparer
from cluster.serve_backend import ServeBackend
from cluster.stream_client import StreamClient
from configs.load import from_mapping
from configs.schema import ApiKey
from replicas.contract import EngineInfo
from replicas.tokenizer import load_tokenizer
from router import runtime
from router.trie import BYTES_PER_ENTRY

_LAG_PERIOD_S = 0.25


@serve.ingress()
class Ingress:
    """One ingress process. `engine` is the handle of the engine deployment, on which our router runs."""

    async def __init__(self, settings: Mapping[str, Any], secret: bytes, engine: DeploymentHandle) -> None:  # type: ignore[misc]
        config = from_mapping(settings)
        runtime.configure(runtime.RouterContext(config.router, secret))
        self._label = secrets.token_hex(4)
        self._metrics = IngressMetrics(self._label, model_names=(config.model.served_name,))
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
        facts = await engine.describe.remote()  # waits until a replica is there
        client = StreamClient(secret)
        self._backend = ServeBackend(
            engine, _own_handle, client, EngineInfo(**facts["info"]), data_path=config.ingress.data_path
        )
        probe = ApiKey(name="probe", sha256=hash_api_key(probe_key(secret)))
        keys = (*config.ingress.api_keys, probe) if config.ingress.api_keys else ()
        preparer = Preparer(config, secret, self._backend, tokenizer, self._metrics)
        self._api = Api(config, self._backend, preparer, self._metrics, Authenticator(keys))
        self._lag_task = asyncio.ensure_future(self._watch_loop())

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        return make_app(self._api)

    async def metrics_text(self) -> tuple[str, bytes]:
        for core in runtime.routers():
            self._metrics.on_trie_size(num_blocks=core.trie.num_entries, num_bytes=core.trie.num_entries * BYTES_PER_ENTRY)
        return f"ingress-{self._label}", self._metrics.render()

    async def __del__(self) -> None:
        if hasattr(self, "_lag_task"):
            self._lag_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._lag_task
            await self._backend.close()

    async def _watch_loop(self) -> None:
        """What blocks this loop delays every stream; how late a timer fires shows it."""
        while True:
            due = time.monotonic() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self._metrics.on_loop_lag(max(0.0, time.monotonic() - due))


def _own_handle() -> DeploymentHandle:
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)
