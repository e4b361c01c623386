"""`python -m cluster up`: start (or join) a Ray cluster, deploy the app, prove it with a real request, say "ready".

Where RAY_ADDRESS is set (always inside `ray job submit`) the app is deployed on that cluster and stays when this process ends.
Otherwise a cluster of this process's own is started, and everything ends with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from rich.console import Console

from cluster import haproxy
from cluster.app import build_app, cluster_secret
from cluster.auth import probe_key
from cluster.build_config import PROXY_LOCATION, http_options
from configs.load import to_mapping
from configs.schema import AppConfig
from replicas.errors import ConfigError

console = Console(stderr=True)

# One of our errors at the end of a traceback, with the lines of its message.
_REASON = re.compile(r"^replicas\.errors\.\w+: ((?:.+\n?)(?:  .+\n?)*)", re.MULTILINE)

_OBJECT_STORE_BYTES = 256 * 2**20
_PROBE_TIMEOUT_S = 120.0
_LISTEN_TIMEOUT_S = 20.0  # once the app is deployed its proxies are up


def up(config: AppConfig) -> None:
    started = time.monotonic()
    owned = "RAY_ADDRESS" not in os.environ
    if owned:
        _check_port(config)
        # A short name: the path of HAProxy's socket in it may have 97 characters, 70 of which are Serve's.
        with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as scratch:
            _local_environment(config, Path(scratch))
            interrupt = _Interrupt()
            try:
                with interrupt.held(), console.status("starting a local Ray cluster"):
                    _start_ray(config)
                deploy(config)
                _announce(config, time.monotonic() - started)
                interrupt.wait()
            finally:
                console.print("stopping")
                ray.shutdown(wait_for_processes=True)
    else:
        with console.status("joining the Ray cluster"):
            ray.init(address="auto", ignore_reinit_error=True, log_to_driver=False)
        deploy(config)
        _announce(config, time.monotonic() - started)


def deploy(config: AppConfig) -> None:
    """Deploy on the connected cluster and return once a real request was answered."""
    _start_serve(config)
    num_replicas = sum(fleet.replicas.num for fleet in config.fleets)
    with console.status(f"starting {config.ingress.num} ingress(es) and {num_replicas} replica(s)"):
        try:
            serve.run(build_app(to_mapping(config)), name=config.name, route_prefix="/", blocking=False)
        except RuntimeError as error:
            raise _start_failure(config, error) from error
    with console.status("waiting for a real answer"):
        for fleet in config.fleets:
            _probe(config, fleet.model.served_name)


def _start_failure(config: AppConfig, error: RuntimeError) -> ConfigError:
    """Serve says which deployments failed, and keeps why in their status, as a traceback."""
    app = serve.status().applications.get(config.name)
    messages = [] if app is None else [app.message, *(deployment.message for deployment in app.deployments.values())]
    reasons = [found[-1] for message in messages if (found := _REASON.findall(message or ""))]
    return ConfigError(reasons[-1].strip() if reasons else f"the app does not start: {error}")


def _start_serve(config: AppConfig) -> None:
    """Raises ConfigError where its proxies can't listen, and leaves no Serve then; one that runs already stays as it is."""
    try:
        serve.start(
            proxy_location=PROXY_LOCATION,
            http_options=http_options(config),
        )
    except RayError as error:
        # It would keep this port, and try to listen on it, for as long as the Ray cluster lives.
        serve.shutdown()
        cause = str(getattr(error, "cause", error)).splitlines()[-1]
        raise ConfigError(f"Ray Serve does not start on {base_url(config)}: {cause}") from error


def _start_ray(config: AppConfig) -> None:
    """Logical CPUs are what the app asks for, so that two replicas start on a laptop with two cores as well."""
    asked = config.ingress.num * config.ingress.num_cpus
    asked += sum(fleet.replicas.num * fleet.replicas.num_cpus for fleet in config.fleets)
    ray.init(
        address="local",
        num_cpus=max(math.ceil(asked) + 1, os.cpu_count() or 1),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
    )


def _local_environment(config: AppConfig, scratch: Path) -> None:
    """Ray reads these when it starts processes. HAProxy's files go to `scratch`, which only this user can read."""
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if config.ingress.haproxy else "0",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(haproxy.write_wrapper(scratch)),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        # Longer than the longest stream: a reload of HAProxy must not cut one (ray #66056).
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(int(config.ingress.limits.request_timeout_s) + 60),
        "RAY_SERVE_HAPROXY_TCP_NODELAY": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _check_port(config: AppConfig) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.ingress.host, config.ingress.port))
        except OSError as error:
            raise ConfigError(
                f"ingress.port={config.ingress.port} on {config.ingress.host} can't be used ({error.strerror}); "
                "choose another, e.g. `ingress.port=8001`"
            ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def base_url(config: AppConfig) -> str:
    host = "127.0.0.1" if config.ingress.host in ("0.0.0.0", "") else config.ingress.host
    return f"http://{host}:{config.ingress.port}"


def _probe(config: AppConfig, model: str) -> None:
    """A chat of a few tokens through the public port. Serve reports RUNNING even when its proxy can't import the app and every
    request hangs, so nothing less proves that it serves."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 4,
        "temperature": 0,
    }
    headers = {"Authorization": f"Bearer {probe_key(cluster_secret(config))}"}
    started, last = time.monotonic(), "no answer"
    while time.monotonic() < started + _PROBE_TIMEOUT_S:
        try:
            reply = httpx.post(f"{base_url(config)}/v1/chat/completions", json=body, headers=headers, timeout=60)
            if reply.status_code == 200:
                return
            last = f"HTTP {reply.status_code}: {reply.text[:300]}"
            if reply.status_code < 500 and reply.status_code not in (404, 408, 429):
                break
        except httpx.ConnectError as error:
            last = f"{error}; a Serve that runs already keeps the host and port that it was started with"
            if time.monotonic() > started + _LISTEN_TIMEOUT_S:
                break
        except httpx.TransportError as error:
            last = f"{type(error).__name__}: {error}"
        time.sleep(0.2)
    raise ConfigError(f"the app is deployed but does not answer for {model} on {base_url(config)}: {last}")


def _announce(config: AppConfig, seconds: float) -> None:
    body = {
        "model": config.model.served_name,
        "messages": [{"role": "user", "content": "What is a prefix tree?"}],
        "max_tokens": 64,
    }
    key = ' -H "Authorization: Bearer $TRIESERVE_API_KEY"' if config.ingress.api_keys else ""
    models = ", ".join(f"{each.replicas.num} x {each.model.served_name} ({each.engine.kind})" for each in config.fleets)
    console.print(f"{models}; router {config.router.policy}, after {seconds:.0f} s")
    print(f"ready: {base_url(config)}", flush=True)
    print(
        f"curl {base_url(config)}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'",
        flush=True,
    )


class _Interrupt:
    """Ctrl-C or SIGTERM as one KeyboardInterrupt; further ones don't interrupt what the first began."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._held = False
        self._listen()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Put it off to the end of the block: a Ray that is interrupted while it starts leaves processes behind."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self._listen()  # `ray.init` has set a handler of its own
        if self._asked.is_set():
            raise KeyboardInterrupt

    def wait(self) -> None:
        """Until it comes; from now on it is what everybody waits for, and no exception."""
        self._held = True
        self._asked.wait()

    def _listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        is_first = not self._asked.is_set()
        self._asked.set()
        if is_first and not self._held:
            raise KeyboardInterrupt
