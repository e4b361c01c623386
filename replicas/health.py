"""Whether a replica is of use, and how one leaves whose engine never will be again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from replicas.contract import Engine
from replicas.stream_server import StreamServer

logger = logging.getLogger("ray.serve")

_SHUTDOWN_TIMEOUT_S = 2.0


def complaint(engine: Engine, stalled_after_s: float) -> str | None:
    """Why nobody should send a request to `engine` now; None if there is no reason."""
    failure = engine.failure()
    if failure is not None:
        return failure
    age_s = engine.heartbeat_age_s()
    return f"the engine has work but made no step for {age_s:.0f} s" if age_s > stalled_after_s else None


async def leave_with_engine(
    engine: Engine,
    server: StreamServer,
    leave: Callable[[], object],
    *,
    period_s: float = 0.25,
    last_words_s: float = 0.25,
) -> None:
    """Looks every `period_s` whether `engine` has failed; then calls `leave`, as soon as the last word of every stream is sent.

    The engine ends its requests when it fails, so there is nothing to wait for but their errors, for at most `last_words_s`.
    What was asked of this replica meanwhile is refused as lost (StreamHub.open) and tried elsewhere.
    """
    while (failure := engine.failure()) is None:
        await asyncio.sleep(period_s)
    try:
        logger.error("this replica ends, because its engine has: %s", failure)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(last_words_s):
                await server.drain()
        await server.close()
        # So that it takes along what it has started. It may hang on what it lost.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(engine.shutdown), _SHUTDOWN_TIMEOUT_S)
    finally:
        leave()
