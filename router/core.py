"""The router without Ray: feed it events and reports, ask it for a replica, tell it what was sent.

    router.join("a", facts)
    router.snapshot("a", sequence, hashes)          # and again whenever `apply` says False
    router.apply("a", events)
    router.report("a", stats, now)
    decision = router.route(question, candidates, now)
    lease = router.commit(decision, question, now)  # then lease.first_token() and lease.release(), from any thread

All methods belong to one thread, the router's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from configs.schema import RouterConfig
from replicas.blocks import BlockHash
from replicas.contract import EngineStats, KVEvents
from replicas.errors import NoReplicaError
from router.fleet import Fleet, Lease, ReplicaFacts, ReplicaView
from router.policy import POLICIES, Decision, Prefixes, Question, Reason, Tuning, num_uncached_tokens, power_of_two
from router.trie import BlockTrie

logger = logging.getLogger(__name__)


class Router:
    """One ingress's picture of the fleet and its decisions. `counters` adds up to the number of decisions made."""

    def __init__(
        self, tuning: Tuning, policy: str = "prefix", *, trie_max_bytes: int, stale_after_s: float, lease_s: float
    ) -> None:
        self._tuning = tuning
        self._policy = POLICIES[policy]
        self._trie = BlockTrie(trie_max_bytes)
        self._fleet = Fleet(stale_after_s, lease_s)
        self._sequences: dict[str, int | None] = {}  # of the last event in the trie; None: only a snapshot can say
        self._rotation = 0
        self.counters: dict[Reason, int] = dict.fromkeys(Reason, 0)

    @classmethod
    def from_config(cls, config: RouterConfig) -> Router:
        return cls(
            Tuning(config.margin, config.margin_s, config.min_match_blocks),
            config.policy,
            trie_max_bytes=config.trie_max_bytes,
            stale_after_s=config.stale_after_s,
            lease_s=config.lease_s,
        )

    @property
    def trie(self) -> BlockTrie:
        """To be read only."""
        return self._trie

    @property
    def replicas(self) -> tuple[str, ...]:
        """All that have joined, were candidates, and have not left."""
        return self._fleet.replicas

    @property
    def num_leases(self) -> int:
        return self._fleet.num_leases

    def join(self, replica: str, facts: ReplicaFacts) -> None:
        """A replica (re)started: nothing is cached there, and its first events will have sequence 1."""
        self._fleet.join(replica, facts)
        self._trie.drop(replica)
        self._sequences[replica] = 0

    def drain(self, replica: str) -> None:
        """No new requests for `replica`, until it leaves or joins again."""
        self._fleet.drain(replica)

    def leave(self, replica: str) -> None:
        """Forget a replica, its blocks and its leases. Idempotent."""
        self._fleet.leave(replica)
        self._trie.drop(replica)
        self._sequences.pop(replica, None)

    def lost(self, replica: str) -> None:
        """The connection to a member broke: forget its blocks until the next snapshot. Its load goes stale by itself."""
        if replica in self._sequences:
            self._trie.drop(replica)
            self._sequences[replica] = None

    def snapshot(self, replica: str, sequence: int, hashes: Iterable[BlockHash]) -> None:
        """All blocks that a member holds after its event `sequence` (0: none yet). Ignored for one that never joined."""
        if replica in self._sequences:
            self._trie.replace(replica, hashes)
            self._sequences[replica] = sequence

    def apply(self, replica: str, events: KVEvents) -> bool:
        """Take the next events. False: some are missing (or the replica never joined), a snapshot is needed.

        Events that the last snapshot already holds are skipped. While a snapshot is on its way every call says False; what
        was known before the gap stays in use until then.
        """
        last = self._sequences.get(replica)
        if last is None or events.sequence > last + 1:
            return False
        if events.sequence == last + 1:
            self._trie.apply(replica, events)
            self._sequences[replica] = events.sequence
        return True

    def report(self, replica: str, stats: EngineStats, now: float) -> None:
        """Take a replica's telemetry; ignored for one that is no member."""
        self._fleet.report(replica, stats, now)

    def views(self, candidates: Iterable[str], now: float) -> list[ReplicaView]:
        """How the candidates stand, for admission and for people."""
        return self._fleet.views(candidates, now)

    def route(self, question: Question, candidates: Sequence[str], now: float) -> Decision:
        """Rank the candidates that are not draining. Raises NoReplicaError if there is none, and nothing else.

        A policy that fails is replaced by power-of-two for this request, counted, and logged the first time.
        """
        draining = self._fleet.draining
        views = self._fleet.views([each for each in candidates if each not in draining] if draining else candidates, now)
        if not views:
            raise NoReplicaError("no replica is ready")
        self._rotation += 1
        try:
            decision = self._policy(question, views, self._prefixes(question, now), self._tuning, self._rotation)
        except Exception:
            if not self.counters[Reason.FALLBACK_ERROR]:
                logger.exception("routing policy failed; power of two is used instead")
            decision = power_of_two(question, views, Prefixes(), self._tuning, self._rotation)
            decision = replace(decision, reason=Reason.FALLBACK_ERROR)
        self.counters[decision.reason] += 1
        return decision

    def commit(self, decision: Decision, question: Question, now: float, replica: str | None = None) -> Lease:
        """Count the request on the first of the ranking, or on `replica`, which was a candidate."""
        index = 0 if replica is None else decision.ranking.index(replica)
        return self._fleet.lease(
            decision.ranking[index],
            block_hashes=question.block_hashes,
            num_prompt_tokens=question.num_prompt_tokens,
            num_uncached_tokens=num_uncached_tokens(question.num_prompt_tokens, decision.matched_tokens_each[index]),
            now=now,
        )

    def _prefixes(self, question: Question, now: float) -> Prefixes:
        hashes = question.block_hashes
        matched_blocks = self._fleet.expected_match(hashes, self._trie.match(hashes), now)
        return Prefixes(matched_blocks, self._trie.num_blocks_each)
