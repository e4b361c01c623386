"""vLLM that guesses ahead, by the prompt's n-grams or an EAGLE-3 head: its answers are complete, and what was accepted is
counted."""

from __future__ import annotations

from collections.abc import Iterator

import eagle3_head
import pytest
from vllm_rig import vllm_rig

from configs.schema import SpeculativeConfig
from tests.conformance.rig import Rig

NUM_TOKENS = 3
PERIODIC = [100, 101, 102, 103] * 20


@pytest.fixture(scope="module", params=["ngram", "eagle3"])
def method(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rig(method: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    head = str(eagle3_head.make(tmp_path_factory.mktemp("heads") / "head")) if method == "eagle3" else ""
    with vllm_rig(speculative=SpeculativeConfig(method=method, model=head, num_tokens=NUM_TOKENS)) as made:
        yield made


def test_drafts_are_counted_by_position_and_add_up(rig: Rig) -> None:
    [answer] = rig.serve(rig.request(PERIODIC, 60))
    assert len(answer.token_ids) == 60
    stats = rig.until_idle()
    assert stats.drafts_total > 0
    assert stats.drafts_total <= stats.draft_tokens_total <= NUM_TOKENS * stats.drafts_total
    assert len(stats.accepted_per_position_total) == NUM_TOKENS
    assert sum(stats.accepted_per_position_total) == stats.accepted_tokens_total <= stats.draft_tokens_total
    assert stats.generation_tokens_total == 60
    assert rig.faults == []


def test_a_delta_may_bring_several_tokens_at_once(rig: Rig, method: str) -> None:
    [answer] = rig.serve(rig.request(PERIODIC, 60, num_logprobs=1))
    assert [each.token_id for each in answer.logprobs] == answer.token_ids
    if method == "ngram":  # which is right about what repeats itself
        assert max(len(delta.token_ids) for delta in answer.deltas) > 1


def test_cached_prefixes_are_still_known_exactly(rig: Rig) -> None:
    request = rig.request(PERIODIC * 2, 4)
    rig.serve(request)
    rig.until_held(request)
    again = rig.request(PERIODIC * 2, 4)
    predicted = rig.predicted_cached_tokens(again)
    [answer] = rig.serve(again)
    assert answer.num_cached_tokens == predicted > 0


def test_what_vllm_can_t_do_with_speculation_is_refused_by_its_name(rig: Rig) -> None:
    [answer] = rig.serve(rig.request([100, 101], 4, temperature=1.0, min_p=0.1))
    error = answer.deltas[-1].error
    assert error is not None
    assert (error.name, error.param) == ("RequestError", "min_p")
