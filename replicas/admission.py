"""Whether an engine takes one more request, by what it has already. Pure."""

from __future__ import annotations

from collections.abc import Collection

from replicas.contract import EngineStats
from replicas.errors import OverloadedError, RequestError
from replicas.step_time import PRIOR, prefill_seconds

_MIN_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 60.0


def admit(
    request_id: str,
    unfinished: Collection[str],
    stats: EngineStats,
    *,
    max_queued_requests: int,
    max_num_batched_tokens: int,
    is_stopping: bool,
) -> None:
    """Raises OverloadedError where it can't be taken now, RequestError for an id that is under way.

    `unfinished` are all that were submitted and have not ended; `stats` may be a step old.
    """
    if is_stopping:
        raise OverloadedError("the engine is shutting down", code="shutting_down")
    if request_id in unfinished:
        raise RequestError("a request with this id is under way", param="request_id")
    if len(unfinished) - stats.num_running >= max_queued_requests:
        raise OverloadedError(
            f"{max_queued_requests} requests are waiting already", retry_after_s=_retry_after_s(stats, max_num_batched_tokens)
        )


def _retry_after_s(stats: EngineStats, max_num_batched_tokens: int) -> float:
    """How long the prompts that are here already take; the queue has moved by then."""
    predicted_s = prefill_seconds(stats.step_time or PRIOR, stats.num_pending_tokens, 0, max_num_batched_tokens, 0)
    return min(max(predicted_s, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)
