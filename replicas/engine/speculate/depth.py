"""How many draft tokens pay: as long as one more brings tokens faster than the step does without it.

    tokens a second of a step = expected tokens / seconds

A draft token of a sequence brings tokens only if those before it were accepted, so what it is expected to bring (its
*survival*) falls with its place, and greedy choice by survival is the best choice (SmartSpec, arXiv 2406.14066). Nothing here
looks at the draft tokens themselves; it wouldn't change what is drawn (verify.py), but what is measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PRIOR_RATE = 0.5
_PRIOR_WEIGHT = 4.0  # drafts: so many must have been seen before a request's own rate weighs as much as everybody's
_KEEP = 0.9  # what a count weighs after the next draft: requests move from quoting to inventing and back
_KEEP_OF_ALL = 0.99
PROBE_EVERY = 32  # steps after which a request that doesn't pay is asked again, with one token


class Acceptance:
    """How often the first, second, ... draft token is accepted if those before it were. Decayed counts, over a prior."""

    __slots__ = ("_accepted", "_keep", "_prior", "_tried")

    def __init__(self, depth: int, keep: float, prior: Acceptance | None = None) -> None:
        self._keep = keep
        self._prior = prior
        self._tried = [0.0] * depth
        self._accepted = [0.0] * depth

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        for place in range(min(num_drafted, num_accepted + 1)):
            self._tried[place] = self._tried[place] * self._keep + 1.0
            self._accepted[place] = self._accepted[place] * self._keep + (place < num_accepted)

    def rate(self, place: int) -> float:
        prior = _PRIOR_RATE if self._prior is None else self._prior.rate(place)
        return (self._accepted[place] + _PRIOR_WEIGHT * prior) / (self._tried[place] + _PRIOR_WEIGHT)

    def survivals(self) -> list[float]:
        """For each place: the probability that this draft token and all before it are accepted."""
        found, survival = [], 1.0
        for place in range(len(self._tried)):
            survival *= self.rate(place)
            found.append(survival)
        return found


def acceptance_of_all(depth: int) -> Acceptance:
    return Acceptance(depth, _KEEP_OF_ALL)


def acceptance_of_one(depth: int, everybody: Acceptance) -> Acceptance:
    return Acceptance(depth, _KEEP, everybody)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of the step that is planned, without drafts: its seconds, how many sequences gain a token by it, and the seconds that one
    more row adds."""

    seconds: float
    num_decoding: int
    per_token_s: float


def choose_depths(cost: StepCost, survivals: Mapping[str, Sequence[float]], max_tokens: int) -> dict[str, int]:
    """By sequence: how many of its draft tokens to compute, at most len(its survivals), and `max_tokens` of all together."""
    depths = dict.fromkeys(survivals, 0)
    expected, seconds = float(cost.num_decoding), cost.seconds
    best = [(-chances[0], name) for name, chances in survivals.items() if chances]
    heapq.heapify(best)
    while best and max_tokens > 0:
        gain, name = best[0]
        if -gain * seconds <= expected * cost.per_token_s:  # gain / per_token_s is not above expected / seconds
            break
        expected, seconds, max_tokens = expected - gain, seconds + cost.per_token_s, max_tokens - 1
        depths[name] += 1
        chances = survivals[name]
        if depths[name] < len(chances):
            heapq.heapreplace(best, (-chances[depths[name]], name))
        else:
            heapq.heappop(best)
    return depths
