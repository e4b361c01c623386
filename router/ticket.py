"""What one request brings to the router, and what the router's choice leaves on it.

The ingress passes a Ticket as the first argument of `handle.choose_replica(ticket)` (or `handle.generate.remote(ticket, ...)`);
the router, on a thread of its own in the same process, writes `decision` and `lease` before the choice is returned. In
another process (the replica, on the classic path) only the facts arrive: a lease has no meaning there.
"""

from __future__ import annotations

from replicas.blocks import BlockHash
from router.fleet import Lease
from router.policy import Decision


class Ticket:
    """`excluded` names replicas (Serve's unique ids) that already failed this request and must not be chosen again."""

    __slots__ = ("block_hashes", "decide_s", "decision", "excluded", "lease", "num_prompt_tokens")

    def __init__(
        self, num_prompt_tokens: int, block_hashes: tuple[BlockHash, ...], excluded: frozenset[str] = frozenset()
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.block_hashes = block_hashes
        self.excluded = excluded
        self.decision: Decision | None = None
        self.decide_s: float | None = None
        self.lease: Lease | None = None

    def first_token(self) -> None:
        """The prompt is computed on its replica. From any thread, any number of times."""
        if self.lease is not None:
            self.lease.first_token()

    def release(self) -> None:
        """Give the lease back. Idempotent."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()

    def __reduce__(self) -> tuple[type[Ticket], tuple[int, tuple[BlockHash, ...], frozenset[str]]]:
        return (Ticket, (self.num_prompt_tokens, (), self.excluded))
