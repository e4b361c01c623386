"""CPU time of a server with all its processes."""

from __future__ import annotations

import contextlib

import psutil


class CpuMeter:
    """CPU seconds, user and system, of a process and all its descendants; those that ended meanwhile count as last read."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu_s: dict[psutil.Process, float] = {}

    def read_s(self) -> float:
        for process in (self._root, *self._root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                self._cpu_s[process] = times.user + times.system
        return sum(self._cpu_s.values())
