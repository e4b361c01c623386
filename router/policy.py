"""Which replica answers a request: pure functions from what is known to a ranking with its reason.

The rule of `prefix`, in one sentence: among the replicas that no other beats by the margin, take the one that holds the
longest part of the prompt; if none holds a part worth the name, the one with the least work assigned.

Two predictions can beat a replica. Its time to first token: all tokens pending there, plus those of this prompt that are not
cached there, by that replica's own step-time law. And its time of an answer of usual length: the other tokens follow one a
step, beside the answers that are being written there. So a holder is left when, and only when, its load costs more than its
cache saves, and a request that leaves it makes a second holder. Everything here is deterministic in its arguments; `rotation`
is a number that the caller raises by one for each decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

from replicas.blocks import BlockHash
from replicas.step_time import predict
from router.fleet import ReplicaView

# A match counts from this share of the prompt on, and two matches that differ by less count as equal. The header that a chat
# template puts before every prompt must not gather all cold prompts on the replica that saw the first of them.
_MATCH_SHARE = 1 / 8

_MASK = 2**64 - 1


class Reason(StrEnum):
    """Why the first of the ranking is first."""

    LONGEST_MATCH = "longest_match"
    MARGIN = "margin"  # a longer match was left because another replica answers sooner by the margin
    COLD_SPREAD = "cold_spread"  # nobody holds enough of it
    ONLY_REPLICA = "only_replica"
    STALE_TELEMETRY = "stale_telemetry"  # by the same rule, but no candidate's telemetry is fresh
    POWER_OF_TWO = "power_of_two"
    ROUND_ROBIN = "round_robin"
    FALLBACK_ERROR = "fallback_error"  # the configured policy raised; power of two instead


@dataclass(frozen=True, slots=True)
class Question:
    """`block_hashes` name the full blocks of the prompt, first to last."""

    num_prompt_tokens: int
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Prefixes:
    """By replica: leading blocks of this prompt that it has or will have, and blocks that it holds in all."""

    matched_blocks: Mapping[str, int] = field(default_factory=dict)
    held_blocks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tuning:
    """See configs.schema.RouterConfig."""

    margin: float = 0.25
    margin_s: float = 0.05
    min_match_blocks: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a replica would have cost, to explain a decision. `ttft_s` is None from a policy that predicts none."""

    replica: str
    matched_tokens: int
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """All candidates, best first, with the tokens of the prompt that each has cached (or will have, by then).

    Columns rather than rows, and rows on demand: a decision is made for every request and explained for few.
    """

    ranking: tuple[str, ...]
    reason: Reason
    matched_tokens_each: tuple[int, ...]
    ttft_s_each: tuple[float, ...] | None

    @property
    def matched_tokens(self) -> int:
        """Of the first of the ranking."""
        return self.matched_tokens_each[0]

    @property
    def predicted_ttft_s(self) -> float | None:
        """Of the first of the ranking; None from a policy that predicts none."""
        return self.ttft_s_each[0] if self.ttft_s_each else None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """In the order of the ranking."""
        ttfts: Sequence[float | None] = self.ttft_s_each or (None,) * len(self.ranking)
        return tuple(map(Candidate, self.ranking, self.matched_tokens_each, ttfts))


Policy = Callable[[Question, Sequence[ReplicaView], Prefixes, Tuning, int], Decision]


def prefix(question: Question, views: Sequence[ReplicaView], prefixes: Prefixes, tuning: Tuning, rotation: int) -> Decision:
    """The rule above. `views` are the candidates, at least one."""
    matched = _matched_tokens(question, views, prefixes, tuning)
    ttfts = [predicted_ttft_s(view, question.num_prompt_tokens, cached) for view, cached in zip(views, matched, strict=True)]
    costs = [ttft_s + view.answer_s for ttft_s, view in zip(ttfts, views, strict=True)]
    ttft_limit_s, cost_limit_s = _limit_s(min(ttfts), tuning), _limit_s(min(costs), tuning)
    close = [i for i, cost_s in enumerate(costs) if cost_s <= cost_limit_s and ttfts[i] <= ttft_limit_s]
    close = close or [costs.index(min(costs))]
    deepest = max([matched[i] for i in close])
    slack = question.num_prompt_tokens * _MATCH_SHARE
    is_cold = deepest < max(slack, 1)
    preferred: list[tuple[float, float, int]] = []
    for i in close:
        if matched[i] >= deepest - slack:
            work = _assigned_tokens(views[i], prefixes)
            preferred.append((work, costs[i], i) if is_cold else (costs[i], work, i))
    order = _by_key(preferred, views, _mark(question, rotation))
    if len(order) < len(views):
        order += sorted(set(range(len(views))).difference(order), key=costs.__getitem__)
    if all(view.is_stale for view in views):
        reason = Reason.STALE_TELEMETRY
    elif max(matched) > deepest + slack:
        reason = Reason.MARGIN
    else:
        reason = Reason.COLD_SPREAD if is_cold else Reason.LONGEST_MATCH
    return _decision(views, matched, ttfts, order, reason)


def power_of_two(
    question: Question, views: Sequence[ReplicaView], prefixes: Prefixes, tuning: Tuning, rotation: int
) -> Decision:
    """Of two drawn replicas the one with fewer requests; the others follow in a turning order. Predicts nothing."""
    num = len(views)
    one = other = 0
    if num > 1:
        draw = _mix(rotation)
        one = draw % num
        other = (one + 1 + (draw >> 32) % (num - 1)) % num
        if views[other].num_requests < views[one].num_requests:
            one, other = other, one
    turn = [i % num for i in range(one, one + num)]
    order = list(dict.fromkeys([one, other, *turn]))
    return _decision(views, _matched_tokens(question, views, prefixes, tuning), None, order, Reason.POWER_OF_TWO)


def round_robin(
    question: Question, views: Sequence[ReplicaView], prefixes: Prefixes, tuning: Tuning, rotation: int
) -> Decision:
    """Each in its turn. Predicts nothing."""
    num = len(views)
    order = [i % num for i in range(rotation, rotation + num)]
    return _decision(views, _matched_tokens(question, views, prefixes, tuning), None, order, Reason.ROUND_ROBIN)


POLICIES: Mapping[str, Policy] = {"prefix": prefix, "power_of_two": power_of_two, "round_robin": round_robin}


def num_uncached_tokens(num_prompt_tokens: int, matched_tokens: int) -> int:
    """Tokens to be computed. An engine computes at least a prompt's last one: its logits give the answer's first."""
    return num_prompt_tokens - matched_tokens if matched_tokens < num_prompt_tokens else 1


def predicted_ttft_s(view: ReplicaView, num_prompt_tokens: int, matched_tokens: int) -> float:
    """Seconds until that replica has computed all that is pending there and then what it hasn't cached of this prompt."""
    num_tokens = view.num_pending_tokens + num_uncached_tokens(num_prompt_tokens, matched_tokens)
    prefill_s = view.prefill.seconds(num_tokens, matched_tokens)
    return prefill_s if view.num_requests < view.facts.max_num_seqs else prefill_s + _slot_wait_s(view)


def _slot_wait_s(view: ReplicaView) -> float:
    """Until a sequence's place is free: a full replica frees max_num_seqs places in the steps of an average answer."""
    max_num_seqs = view.facts.max_num_seqs
    step_s = predict(view.step_time, max_num_seqs, view.num_context_tokens, max_num_seqs)
    return (view.num_requests + 1 - max_num_seqs) * view.mean_output_tokens * step_s / max_num_seqs


def _limit_s(best_s: float, tuning: Tuning) -> float:
    """The longest time that `best_s` doesn't beat by the margin: by its share *and* by its seconds."""
    share_s = best_s / (1 - tuning.margin) if tuning.margin < 1 else math.inf
    return max(share_s, best_s + tuning.margin_s)


def _matched_tokens(question: Question, views: Sequence[ReplicaView], prefixes: Prefixes, tuning: Tuning) -> list[int]:
    """What each will take from its cache: whole blocks, and never a prompt's last token, whose logits are needed.

    The candidates are replicas of one deployment, so the facts of the first are those of all.
    """
    facts, blocks_of, least = views[0].facts, prefixes.matched_blocks.get, tuning.min_match_blocks
    size = facts.block_size
    most = (question.num_prompt_tokens - 1) // size
    matched = [blocks if (blocks := blocks_of(view.replica, 0)) < most else most for view in views]
    if facts.num_recomputed_blocks:
        matched = [max(blocks - facts.num_recomputed_blocks, 0) for blocks in matched]
    return [blocks * size if blocks >= least else 0 for blocks in matched]


def _assigned_tokens(view: ReplicaView, prefixes: Prefixes) -> float:
    """What a replica keeps for others, what it was given lately, and the answers it is at: the work a cold prompt adds to."""
    held = prefixes.held_blocks.get(view.replica, 0) * view.facts.block_size
    return held + view.num_recent_tokens + view.num_requests * view.mean_output_tokens


def _decision(
    views: Sequence[ReplicaView],
    matched: Sequence[int],
    ttfts: Sequence[float] | None,
    order: Sequence[int],
    reason: Reason,
) -> Decision:
    return Decision(
        tuple([views[i].replica for i in order]),
        reason if len(order) > 1 else Reason.ONLY_REPLICA,
        tuple([matched[i] for i in order]),
        tuple([ttfts[i] for i in order]) if ttfts else None,
    )


def _by_key(keyed: list[tuple[float, float, int]], views: Sequence[ReplicaView], mark: int) -> list[int]:
    """The indices at the end of the keys, least key first. A tie for the first place goes by rendezvous, so that all
    ingresses choose alike."""
    keyed.sort()
    best = keyed[0][:2]
    num_tied = sum(1 for _ in takewhile(lambda key: key[:2] == best, keyed))
    order = [i for _, _, i in keyed]
    if num_tied > 1:
        order[:num_tied] = sorted(order[:num_tied], key=lambda i: _mix(views[i].seed ^ mark))
    return order


def _mark(question: Question, rotation: int) -> int:
    """What names the prompt for a rendezvous: its first block; the turn if it has none."""
    return int.from_bytes(question.block_hashes[0][:8], "little") if question.block_hashes else _mix(rotation)


def _mix(value: int) -> int:
    """A 64-bit number from another, one to one and well spread (the finalizer of splitmix64)."""
    value = value + 0x9E3779B97F4A7C15 & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
