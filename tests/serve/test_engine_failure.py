"""An engine that can never serve again while its process lives: its replica leaves by itself, and clients hardly notice."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import yaml
from conftest import RunningApp, fake_config
from processes import free_port, is_alive, server, until
from streams import MAX_STREAMS, start_streams

ENGINE = "ray::ServeReplica:trieserve:engine"
BREAKABLE = Path(__file__).with_name("breakable")


@pytest.fixture
def app(environment, tmp_path):
    """Two fake replicas whose engines break at SIGUSR2."""
    port = free_port()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(fake_config(port)))
    command = [sys.executable, "-m", "cluster", "up", "--config", str(tmp_path / "config.yaml")]
    breakable = {**environment, "PYTHONPATH": str(BREAKABLE)}
    with server(command, breakable, tmp_path / "log", stop=signal.SIGINT) as started:
        started.wait_until(lambda: "ready: " in started.output())
        yield RunningApp(port, "none", started)


def test_a_replica_whose_engine_failed_is_unready_at_once_and_replaced(app):
    with ThreadPoolExecutor(MAX_STREAMS + 1) as pool:
        streams, done = start_streams(app, pool, max_tokens=600, ignore_eos=True)
        victim, survivor = app.server.named(ENGINE)
        victim.send_signal(signal.SIGUSR2)
        unready = pool.submit(until, lambda: app.num_ready() == 1, 2, "a replica without an engine is counted as ready")
        replies = [app.complete(f"{os.urandom(4).hex()} comes after") for _ in range(50)]
        assert [reply.status_code for reply in replies] == [200] * 50, [reply.text for reply in replies]
        unready.result()
        until(lambda: not is_alive(victim), 2, "a replica without an engine stays")
        wait(done, timeout=60)

    failed = [stream for stream in streams if stream.error is not None]
    assert failed
    assert len({stream.replica for stream in failed}) == 1
    assert all(stream.error["code"] == "replica_lost" and stream.finish_reasons == [] for stream in failed)
    assert all(stream.finish_reasons == ["length"] for stream in streams if stream not in failed)
    assert not any(stream.was_cut for stream in streams)

    until(lambda: app.num_ready() == 2, 30, "Serve did not replace the replica")
    assert survivor in app.server.named(ENGINE)
