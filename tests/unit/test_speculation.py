"""Drafts from earlier text, which draws stand, and how many drafts pay; each beside a plain twin."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_runner import EOS, ScriptedDrafter, ScriptedRunner, expected_output, make_request

from replicas.engine.scheduler import Scheduler, SchedulerConfig
from replicas.engine.speculate.depth import (
    PROBE_EVERY,
    StepCost,
    acceptance_of_all,
    acceptance_of_one,
    choose_depths,
)
from replicas.engine.speculate.drafter import DraftRequest, NgramDrafter, StepLoad
from replicas.engine.speculate.ngram import LONGEST, SHORTEST, NgramIndex
from replicas.engine.speculate.verify import standing
from replicas.engine.step import DrawnToken

LOAD = StepLoad(1, 100, 1)


def plain_proposal(token_ids, count):
    for length in range(LONGEST, SHORTEST - 1, -1):
        for follower in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[follower - length : follower] == token_ids[-length:]:
                text = list(token_ids)
                for index in range(count):
                    text.append(text[follower + index])
                return tuple(text[len(token_ids) :])
    return ()


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 6), st.data())
def test_drafts_are_what_followed_the_last_place_that_ended_alike(token_ids, count, data):
    index = NgramIndex()
    for end in sorted(data.draw(st.sets(st.integers(0, len(token_ids))))):
        assert index.propose(token_ids[:end], count) == plain_proposal(token_ids[:end], count)


def test_a_repeated_text_is_drafted_beyond_its_end():
    assert NgramIndex().propose([5, 6, 7, 5, 6, 7, 5, 6], 5) == (7, 5, 6, 7, 5)


def test_a_long_prompt_is_read_over_several_steps():
    index, prompt = NgramIndex(), [1, 2, 3, *range(10, 1500), 1, 2]
    proposals = [index.propose(prompt, 2) for _ in range(4)]
    assert proposals[0] == (3, 10)
    assert proposals[-1] == (3, 10)
    tail = [*prompt, 1400, 1401]
    assert NgramIndex().propose(tail, 1) == ()
    assert index.propose(tail, 1) == (1402,)


@given(st.lists(st.integers(0, 1), max_size=5), st.data())
def test_draws_stand_as_long_as_each_draft_is_what_was_drawn(drafts, data):
    drawn = [DrawnToken(data.draw(st.integers(0, 1))) for _ in range(len(drafts) + 1)]
    taken = standing(drafts, drawn)
    accepted = len(taken) - 1
    assert taken == drawn[: len(taken)]
    assert [one.token_id for one in taken[:-1]] == drafts[:accepted]
    assert accepted == len(drafts) or taken[-1].token_id != drafts[accepted]


def test_a_row_without_a_token_ends_the_run_before_it():
    failed = DrawnToken(None)  # type: ignore[arg-type]
    assert standing([4, 5], [DrawnToken(4), failed, DrawnToken(6)]) == [DrawnToken(4)]
    assert standing([4], [failed, DrawnToken(5)]) == [failed]


survivals = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=3).map(lambda found: sorted(found, reverse=True))


@given(
    st.lists(survivals, min_size=1, max_size=3),
    st.floats(1e-3, 1e-1),
    st.integers(0, 4),
    st.floats(0.0, 1e-2),
    st.integers(0, 9),
)
def test_the_chosen_depths_give_the_most_tokens_a_second(chances, seconds, num_others, per_token_s, max_tokens):
    cost = StepCost(seconds, len(chances) + num_others, per_token_s)
    chosen = choose_depths(cost, {str(name): found for name, found in enumerate(chances)}, max_tokens)

    def rate(depths):
        gained = sum(sum(found[:depth]) for found, depth in zip(chances, depths, strict=True))
        return (cost.num_decoding + gained) / (seconds + per_token_s * sum(depths))

    possible = [depths for depths in product(*(range(len(found) + 1) for found in chances)) if sum(depths) <= max_tokens]
    assert sum(chosen.values()) <= max_tokens
    assert rate([chosen[str(name)] for name in range(len(chances))]) >= max(map(rate, possible)) * (1 - 1e-9)


def test_a_requests_own_acceptance_outweighs_everybodys_in_time():
    everybody = acceptance_of_all(3)
    for _ in range(200):
        everybody.observe(3, 3)
    one = acceptance_of_one(3, everybody)
    assert one.survivals() == pytest.approx(everybody.survivals())
    for _ in range(40):
        one.observe(3, 0)
    assert one.rate(0) < 0.35
    assert one.rate(1) > 0.9  # which it never came to


def feed(drafter, token_ids, num_accepted, num_steps):
    depths = []
    for _ in range(num_steps):
        [draft] = drafter.draft([DraftRequest("a", token_ids, 100)], LOAD, 100)
        depths.append(len(draft))
        if draft:
            drafter.observe("a", len(draft), min(num_accepted, len(draft)))
    return depths


def test_drafts_that_are_never_accepted_are_left_out_and_asked_for_again_now_and_then():
    drafter = NgramDrafter(5, lambda load: (0.01, 0.004))
    depths = feed(drafter, [1, 2, 3, 1, 2], 0, 20 * PROBE_EVERY)
    assert depths[0] > 0
    assert sum(depths[-10 * PROBE_EVERY :]) <= 11
    assert sum(depths[-2 * PROBE_EVERY :]) >= 1
    assert sum(feed(drafter, [1, 2, 3, 1, 2], 5, 40 * PROBE_EVERY)[-10:]) >= 10  # since they are accepted


def test_drafts_that_cost_nothing_are_all_computed():
    drafter = NgramDrafter(5, lambda load: (0.01, 0.0))
    assert set(feed(drafter, [1, 2, 3, 1, 2], 0, 50)) == {5}


def test_a_request_that_ended_leaves_nothing():
    drafter = NgramDrafter(5, lambda load: (0.01, 0.0))
    feed(drafter, [1, 2, 3, 1, 2], 0, 1)
    drafter.forget("a")
    drafter.forget("never seen")
    drafter.observe("a", 1, 0)
    assert not drafter._requests


def test_an_accepted_run_ends_at_a_stop_token_and_at_the_requested_length():
    for max_tokens in range(1, 12):
        scheduler = Scheduler(
            SchedulerConfig(8, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=128, eos_token_ids=(EOS,)),
            ScriptedDrafter(6),
        )
        runner = ScriptedRunner(8)
        requests = [make_request("a", [3, 4], max_tokens), make_request("b", [5], 40, stop_token_ids=tuple(range(20)))]
        tokens = {"a": [], "b": []}
        for request in requests:
            scheduler.add(request, 0.0)
        while scheduler.has_work:
            plan = scheduler.plan(0.0)
            for delta in scheduler.apply(plan, runner.run(plan)).deltas:
                tokens[delta.request_id] += delta.token_ids
                if delta.stop_token_id is not None:
                    assert delta.stop_token_id == delta.token_ids[-1]
        assert tokens == {request.request_id: expected_output(request) for request in requests}
