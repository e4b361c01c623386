"""Running apps. Each takes its time to start, so tests share them: `app` with everything on it lives as long as the tests.

A test that kills a part of `app` waits until Serve has put another in its place.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from app_client import MODEL, App
from processes import BIN, Server, free_port, server, until

ALICE, BOB = "the-key-of-alice", "the-key-of-bob"
_READY = "ready: "


def fake_config(port: int, **ingress: Any) -> dict[str, Any]:
    """Two replicas without a model: 8 ms a step, 728 blocks each."""
    return {
        "model": {"served_name": MODEL},
        "engine": {"kind": "fake", "fake_base_s": 0.008, "kv_cache_bytes": 2**28},
        "replicas": {"num": 2, "num_cpus": 0.1, "health_check_period_s": 0.5},
        "ingress": {"port": port, "expose_routing": True, **ingress},
    }


@dataclass(frozen=True, slots=True)
class RunningApp(App):
    """An app together with its processes."""

    server: Server | None = None


@pytest.fixture(scope="session")
def environment() -> Mapping[str, str]:
    """Of all servers: nothing of whoever runs the tests configures them, and their Ray clusters have a token of their own."""
    foreign = ("TRIESERVE_", "RAY_")
    mine = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return mine | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def up(environment, tmp_path_factory) -> Callable[..., AbstractContextManager[RunningApp]]:
    """`python -m cluster up` with a configuration, until its "ready:"."""

    @contextmanager
    def up(config: Mapping[str, Any], *, key: str = "none", stop: signal.Signals = signal.SIGINT) -> Iterator[RunningApp]:
        folder: Path = tmp_path_factory.mktemp("up")
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(config)))
        command = [sys.executable, "-m", "cluster", "up", "--config", str(folder / "config.yaml")]
        with server(command, environment, folder / "log", stop=stop) as started:
            started.wait_until(lambda: _READY in started.output())
            yield RunningApp(config["ingress"]["port"], key, started)

    return up


@pytest.fixture(scope="session")
def whole_app(up) -> Iterator[RunningApp]:
    """HAProxy, two ingresses, two fake replicas on the token socket; open to other machines, so with keys."""
    keys = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in (("alice", ALICE), ("bob", BOB))
    ]
    with up(fake_config(free_port(), num=2, host="0.0.0.0", api_keys=keys), key=ALICE) as running:
        yield running


@pytest.fixture
def app(whole_app) -> RunningApp:
    """`whole_app` with both replicas and both ingresses there, whatever the test before did to it."""
    until(lambda: _num_ingresses(whole_app) == 2 and whole_app.num_ready() == 2, 60, "the app did not recover")
    return whole_app


def _num_ingresses(app: App) -> int:
    try:
        series = app.metrics()
    except httpx.TransportError:
        return 0
    return sum(name == "trieserve:event_loop_lag_seconds_count" for name, _ in series)
