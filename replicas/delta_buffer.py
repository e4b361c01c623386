"""Deltas that wait for a slow reader, merged into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from replicas.contract import Delta

# Merging copies what waits already; done once in so many steps, its share in a step's cost stays negligible.
_MAX_UNMERGED = 256


def merge(deltas: Sequence[Delta]) -> Delta:
    """What consecutive `deltas` of one sequence say, in one. At least one delta, at most the last with a finish_reason."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    assert all(delta.finish_reason is None for delta in deltas[:-1]), f"{first.request_id}: a delta after the last"
    logprobs = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = tuple(chain.from_iterable(delta.logprobs or () for delta in deltas))
    return Delta(
        first.request_id,
        tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        finish_reason=last.finish_reason,
        logprobs=logprobs,
        stop_token_id=last.stop_token_id,
        num_cached_tokens=first.num_cached_tokens,
        queue_s=first.queue_s,
        error=last.error,
    )


def split(delta: Delta, num_tokens: int) -> tuple[Delta, Delta]:
    """Two deltas that merge to `delta`, the first with `num_tokens` tokens, fewer than `delta` has."""
    assert num_tokens < len(delta.token_ids), f"{delta.request_id}: {num_tokens} of {len(delta.token_ids)} tokens"
    logprobs = delta.logprobs
    head = Delta(
        delta.request_id,
        delta.token_ids[:num_tokens],
        logprobs=None if logprobs is None else logprobs[:num_tokens],
        num_cached_tokens=delta.num_cached_tokens,
        queue_s=delta.queue_s,
    )
    tail = replace(
        delta,
        token_ids=delta.token_ids[num_tokens:],
        logprobs=None if logprobs is None else logprobs[num_tokens:],
        num_cached_tokens=None,
        queue_s=None,
    )
    return head, tail


class DeltaBuffer:
    """What one sequence produced and its reader did not take yet. False when empty."""

    __slots__ = ("_deltas", "num_tokens")

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self.num_tokens = 0

    def __bool__(self) -> bool:
        return bool(self._deltas)

    def add(self, delta: Delta) -> None:
        deltas = self._deltas
        deltas.append(delta)
        self.num_tokens += len(delta.token_ids)
        if len(deltas) > _MAX_UNMERGED:
            deltas[:] = (merge(deltas),)

    def take(self, max_tokens: int | None = None) -> Delta:
        """All that waits as one Delta, but at most `max_tokens` tokens of it; what marks the end goes with the last token."""
        delta = merge(self._deltas)
        self._deltas.clear()
        self.num_tokens = 0
        if max_tokens is not None and len(delta.token_ids) > max_tokens:
            delta, rest = split(delta, max_tokens)
            self.add(rest)
        return delta

    def clear(self) -> None:
        self._deltas.clear()
        self.num_tokens = 0
