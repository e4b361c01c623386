"""kill -9 of a part while it serves: what the clients see, and what comes back by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import psutil
import pytest
from app_client import ENDLESS, gauges_at_rest
from processes import until
from streams import MAX_STREAMS, start_streams

ENGINE, INGRESS = "ray::ServeReplica:trieserve:engine", "ray::ServeReplica:trieserve:ingress"
SLOTS_OF = Path(__file__).with_name("slots_of.py")


@pytest.fixture
def pool():
    with ThreadPoolExecutor(MAX_STREAMS) as pool:
        yield pool


def test_when_a_replica_is_killed_its_streams_end_with_an_error_and_the_app_goes_on(app, pool):
    streams, done = start_streams(app, pool, max_tokens=600, ignore_eos=True)
    victim, survivor = app.server.named(ENGINE)
    victim.send_signal(signal.SIGKILL)
    noticed = pool.submit(until, lambda: app.num_ready() == 1, 2, "the dead replica is still counted as ready")
    # Without waiting for anybody to notice.
    statuses = [app.complete(f"after the crash, number {number}").status_code for number in range(100)]
    assert statuses == [200] * 100
    noticed.result()
    wait(done, timeout=60)

    failed = [stream for stream in streams if stream.error is not None]
    assert failed
    assert len({stream.replica for stream in failed}) == 1
    assert all(stream.error["code"] == "replica_lost" and stream.finish_reasons == [] for stream in failed)
    complete = [stream for stream in streams if stream not in failed]
    assert all(stream.replica != failed[0].replica for stream in complete)
    assert all(stream.finish_reasons == ["length"] and stream.events[-1] == "[DONE]" for stream in complete)
    assert not any(stream.was_cut for stream in streams)

    until(lambda: app.num_ready() == 2, 60, "Serve did not replace the replica")
    assert survivor in app.server.named(ENGINE)
    routed = [app.complete(f"{os.urandom(4).hex()} is new").headers["x-trieserve-candidates"] for _ in range(10)]
    assert all(failed[0].replica not in candidates for candidates in routed)
    assert all(candidates.count("=") == 2 for candidates in routed)


def test_when_an_ingress_is_killed_the_engines_drop_its_streams_and_the_other_serves(app, pool):
    streams, done = start_streams(app, pool, **ENDLESS)
    victim = app.server.named(INGRESS)[0]
    victim.send_signal(signal.SIGKILL)
    until(lambda: any(stream.was_cut for stream in streams), 10, "no stream was cut")
    until(lambda: running(app) == sum(not stream.was_cut for stream in streams), 5, "the engines went on for the dead")
    assert not all(stream.was_cut for stream in streams)
    assert app.complete("who else?").status_code == 200
    assert all(stream.finish_reasons == [] for stream in streams if stream.was_cut)

    until(lambda: len(app.server.named(INGRESS)) == 2, 60, "Serve did not replace the ingress")
    min(app.server.named(INGRESS), key=psutil.Process.create_time).send_signal(signal.SIGKILL)
    wait(done, timeout=30)
    until(lambda: at_rest(app), 60, "something is still held for the dead")
    assert set(slots(app).values()) == {0}


def running(app) -> float | None:
    try:
        return app.num_running()
    except (httpx.TransportError, AssertionError):  # asked in the moment of the crash
        return None


def at_rest(app) -> bool:
    try:
        return set(gauges_at_rest(app.metrics()).values()) == {0}
    except (httpx.TransportError, AssertionError):
        return False


def slots(app) -> dict[str, int]:
    """By replica, what Serve counts as requests that it is serving."""
    [raylet] = app.server.named("raylet")
    [gcs] = [argument.partition("=")[2] for argument in raylet.cmdline() if argument.startswith("--gcs-address=")]
    command = [sys.executable, str(SLOTS_OF), gcs]
    return json.loads(subprocess.run(command, env=app.server.environment, capture_output=True, check=True).stdout)
