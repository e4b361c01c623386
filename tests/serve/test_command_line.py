"""`python -m cluster up` as a command: it says in one line why it can't, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import signal
import socket
import sys
import time

import pytest
import yaml
from conftest import fake_config
from processes import Server, free_port


@pytest.fixture
def start(environment, tmp_path):
    """Start `up` with a configuration, without waiting for anything."""
    started: list[Server] = []

    def start(config) -> Server:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "cluster", "up", "--config", str(tmp_path / "config.yaml")]
        started.append(Server(command, environment, tmp_path / "log"))
        return started[-1]

    yield start
    for server in started:
        server.kill()


@pytest.mark.parametrize("taken_on", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_taken_is_a_one_line_error_and_nothing_is_started(start, taken_on):
    with socket.create_server((taken_on, 0)) as other:
        port = other.getsockname()[1]
        server = start(fake_config(port))
        assert server.wait() == 2
    [line] = server.output().splitlines()
    assert line.startswith(f"error: ingress.port={port} ")
    assert server.leftovers() == []


@pytest.mark.parametrize("moment", ["raylet", "ray::ServeController", "haproxy"])
def test_ctrl_c_ends_everything_at_any_moment_of_the_start(start, moment):
    server = start(fake_config(free_port()))
    server.wait_until(lambda: server.named(moment))
    for _ in range(2):  # impatience must not cut short what the first began
        server.signal(signal.SIGINT, to_group=True)
        time.sleep(0.3)
    assert server.wait() == 130
    assert "Traceback" not in server.output()
    assert server.leftovers() == []
