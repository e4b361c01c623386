"""The Ray Serve deployment around one Engine: starts it, serves its tokens and KV events on a socket, reports its health.

The engine steps on its own thread; each step's output crosses to the event loop in one call. Tokens then go over the
replica's own TCP socket (replicas.stream_server) to the ingresses, or, on the classic path, through Serve's streaming calls.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import ray

from configs.load import from_part
from replicas.build import build_engine
from replicas.contract import Delta, GenerationRequest, StepOutput
from replicas.health import complaint, leave_with_engine
from replicas.measured_engine import MeasuredEngine
from replicas.metrics import ReplicaMetrics
from replicas.metrics_http import serve_metrics
from replicas.stream_hub import StreamHub
from replicas.stream_server import StreamServer


class EngineReplica:
    """One engine. `settings` are the sections of the app's configuration that concern an engine (cluster.app.replica_settings);
    `secret` is shared with the ingresses."""

    async def __init__(self, settings: Mapping[str, Any], secret: bytes) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = from_part(settings)
        self._loop = asyncio.get_running_loop()
        self._boot_id = secrets.token_hex(8)
        replicas_on_node = self._config.replicas.num
        self._engine = await asyncio.to_thread(build_engine, self._config, replicas_on_node=replicas_on_node)
        info = self._engine.info
        self._metrics = ReplicaMetrics(
            info.model_name,
            self._boot_id,
            time.monotonic,
            heartbeat_age_s=self._engine.heartbeat_age_s,
            block_size=info.block_size,
        )
        self._metrics.observe(StepOutput((), None, self._engine.stats()), time.monotonic())
        self._hub = StreamHub(MeasuredEngine(self._engine, self._metrics, time.monotonic), time.monotonic)
        self._server = StreamServer(self._hub, secret, self._boot_id, on_orphaned_slot=self._release_slot)
        self._engine.start(self._on_step)
        host = self._config.replicas.host
        self._endpoint = await self._server.start(host)
        self._metrics_port, self._close_metrics = serve_metrics(self._metrics.registry, host)
        # Serve replaces a replica after three failed health checks, but one whose process is gone at its next look (ray 2.60).
        # `ray.actor.exit_actor` would first wait for the calls that run and for what others left to do at exit.
        self._watch = asyncio.create_task(leave_with_engine(self._engine, self._server, partial(os._exit, 1)))

    # ---- the engine's thread hands over ----

    def _on_step(self, output: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self._publish, output)

    def _publish(self, output: StepOutput) -> None:
        self._hub.publish(output)
        self._metrics.observe(output, time.monotonic())

    # ---- what Serve asks ----

    def record_replica_metadata(self) -> dict[str, Any]:
        """Fixed facts that reach every router and ingress with the membership."""
        host = self._endpoint.host
        if host == "0.0.0.0":
            host = ray.util.get_node_ip_address()
        return {
            "endpoint": [host, self._endpoint.port],
            "boot_id": self._boot_id,
            "metrics_port": self._metrics_port,
            "pid": os.getpid(),
            "info": asdict(self._engine.info),
        }

    def check_health(self) -> None:
        reason = complaint(self._engine, self._config.replicas.stalled_after_s)
        if reason is not None:
            raise RuntimeError(reason)

    async def __del__(self) -> None:
        """Serve calls this when every reserved slot is free again, or when `drain_timeout_s` is over."""
        if hasattr(self, "_server"):
            self._watch.cancel()
            await self._server.drain()
            await self._server.close()
            await asyncio.to_thread(self._close_metrics)
            await asyncio.to_thread(self._engine.shutdown)

    # ---- what ingresses call ----

    async def describe(self) -> dict[str, Any]:
        """Raises while the engine can't serve: who counts replicas counts those that answer."""
        self.check_health()
        return self.record_replica_metadata()

    async def metrics_text(self) -> tuple[str, bytes]:
        return self._boot_id, self._metrics.render()

    async def generate(self, _ticket: Any, request: GenerationRequest) -> AsyncIterator[Delta]:
        """The classic path: deltas as a Serve stream. `_ticket` is there for the router."""
        async for delta in self._hub.stream(request):
            yield delta

    async def clear_cache(self) -> None:
        self._engine.clear_cache()

    # ---- Serve's slots ----

    def _release_slot(self, slot: str) -> None:
        """An ingress died while it held a slot that it had reserved here. Serve gives slots no expiry, so the replica
        returns it through its own actor; releasing a slot twice is harmless (ray 2.60, `ReplicaActor.release_slot`)."""
        ray.get_runtime_context().current_actor.release_slot.remote(slot)
