"""What the HTTP side needs of the fleet: send a group of sequences to one replica, read their deltas. No Ray here.

A group is the choices of one prompt: they share its KV blocks, so they go to the same replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from replicas.contract import Delta, EngineInfo, FinishReason, GenerationRequest
from router.policy import Decision


class DeltaStream(Protocol):
    """One sequence's deltas. `next` returns all that arrived since the last call, merged; the last has a finish_reason.

    `next` raises ReplicaLostError when the replica is gone. `abort` may be called at any time and more than once.
    """

    async def next(self) -> Delta: ...

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None: ...


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A group on its replica. `decision` is None where another replica than the router's first took it.

    `on_first_token` is to be called when the first delta came: the prompt is no longer load, and its blocks are cached.
    """

    replica: str
    streams: tuple[DeltaStream, ...]
    on_first_token: Callable[[], None]
    decision: Decision | None = None
    decide_s: float | None = None


class Backend(Protocol):
    def dispatch(
        self, group: Sequence[GenerationRequest], *, excluded: frozenset[str], timeout_s: float
    ) -> AbstractAsyncContextManager[Dispatched]:
        """Choose a replica, hold a slot there, submit. Leaving the context aborts what isn't finished and frees the slot.

        Raises NoReplicaError when none could be had within `timeout_s`, what the engine refuses with, or ReplicaLostError
        with `replica` set to the one that failed.
        """

    def info(self) -> EngineInfo:
        """The engine's facts; the same for all replicas of a fleet. Raises NoReplicaError until one was heard of."""

    async def ready(self) -> int:
        """Replicas that can take a request now."""

    async def metrics(self) -> dict[str, bytes | None]:
        """Source -> exposition of every replica; None where one didn't answer."""


def named_for(request: GenerationRequest, block_size: int) -> GenerationRequest:
    """`request` for a replica with blocks of `block_size`, which names them itself where they were named by another size.

    That is so while a deployment in place changes it, and no client's mistake. Of two sizes one is a multiple of the other,
    so that prompts with a block of either have different numbers of them.
    """
    num_blocks = len(request.prompt_token_ids) // block_size
    return request if len(request.block_hashes) == num_blocks else replace(request, block_hashes=())
