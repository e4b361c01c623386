"""A server in a process of its own, for as long as a `with` block lasts: ours, or any other that a benchmark compares with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "tiny-cpu.yaml"

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.2
_SHOWN_CHARS = 3000


@dataclass(frozen=True, slots=True)
class ServingApp:
    url: str
    pid: int  # of `python -m cluster up`; Ray's processes are its descendants


@contextmanager
def serving_app(*overrides: str, up: Sequence[str] = ("-m", "cluster", "up"), config: Path = CONFIG) -> Iterator[ServingApp]:
    """`python -m cluster up` with `config`, a free port and `overrides`, on a Ray cluster of its own.

    `up` are the interpreter's arguments, for a script that does the same with a difference.
    """
    port = free_port()
    command = [sys.executable, *up, "--config", str(config), f"ingress.port={port}", *overrides]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with running(command, environment, ready=lambda output: "\nready: " in f"\n{output}") as pid:
        yield ServingApp(f"http://127.0.0.1:{port}", pid)


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], *, ready: Callable[[str], bool]) -> Iterator[int]:
    """The process's id, once `ready(its output so far)`; ended by SIGINT, and by SIGKILL if that takes too long.

    Raises RuntimeError with the end of its output if it doesn't get ready.
    """
    with tempfile.TemporaryFile("w+b") as log:
        # A session of its own: a Ctrl-C here must not reach the server's children before the server itself is told.
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_ready(process, lambda: _read(log.fileno()), ready)
            yield process.pid
        finally:
            _stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _read(descriptor: int) -> str:
    """All of a file that another process appends to through the same description: leave its position alone."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def _wait_until_ready(process: subprocess.Popen[bytes], output: Callable[[], str], ready: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not ready(output()):
        if process.poll() is not None or time.monotonic() > deadline:
            state = "did not get ready in time" if process.returncode is None else f"ended with {process.returncode}"
            raise RuntimeError(f"{process.args!r} {state}:\n{output()[-_SHOWN_CHARS:]}")
        time.sleep(_POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # What a killed or clumsy server left behind would share the cores with the next measurement.
        for orphan in psutil.wait_procs(family, timeout=_STOP_TIMEOUT_S)[1]:
            orphan.kill()
