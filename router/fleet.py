"""What the router knows of each replica: its facts, its last word, and what was sent to it since.

A request that is sent becomes a Lease: load that counts on its replica from this moment on, before any telemetry can show
it, and blocks that the replica is about to hold, before any KV event can say so. A lease ends when it is released, when its
replica leaves, or after `lease_s`: nothing that happens to a request can make its load stay (router#215, ray#61551).

    sent          transit          report received           first token              released        +LINGER_S
     |--------------|---------------------|-----------------------|----------------------|---------------|
     pending + one request: counted here  | counted by the report, which holds it                        |
     prefix: to be found by `expected_match` .............................................................

Times are seconds of one monotonic clock, given as `now`. One thread only, except where a method says otherwise.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from replicas.blocks import BLOCK_SIZE, BlockHash
from replicas.contract import EngineStats, StepTimeCoefficients
from replicas.step_time import PRIOR, PrefillLaw, predict, prefill_law

# A report that is received sooner than this after a request was sent may have been made before the request arrived: the
# request counts on top of it. Twice the load for some milliseconds spreads a burst; none at all would heap it up.
TRANSIT_S = 0.02
# How long the blocks of a finished request are expected without a KV event: events may travel slower than short answers.
LINGER_S = 1.0
# The tokens sent to a replica lately are halved this often: long enough to even out a burst, short enough to forgive it.
HALF_LIFE_S = 30.0
# Most leases of one first block that a decision looks at, newest first: the older ones' blocks are in the index by then.
_MAX_LEASES_LOOKED_AT = 128
# Tokens that a running request will still generate, until a replica has finished some.
_DEFAULT_OUTPUT_TOKENS = 128.0
# What one report counts in the mean of all replicas.
_MEAN_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What doesn't change while a replica lives (see EngineInfo)."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int = BLOCK_SIZE
    num_recomputed_blocks: int = 0


# Of a replica that may be chosen but has not introduced itself yet.
DEFAULT_FACTS = ReplicaFacts(max_num_batched_tokens=512, max_num_seqs=64)


class ReplicaView(NamedTuple):
    """A replica as a decision sees it. A tuple, because a frozen dataclass takes a microsecond more to make, per report.

    `num_requests` are running or waiting there or on their way; `num_running` of them, with `num_context_tokens` in the KV
    cache, are computed in each step; `num_pending_tokens` are known and not computed.
    `num_recent_tokens` of prompts were sent to it lately, fading. `is_stale`: no telemetry younger than `stale_after_s`, so
    load is this router's own leases alone. `seed` is a 64-bit number made from the id, equal in every process.
    `prefill` is how prompts proceed there, and `answer_s` how long one more answer of the fleet's usual length takes after its
    first token, both beside the answers that are being written.
    """

    replica: str
    facts: ReplicaFacts
    step_time: StepTimeCoefficients
    num_pending_tokens: int
    num_requests: int
    num_running: int
    num_context_tokens: int
    num_recent_tokens: int
    mean_output_tokens: float
    is_stale: bool
    seed: int
    prefill: PrefillLaw
    answer_s: float


class Lease:
    """One request's load on one replica. `first_token` and `release` may come from any thread, any number of times."""

    __slots__ = (
        "_changed",
        "block_hashes",
        "expires_at_s",
        "has_first_token",
        "is_released",
        "num_uncached_tokens",
        "replica",
        "sent_at_s",
    )

    def __init__(
        self,
        replica: str,
        block_hashes: tuple[BlockHash, ...],
        num_uncached_tokens: int,
        sent_at_s: float,
        expires_at_s: float,
        changed: deque[Lease],
    ) -> None:
        self.replica = replica
        self.block_hashes = block_hashes
        self.num_uncached_tokens = num_uncached_tokens
        self.sent_at_s = sent_at_s
        self.expires_at_s = expires_at_s
        self.has_first_token = False
        self.is_released = False
        self._changed = changed

    def first_token(self) -> None:
        """The prompt is computed: no longer pending, and its blocks are cached."""
        if not self.has_first_token:
            self.has_first_token = True
            self._changed.append(self)

    def release(self) -> None:
        """The request is over. Without a first token before, its blocks are not expected any more."""
        if not self.is_released:
            self.is_released = True
            self._changed.append(self)


class _Member:
    """A replica's row. `view` is what `views` made last, None when something changed since."""

    __slots__ = (
        "facts",
        "leases",
        "mean_output_tokens",
        "num_recent_tokens",
        "reported_at_s",
        "seed",
        "stats",
        "step_time",
        "uncovered",
        "view",
    )

    def __init__(self, replica: str, facts: ReplicaFacts) -> None:
        self.facts = facts
        self.seed = int.from_bytes(hashlib.sha256(replica.encode()).digest()[:8], "little")
        self.stats: EngineStats | None = None
        self.reported_at_s = -math.inf
        self.step_time: StepTimeCoefficients | None = None
        self.mean_output_tokens = _DEFAULT_OUTPUT_TOKENS
        self.num_recent_tokens = 0
        self.leases: dict[Lease, None] = {}
        self.uncovered: dict[Lease, None] = {}  # of `leases`, those that the last report can't hold yet
        self.view: ReplicaView | None = None


class Fleet:
    """Members, their telemetry and their leases."""

    def __init__(self, stale_after_s: float, lease_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._lease_s = lease_s
        self._members: dict[str, _Member] = {}
        self._step_time = PRIOR  # the last law that any replica told: replicas of one deployment are alike
        self._mean_output_tokens = _DEFAULT_OUTPUT_TOKENS  # of all replicas: they are compared by answers of one length
        self._live: OrderedDict[Lease, None] = OrderedDict()  # by time sent, which is by expiry as well
        self._lingering: deque[tuple[float, Lease]] = deque()
        self._by_first_block: dict[BlockHash, dict[Lease, None]] = {}
        self._changed: deque[Lease] = deque()  # what other threads did to leases, to be taken up by this one
        self._halve_at_s: float | None = None
        self.draining: set[str] = set()  # members that get no new work

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._members)

    @property
    def num_leases(self) -> int:
        """Leases that had not ended when `views`, `lease`, `report` or `expected_match` was last called."""
        return len(self._live)

    def join(self, replica: str, facts: ReplicaFacts) -> None:
        """Add a replica, or learn the facts of one that was chosen before it introduced itself."""
        member = self._member(replica)
        member.facts = facts
        self.draining.discard(replica)
        member.stats, member.reported_at_s = None, -math.inf
        member.view = None

    def drain(self, replica: str) -> None:
        """No new work for `replica`; what it has goes on."""
        self._member(replica)
        self.draining.add(replica)

    def leave(self, replica: str) -> None:
        """Forget a replica with its leases. Idempotent."""
        self.draining.discard(replica)
        member = self._members.pop(replica, None)
        if member is None:
            return
        for lease in member.leases:
            del self._live[lease]
            self._forget_prefix(lease)

    def report(self, replica: str, stats: EngineStats, now: float) -> None:
        """Take a replica's last word. One that is no member (a late word of one that left) is ignored."""
        self._settle(now)
        member = self._members.get(replica)
        if member is None:
            return
        member.stats, member.reported_at_s, member.view = stats, now, None
        num_finished = sum(stats.finished_total.values())
        if num_finished:
            member.mean_output_tokens = stats.generation_tokens_total / num_finished
            self._mean_output_tokens += _MEAN_WEIGHT * (member.mean_output_tokens - self._mean_output_tokens)
        if stats.step_time is not None and _is_usable(stats.step_time):
            if self._step_time is PRIOR:
                for other in self._members.values():
                    other.view = None
            member.step_time = self._step_time = stats.step_time
        covered_until_s = now - TRANSIT_S
        for lease in list(member.uncovered):
            if lease.sent_at_s > covered_until_s:
                break
            del member.uncovered[lease]

    def lease(
        self,
        replica: str,
        *,
        block_hashes: tuple[BlockHash, ...],
        num_prompt_tokens: int,
        num_uncached_tokens: int,
        now: float,
    ) -> Lease:
        """Count a request that is being sent to `replica`, until the lease is released or expires."""
        self._settle(now)
        member = self._member(replica)
        lease = Lease(replica, block_hashes, num_uncached_tokens, now, now + self._lease_s, self._changed)
        member.leases[lease] = member.uncovered[lease] = self._live[lease] = None
        member.num_recent_tokens += num_prompt_tokens
        member.view = None
        if block_hashes:
            self._by_first_block.setdefault(block_hashes[0], {})[lease] = None
        return lease

    def expected_match(self, hashes: Sequence[BlockHash], held: Mapping[str, int], now: float) -> dict[str, int]:
        """`held` (leading blocks of the prompt that each replica has), raised by what requests under way will leave there.

        Two chains that agree at a block agree below it, so a lease that doesn't reach beyond what is known costs one look,
        and one that does a bisection.
        """
        self._settle(now)
        found = dict(held)
        bucket = self._by_first_block.get(hashes[0]) if hashes else None
        if bucket:
            for lease in islice(reversed(bucket), _MAX_LEASES_LOOKED_AT):
                names, depth = lease.block_hashes, found.get(lease.replica, 0)
                if depth < len(names) and depth < len(hashes) and names[depth] == hashes[depth]:
                    found[lease.replica] = _common_length(names, hashes, depth + 1)
        return found

    def views(self, replicas: Iterable[str], now: float) -> list[ReplicaView]:
        """How the given replicas stand; one that never joined is a member from now on, with default facts."""
        self._settle(now)
        fresh_since_s = now - self._stale_after_s
        views = []
        for replica in replicas:
            member = self._members.get(replica) or self._member(replica)
            view = member.view
            if view is None or view.is_stale != (member.reported_at_s < fresh_since_s):
                view = member.view = self._make_view(replica, member, fresh_since_s)
            views.append(view)
        return views

    def _make_view(self, replica: str, member: _Member, fresh_since_s: float) -> ReplicaView:
        stats = member.stats if member.reported_at_s >= fresh_since_s else None
        num_pending_tokens = num_requests = num_running = 0
        for lease in member.leases if stats is None else member.uncovered:
            num_requests += 1
            if lease.has_first_token:
                num_running += 1
            else:
                num_pending_tokens += lease.num_uncached_tokens
        if stats is not None:
            num_pending_tokens += stats.num_pending_tokens
            num_requests += stats.num_running + stats.num_waiting
            num_running += stats.num_running
        law, facts = member.step_time or self._step_time, member.facts
        num_context_tokens = stats.num_context_tokens if stats is not None else 0
        num_beside = min(num_requests + 1, facts.max_num_seqs)
        chunk = max(facts.max_num_batched_tokens - num_running, 1)
        return ReplicaView(
            replica,
            facts,
            law,
            num_pending_tokens,
            num_requests,
            num_running,
            num_context_tokens,
            member.num_recent_tokens,
            member.mean_output_tokens,
            stats is None,
            member.seed,
            prefill_law(law, chunk, num_running, running_context_tokens=num_context_tokens),
            self._mean_output_tokens * predict(law, num_beside, num_context_tokens, num_beside),
        )

    def _member(self, replica: str) -> _Member:
        member = self._members.get(replica)
        if member is None:
            member = self._members[replica] = _Member(replica, DEFAULT_FACTS)
        return member

    def _settle(self, now: float) -> None:
        """Take up what happened to leases since the last call; amortised constant per lease."""
        while self._changed:
            lease = self._changed.popleft()
            if lease in self._live:
                self._members[lease.replica].view = None
                if lease.is_released:
                    self._end(lease, now)
        while self._live and (oldest := next(iter(self._live))).expires_at_s <= now:
            self._end(oldest, now)
        while self._lingering and self._lingering[0][0] <= now:
            self._forget_prefix(self._lingering.popleft()[1])
        if self._halve_at_s is None:
            self._halve_at_s = now + HALF_LIFE_S
        elif now >= self._halve_at_s:
            num_halvings = 1 + int((now - self._halve_at_s) / HALF_LIFE_S)
            self._halve_at_s += num_halvings * HALF_LIFE_S
            for member in self._members.values():
                member.num_recent_tokens >>= num_halvings
                member.view = None

    def _end(self, lease: Lease, now: float) -> None:
        del self._live[lease]
        member = self._members[lease.replica]
        del member.leases[lease]
        member.uncovered.pop(lease, None)
        member.view = None
        if lease.has_first_token:
            self._lingering.append((now + LINGER_S, lease))
        else:
            self._forget_prefix(lease)

    def _forget_prefix(self, lease: Lease) -> None:
        bucket = self._by_first_block.get(lease.block_hashes[0]) if lease.block_hashes else None
        if bucket is not None:
            bucket.pop(lease, None)
            if not bucket:
                del self._by_first_block[lease.block_hashes[0]]


def _is_usable(law: StepTimeCoefficients) -> bool:
    """A replica that has not made a step yet tells its prior, which would look better than what others measured."""
    return law.num_samples > 0 and math.isfinite(law.base_s + law.per_token_s + law.per_context_s + law.per_sequence_s)


def _common_length(one: Sequence[BlockHash], other: Sequence[BlockHash], low: int) -> int:
    """Length of the common prefix of two chains that agree at position low - 1."""
    high = min(len(one), len(other))
    if one[high - 1] == other[high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
