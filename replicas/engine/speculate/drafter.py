"""What the scheduler asks for draft tokens. Pure: no clock, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from configs.schema import SpeculationConfig
from replicas.engine.speculate.depth import PROBE_EVERY, StepCost, acceptance_of_all, acceptance_of_one, choose_depths
from replicas.engine.speculate.ngram import NgramIndex
from replicas.step_time import StepTimeModel, predict


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A decoding sequence: its known tokens, and how many draft tokens it could use at most."""

    request_id: str
    token_ids: Sequence[int]
    limit: int


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The step that is planned, without drafts; the arguments of replicas.step_time.predict."""

    num_tokens: int
    num_context_tokens: int
    num_sequences: int


class DraftCounts:
    """Totals since the start, as vLLM counts them; `num_accepted` by place in the draft."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_tokens = 0
        self.num_accepted: list[int] = []

    def add(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_tokens += num_drafted
        self.num_accepted.extend([0] * (num_drafted - len(self.num_accepted)))
        for place in range(num_accepted):
            self.num_accepted[place] += 1


class Drafter(Protocol):
    def draft(self, requests: Sequence[DraftRequest], load: StepLoad, max_tokens: int) -> list[tuple[int, ...]]:
        """For each request at most `limit` draft tokens, at most `max_tokens` together."""

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """What became of the draft tokens that a step computed."""

    def forget(self, request_id: str) -> None:
        """The request has ended. One that is not known is ignored."""


Law = Callable[[StepLoad], tuple[float, float]]
"""(seconds of that step, seconds that one more row adds to it)"""


class NgramDrafter:
    """Prompt lookup, at most `depth` tokens a sequence and step, as many as pay by `law`."""

    def __init__(self, depth: int, law: Law) -> None:
        self._depth = depth
        self._law = law
        self._everybody = acceptance_of_all(depth)
        self._requests: dict[str, _Request] = {}

    def draft(self, requests: Sequence[DraftRequest], load: StepLoad, max_tokens: int) -> list[tuple[int, ...]]:
        proposals: dict[str, tuple[int, ...]] = {}
        for one in requests:
            state = self._requests.get(one.request_id)
            if state is None:
                state = self._requests[one.request_id] = _Request(self._depth, self)
            proposals[one.request_id] = state.index.propose(one.token_ids, min(one.limit, self._depth))
        survivals = {
            name: self._requests[name].acceptance.survivals()[: len(proposal)]
            for name, proposal in proposals.items()
            if proposal
        }
        if not survivals:
            return [()] * len(requests)
        seconds, per_token_s = self._law(load)
        depths = choose_depths(StepCost(seconds, len(requests), per_token_s), survivals, max_tokens)
        num_left = max_tokens - sum(depths.values())
        for name, depth in depths.items():
            state = self._requests[name]
            state.num_idle = 0 if depth else state.num_idle + 1
            if state.num_idle >= PROBE_EVERY and num_left > 0:
                state.num_idle, depths[name] = 0, 1
                num_left -= 1
        return [proposals[one.request_id][: depths.get(one.request_id, 0)] for one in requests]

    def observe(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        self._everybody.observe(num_drafted, num_accepted)
        state = self._requests.get(request_id)
        if state is not None:
            state.acceptance.observe(num_drafted, num_accepted)

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)


class _Request:
    __slots__ = ("acceptance", "index", "num_idle")

    def __init__(self, depth: int, drafter: NgramDrafter) -> None:
        self.index = NgramIndex()
        self.acceptance = acceptance_of_one(depth, drafter._everybody)
        self.num_idle = 0  # steps in which drafts were there and didn't pay


def make_drafter(config: SpeculationConfig, step_time: StepTimeModel) -> Drafter | None:
    """What `engine.speculation` asks for; None if nothing."""

    def law(load: StepLoad) -> tuple[float, float]:
        coefficients = step_time.coefficients()
        seconds = predict(coefficients, load.num_tokens, load.num_context_tokens, load.num_sequences)
        return seconds, coefficients.per_token_s

    maker = _DRAFTERS.get(config.method)
    return None if maker is None else maker(config.num_tokens, law)


_DRAFTERS: Mapping[str, Callable[[int, Law], Drafter]] = {"ngram": NgramDrafter}
