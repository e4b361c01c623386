"""vLLM that guesses ahead: what it answers stays the same, and what was accepted is counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_rig import vllm_rig

from configs.schema import SpeculativeConfig
from tests.conformance.rig import Rig


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with vllm_rig(speculative=SpeculativeConfig(method="ngram", num_tokens=3)) as made:
        yield made


def test_drafts_are_counted_by_position_and_add_up(rig: Rig) -> None:
    [answer] = rig.serve(rig.request([100, 101, 102, 103] * 20, 60))
    assert len(answer.token_ids) == 60
    stats = rig.until_idle()
    assert stats.drafts_total > 0
    assert stats.drafts_total <= stats.draft_tokens_total <= 3 * stats.drafts_total
    assert len(stats.accepted_per_position_total) == 3
    assert sum(stats.accepted_per_position_total) == stats.accepted_tokens_total <= stats.draft_tokens_total
    assert stats.generation_tokens_total == 60
    assert rig.faults == []


def test_a_delta_may_bring_several_tokens_at_once(rig: Rig) -> None:
    [answer] = rig.serve(rig.request([100, 101, 102, 103] * 20, 60, num_logprobs=1))
    assert max(len(delta.token_ids) for delta in answer.deltas) > 1
    assert [each.token_id for each in answer.logprobs] == answer.token_ids


def test_what_vllm_can_t_do_with_speculation_is_refused_by_its_name(rig: Rig) -> None:
    [answer] = rig.serve(rig.request([100, 101], 4, temperature=1.0, min_p=0.1))
    error = answer.deltas[-1].error
    assert error is not None
    assert (error.name, error.param) == ("RequestError", "min_p")
