"""On a Ray cluster that is there already: `ray job submit`, a second job with another configuration, and `serve deploy`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from app_client import App
from processes import BIN, ROOT, Server, free_port, server

PLACEMENT_OF = Path(__file__).with_name("placement_of.py")
_JOB_TIMEOUT_S = 150
_WORKER_PORTS = 200  # enough for the workers of a test


@dataclass(frozen=True, slots=True)
class RayCluster:
    server: Server
    address: str
    dashboard: str

    def run(self, *command: str) -> str:
        """What the command said, or that as a failure if it fails."""
        done = subprocess.run(
            command, cwd=ROOT, env=self.server.environment, capture_output=True, text=True, timeout=_JOB_TIMEOUT_S
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def submit_up(self, *overrides: str) -> None:
        """Returns when the job has ended, which leaves the app there."""
        job = ["--address", self.dashboard, "--working-dir", str(ROOT)]
        up = ["python", "-m", "cluster", "up", "configs/fake.yaml", *overrides]
        self.run(str(BIN / "ray"), "job", "submit", *job, "--", *up)


@pytest.fixture(scope="module")
def cluster(environment, tmp_path_factory) -> Iterator[RayCluster]:
    dashboard, first_worker_port = free_port(), 21_000 + free_port() % 10_000
    ports = {
        "port": free_port(),
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": free_port(),
        "min-worker-port": first_worker_port,
        "max-worker-port": first_worker_port + _WORKER_PORTS,
    }
    # Sockets below it must have short names.
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as folder:
        size = {"num-cpus": 6, "num-gpus": 4, "object-store-memory": 300_000_000, "temp-dir": folder}
        options = [f"--{name}={value}" for name, value in {**ports, **size}.items()]
        command = [str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", *options]
        log = tmp_path_factory.mktemp("ray") / "log"
        # Nobody is left to be drained for.
        environment = {**environment, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
        with server(command, environment, log, stop=signal.SIGTERM) as head:
            url = f"http://127.0.0.1:{dashboard}"
            headers = {"Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}"}
            head.wait_until(lambda: _answers(f"{url}/api/jobs/", headers))
            yield RayCluster(head, f"127.0.0.1:{ports['port']}", url)


def _answers(url: str, headers: dict[str, str]) -> bool:
    try:
        return httpx.get(url, headers=headers, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


@dataclass
class Visitor:
    """Asks all the time, one request after the other."""

    app: App
    failures: list[str] = field(default_factory=list)
    num_answers: int = 0

    @contextmanager
    def visiting(self) -> Iterator[None]:
        leave = threading.Event()
        thread = threading.Thread(target=self._ask_until, args=(leave,))
        thread.start()
        try:
            yield
        finally:
            leave.set()
            thread.join()

    def _ask_until(self, leave: threading.Event) -> None:
        while not leave.wait(0.02):
            try:
                reply = self.app.complete("are you still there?", model="smollm2-135m-instruct")
                if reply.status_code != 200:
                    self.failures.append(reply.text)
                self.num_answers += 1
            except httpx.TransportError as error:
                self.failures.append(repr(error))


def test_a_port_that_is_taken_is_an_error_that_the_next_try_does_not_inherit(cluster):
    environment = {**cluster.server.environment, "RAY_ADDRESS": cluster.address}
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "cluster", "up", "configs/fake.yaml", f"ingress.port={port}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_JOB_TIMEOUT_S)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert str(port) in line
    # The next test uses another port.


def test_jobs_and_serve_deploy_change_an_app_that_never_stops_answering(cluster, tmp_path):
    app = App(free_port())
    cluster.submit_up(f"ingress.port={app.port}", "replicas.num=1")
    assert app.num_ready() == 1

    visitor = Visitor(app)
    with visitor.visiting():
        cluster.submit_up(f"ingress.port={app.port}", "replicas.num=2", "engine.fake_base_s=0.012")
        assert app.num_ready() == 2
        assert len(candidates(app)) == 2

        file = str(tmp_path / "serve.yaml")
        build = ["python", "-m", "cluster", "build", "configs/fake.yaml", f"ingress.port={app.port}", "replicas.num=1"]
        cluster.run(*build, "-o", file)
        cluster.run(str(BIN / "serve"), "deploy", "--address", cluster.dashboard, file)
        cluster.server.wait_until(lambda: app.num_ready() == 1)
    assert visitor.failures == []
    assert visitor.num_answers > 50


def test_a_replica_on_several_gpus_gets_one_for_each_worker_and_none_itself(cluster):
    found = json.loads(cluster.run(sys.executable, str(PLACEMENT_OF), cluster.address).splitlines()[-1])
    assert found["bundles"] == [{"CPU": 0.5, "GPU": 1}, {"GPU": 1}, {"GPU": 1}, {"GPU": 1}]
    assert found["own_gpus"] == []
    assert sorted(gpu for [gpu] in found["worker_gpus"]) == [0, 1, 2, 3]


def candidates(app: App) -> list[str]:
    reply = app.complete("who is there?", model="smollm2-135m-instruct")
    return reply.headers["x-trieserve-candidates"].split(",")
