"""The one thread of an engine that computes, from loading the weights to the last step.

More than a habit: GNU OpenMP gives each thread that computes a team of its own, and once the teams of a process have more
threads than the machine has cores, waiting threads sleep at every barrier instead of spinning. With the weights loaded on one
thread and the steps on another, a decode step of the embedded model took 30 ms instead of 21 (2 cores, 2 threads).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs what it is given, one after the other. A daemon: a process may end while it works or waits."""

    def __init__(self, name: str = "engine") -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        return future

    def close(self) -> None:
        """End the thread after what it was given. Nothing may be submitted any more. Idempotent."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
