"""Servers in processes of their own, started as a user starts them, and a look at what is left when they ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 60.0
_LEAVE_TIMEOUT_S = 15.0
_POLL_S = 0.1
_SHOWN_CHARS = 6000


class Server:
    """A started command and all processes that were ever seen below it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.environment = environment
        self._log = log
        with log.open("wb") as out:
            # A session of its own, as a terminal's job: signals for the tests are none for the server.
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._family: set[psutil.Process] = set()

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def family(self) -> list[psutil.Process]:
        """Living processes below the command's; remembered also when their parents die before them."""
        if self.process.poll() is None:
            self._family.update(psutil.Process(self.process.pid).children(recursive=True))
        return [process for process in self._family if is_alive(process)]

    def named(self, start: str) -> list[psutil.Process]:
        """Those whose command line begins with `start`; its first word without the folder."""
        return [process for process in self.family() if title(process).startswith(start)]

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = _START_TIMEOUT_S) -> None:
        """Fails with the command's output when it ends or the time is over before `condition` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                state = "is not there in time" if self.process.returncode is None else f"ended with {self.process.returncode}"
                raise AssertionError(f"{self.process.args!r} {state}:\n{self.output()[-_SHOWN_CHARS:]}")
            time.sleep(_POLL_S)

    def signal(self, number: signal.Signals, *, to_group: bool = False) -> None:
        """`to_group` is what a terminal does at Ctrl-C."""
        self.family()
        if to_group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def wait(self) -> int:
        """The exit code, once it ended; whom it starts until then is part of the family."""
        self._wait(lambda: self.process.poll() is not None, _STOP_TIMEOUT_S)
        assert self.process.returncode is not None, f"still runs:\n{self.output()[-_SHOWN_CHARS:]}"
        return self.process.returncode

    def leftovers(self) -> list[str]:
        """What is still there of the family a while after the command ended."""
        self._wait(lambda: not self.family(), _LEAVE_TIMEOUT_S)
        return [title(process) for process in self.family()]

    def kill(self) -> None:
        """Whatever happened: nothing of this server outlives the tests."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition() and time.monotonic() < deadline:
            self.family()
            time.sleep(_POLL_S)


@contextmanager
def server(command: Sequence[str], environment: Mapping[str, str], log: Path, *, stop: signal.Signals) -> Iterator[Server]:
    """Ended by `stop`, after which no process of it may be left."""
    running = Server(command, environment, log)
    try:
        yield running
        running.signal(stop)
        running.wait()
        assert running.leftovers() == []
    finally:
        running.kill()


def is_alive(process: psutil.Process) -> bool:
    """A process that ended but that nobody waits for is as good as gone: containers often have no init that would."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    """Its command line, as Ray's processes set it; nothing if it has just ended."""
    try:
        program, *arguments = process.cmdline()
        return " ".join((Path(program).name, *arguments)).strip()
    except (psutil.Error, ValueError):  # without a command line it's a zombie
        return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(condition: Callable[[], Any], timeout_s: float, what: str = "") -> Any:
    """The first true value of `condition`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, what or f"not within {timeout_s} s"
        time.sleep(0.05)
    return value
