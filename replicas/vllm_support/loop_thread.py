"""An event loop on a thread of its own, and calls into it from others."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JOIN_TIMEOUT_S = 30.0


class LoopThread:
    """Runs from its making until `stop`, which cancels what is left on it."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`; not from the loop's own thread. Raises what it raises."""
        return self.spawn(work).result()

    def run_for(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> None:
        """Wait for `work` at most so long; what goes wrong is logged, as there is nobody who could do better."""
        future = self.spawn(work)
        try:
            future.result(timeout_s)
        except Exception:
            logger.exception("%s does not end as it should", self._thread.name)
            future.cancel()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)`, called on the loop, which it blocks."""

        async def work() -> T:
            return function(*arguments)

        return self.run(work())

    def call_soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Any thread; calls are made in their order."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def stop(self) -> None:
        """Once; no calls after it."""
        self.loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(_JOIN_TIMEOUT_S)

    def _serve(self) -> None:
        with self._runner:
            self._runner.run(self._stopped.wait())
