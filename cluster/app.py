"""The Ray Serve application: the ingress deployment in front of one deployment of engines for each model.

`build_app` is what `serve deploy`, `serve run` and KubeRay's serveConfigV2 import: `import_path: cluster.app:build_app`,
`args:` a configuration mapping.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.experimental import internal_kv
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster.ingress import Ingress
from cluster.placement import deployment_names, reservation
from configs.load import from_mapping, resolve_secret, to_mapping
from configs.schema import AppConfig, FleetConfig
from replicas.deployment import EngineReplica
from router.serve_router import PrefixRequestRouter

INGRESS = "ingress"

# Serve's own limit must never queue a request at the handle, where affinity is lost: admission is ours.
_UNLIMITED = 100_000
_SECRET_KEY = b"trieserve:secret"


def build_app(args: Mapping[str, Any]) -> Application:
    """Bind both deployments. Runs on the cluster (a driver, a job, or Serve's build task), never in a proxy."""
    config = from_mapping(args)
    secret = cluster_secret(config)
    names = deployment_names(config.fleets)
    engines = [_engine(fleet, name, secret) for fleet, name in zip(config.fleets, names, strict=True)]
    ingress = serve.deployment(Ingress).options(
        name=INGRESS,
        num_replicas=config.ingress.num,
        max_ongoing_requests=_UNLIMITED,
        graceful_shutdown_timeout_s=config.ingress.limits.request_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": config.ingress.num_cpus},
    )
    return ingress.bind(to_mapping(config), secret, *engines)


def _engine(fleet: FleetConfig, name: str, secret: bytes) -> Application:
    deployment = serve.deployment(EngineReplica).options(
        name=name,
        num_replicas=fleet.replicas.num,
        max_ongoing_requests=_UNLIMITED,
        graceful_shutdown_timeout_s=fleet.replicas.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=fleet.replicas.health_check_period_s,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRequestRouter),
        **reservation(fleet),
    )
    return deployment.bind(replica_settings(fleet), secret)


def replica_settings(fleet: FleetConfig) -> dict[str, Any]:
    """The part of the configuration that an engine depends on, and no more: Serve restarts replicas when it changes, and a
    different number of replicas or another API key is no reason to lose their caches."""
    mapping = to_mapping(AppConfig(model=fleet.model, engine=fleet.engine, replicas=fleet.replicas))
    settings: dict[str, Any] = {section: mapping[section] for section in ("model", "engine", "replicas")}
    if fleet.engine.kv_cache_bytes > 0:
        settings["replicas"] = {**settings["replicas"], "num": 1}
    return settings


def cluster_secret(config: AppConfig) -> bytes:
    """The configured secret, or a random one that all deployments of this Ray cluster share.

    It must outlive one `up`: while a second one redeploys in place, old and new processes still talk to each other.
    """
    if config.ingress.secret:
        return resolve_secret(config)
    fresh = secrets.token_bytes(32)
    internal_kv._internal_kv_put(_SECRET_KEY, fresh, overwrite=False)
    kept: bytes = internal_kv._internal_kv_get(_SECRET_KEY)
    return kept
