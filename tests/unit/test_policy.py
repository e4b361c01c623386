import hashlib
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.contract import StepTimeCoefficients
from replicas.step_time import prefill_law
from router.fleet import ReplicaFacts, ReplicaView
from router.policy import (
    POLICIES,
    Candidate,
    Decision,
    Prefixes,
    Question,
    Reason,
    Tuning,
    power_of_two,
    predicted_ttft_s,
    prefix,
    round_robin,
)

FACTS = ReplicaFacts(max_num_batched_tokens=512, max_num_seqs=8)
# A step of n tokens takes n milliseconds, so that a time to first token in ms is the tokens before and in the prompt.
LAW = StepTimeCoefficients(base_s=0.0, per_token_s=0.001, per_context_s=0.0, per_sequence_s=0.0, num_samples=9)
NUM_BLOCKS = 40
ASKED = Question(NUM_BLOCKS * 16, tuple(bytes([i]) * 32 for i in range(NUM_BLOCKS)))
TUNING = Tuning(margin=0.25, margin_s=0.05)


def view(
    replica: str,
    num_pending_tokens: int = 0,
    num_requests: int = 0,
    num_recent_tokens: int = 0,
    is_stale: bool = False,
    law: StepTimeCoefficients = LAW,
    answer_s: float = 0.0,
) -> ReplicaView:
    return ReplicaView(
        replica=replica,
        facts=FACTS,
        step_time=law,
        num_pending_tokens=num_pending_tokens,
        num_requests=num_requests,
        num_running=0,
        num_context_tokens=0,
        num_recent_tokens=num_recent_tokens,
        mean_output_tokens=100.0,
        is_stale=is_stale,
        seed=int.from_bytes(hashlib.sha256(replica.encode()).digest()[:8], "little"),
        prefill=prefill_law(law, FACTS.max_num_batched_tokens, 0),
        answer_s=answer_s,
    )


def decide(views: Sequence[ReplicaView], matched: dict[str, int] | None = None, tuning: Tuning = TUNING) -> Decision:
    return prefix(ASKED, views, Prefixes(matched or {}), tuning, rotation=1)


@pytest.mark.parametrize(
    ("num_blocks", "size", "num_recomputed", "expected"),
    [(30, 16, 0, 480), (40, 16, 0, 624), (5, 128, 0, 512), (4, 128, 0, 512), (30, 16, 1, 464), (40, 16, 1, 608), (0, 16, 1, 0)],
)
def test_a_match_counts_as_what_the_engine_will_take_from_its_cache(num_blocks, size, num_recomputed, expected) -> None:
    """Whole blocks of its own size, never a prompt's last token, and less where a drafter needs its last block again."""
    facts = ReplicaFacts(max_num_batched_tokens=512, max_num_seqs=8, block_size=size, num_recomputed_blocks=num_recomputed)
    decision = decide([view("a")._replace(facts=facts)], {"a": num_blocks})
    assert decision.matched_tokens == expected


def test_the_longest_match_wins_and_the_decision_explains_itself() -> None:
    decision = decide([view("a"), view("b"), view("c")], {"b": 30, "c": 10})
    assert (decision.ranking[0], decision.reason) == ("b", Reason.LONGEST_MATCH)
    assert decision.matched_tokens == 480
    assert decision.predicted_ttft_s == pytest.approx(0.160)
    assert decision.candidates[:2] == (
        Candidate("b", 480, pytest.approx(0.160)),
        Candidate("c", 160, pytest.approx(0.480)),
    )


def test_the_holder_is_left_when_another_answers_sooner_by_the_margin() -> None:
    decision = decide([view("holder", num_pending_tokens=900), view("idle")], {"holder": 30})
    assert (decision.ranking, decision.reason) == (("idle", "holder"), Reason.MARGIN)


def test_the_holder_is_kept_while_the_gain_is_within_its_share() -> None:
    # 640 + 160 = 800 ms at the holder, 640 ms at the other: 20 % sooner
    decision = decide([view("holder", num_pending_tokens=640), view("idle")], {"holder": 30})
    assert (decision.ranking[0], decision.reason) == ("holder", Reason.LONGEST_MATCH)


def test_the_holder_is_kept_while_the_gain_is_less_than_the_least_worth_moving_for() -> None:
    views, matched = [view("holder", num_pending_tokens=900), view("idle")], {"holder": 30}
    assert decide(views, matched, Tuning(margin=0.25, margin_s=0.5)).ranking[0] == "holder"
    assert decide(views, matched, Tuning(margin=1.0, margin_s=0.0)).ranking[0] == "holder"
    assert decide(views, matched, Tuning(margin=0.25, margin_s=0.1)).ranking[0] == "idle"


def test_one_overloaded_holder_does_not_switch_affinity_off() -> None:
    """sglang#32195, vllm-project/router#238: the next best holder is taken, not just anybody."""
    views = [view("hot", num_pending_tokens=5000), view("warm", num_pending_tokens=100), view("idle")]
    assert decide(views, {"hot": 40, "warm": 36}).ranking[0] == "warm"


def test_a_miss_never_goes_to_a_drowning_replica_however_empty_its_cache() -> None:
    """sglang#14532"""
    views = [view("drowning", num_pending_tokens=9000), view("full", num_recent_tokens=10**6)]
    decision = prefix(ASKED, views, Prefixes({}, {"full": 10**5}), TUNING, 1)
    assert (decision.ranking[0], decision.reason) == ("full", Reason.COLD_SPREAD)


def test_of_equal_holders_the_one_that_answers_first_is_taken() -> None:
    decision = decide([view("a", num_pending_tokens=30), view("b", num_pending_tokens=10), view("c")], {"a": 30, "b": 30})
    assert decision.ranking[:2] == ("b", "a")


def test_matches_that_differ_by_little_count_as_equal() -> None:
    decision = decide([view("a", num_pending_tokens=200), view("b")], {"a": 32, "b": 30})
    assert (decision.ranking[0], decision.reason) == ("b", Reason.LONGEST_MATCH)


def test_a_match_of_a_small_part_of_the_prompt_counts_as_none() -> None:
    """A chat template's header, which every prompt has, must not gather the cold ones."""
    views = [view("a", num_recent_tokens=100), view("b")]
    assert (decide(views, {"a": 4}).ranking[0], decide(views, {"a": 4}).reason) == ("b", Reason.COLD_SPREAD)
    assert decide(views, {"a": 6}).ranking[0] == "a"


def test_a_match_below_the_configured_least_counts_as_none() -> None:
    decision = decide([view("a", num_recent_tokens=1), view("b")], {"a": 19}, Tuning(min_match_blocks=20))
    assert (decision.ranking[0], decision.reason) == ("b", Reason.COLD_SPREAD)


def test_a_cold_prompt_goes_where_least_work_is_assigned() -> None:
    views = [view("a", num_recent_tokens=500), view("b", num_recent_tokens=300), view("c", num_recent_tokens=400)]
    assert decide(views).ranking == ("b", "c", "a")
    assert prefix(ASKED, views, Prefixes({}, {"b": 20}), TUNING, 1).ranking == ("c", "a", "b")


def test_full_ties_go_by_rendezvous_so_that_all_ingresses_agree_and_prompts_spread() -> None:
    names = ["a", "b", "c", "d"]
    chosen = Counter()
    for i in range(400):
        asked = Question(640, (hashlib.sha256(bytes([i % 256, i // 256])).digest(),))
        one = prefix(asked, [view(name) for name in names], Prefixes(), TUNING, rotation=i)
        other = prefix(asked, [view(name) for name in reversed(names)], Prefixes(), TUNING, rotation=7)
        assert one.ranking[0] == other.ranking[0]
        without_last = prefix(asked, [view(name) for name in names[:3]], Prefixes(), TUNING, rotation=i)
        assert one.ranking[0] in ("d", without_last.ranking[0])
        chosen[one.ranking[0]] += 1
    assert all(70 <= chosen[name] <= 130 for name in names)


def test_prompts_too_short_for_a_name_take_turns_on_idle_replicas() -> None:
    views = [view("a"), view("b")]
    chosen = Counter(prefix(Question(5, ()), views, Prefixes(), TUNING, rotation).ranking[0] for rotation in range(100))
    assert min(chosen.values()) >= 30


@pytest.mark.parametrize("policy", POLICIES)
def test_an_only_replica_is_taken_as_it_is(policy: str) -> None:
    decision = POLICIES[policy](ASKED, [view("a", 10**6, 10**4, is_stale=True)], Prefixes(), TUNING, 1)
    assert (decision.ranking, decision.reason) == (("a",), Reason.ONLY_REPLICA)


def test_one_stale_replica_is_judged_like_the_others_and_an_all_stale_fleet_says_so() -> None:
    assert decide([view("a", is_stale=True), view("b")], {"a": 30}).reason == Reason.LONGEST_MATCH
    decision = decide([view("a", is_stale=True), view("b", is_stale=True)], {"a": 30})
    assert (decision.ranking[0], decision.reason) == ("a", Reason.STALE_TELEMETRY)


def test_a_replica_without_a_free_place_is_charged_the_wait_for_one() -> None:
    free, full, overfull = view("a", num_requests=7), view("b", num_requests=8), view("c", num_requests=10)
    # answers of 100 tokens, 8 at a time, 8 ms a step: a place is free every 100 ms
    assert predicted_ttft_s(free, 100, 0) == pytest.approx(0.1)
    assert predicted_ttft_s(full, 100, 0) == pytest.approx(0.2)
    assert predicted_ttft_s(overfull, 100, 0) == pytest.approx(0.4)


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token() -> None:
    assert predicted_ttft_s(view("a"), 640, 640) == pytest.approx(0.001)


def test_a_holder_where_answers_are_slow_is_left_though_its_first_token_would_come_as_soon() -> None:
    views = [view("holder", answer_s=2.0), view("idle", answer_s=1.0)]
    decision = decide(views, {"holder": 6})
    assert (decision.ranking, decision.reason) == (("idle", "holder"), Reason.MARGIN)


def test_a_holder_is_kept_while_its_answers_are_slower_within_the_margin() -> None:
    views = [view("holder", answer_s=1.2), view("idle", answer_s=1.0)]
    assert decide(views, {"holder": 6}).ranking[0] == "holder"


def test_each_replica_is_judged_by_its_own_law() -> None:
    slow = view("slow", law=StepTimeCoefficients(0.0, 0.01, 0.0, 0.0))
    assert decide([slow, view("fast", num_pending_tokens=500)]).ranking == ("fast", "slow")


def test_power_of_two_takes_the_shorter_queue_of_two_and_never_the_longest_of_all() -> None:
    views = [view("a", num_requests=9), view("b", num_requests=5), view("c", num_requests=1)]
    chosen = Counter(power_of_two(ASKED, views, Prefixes(), TUNING, rotation).ranking[0] for rotation in range(300))
    assert chosen["a"] == 0
    assert 60 <= chosen["b"] <= 140


def test_round_robin_takes_turns() -> None:
    views = [view("a", num_requests=9), view("b"), view("c")]
    rankings = [round_robin(ASKED, views, Prefixes(), TUNING, rotation).ranking for rotation in range(4)]
    assert rankings == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]


loads = st.tuples(
    st.integers(0, 5000), st.integers(0, 20), st.integers(0, 10**5), st.integers(0, NUM_BLOCKS), st.integers(0, 10**4)
)


@given(st.lists(loads, min_size=1, max_size=9), st.sampled_from(sorted(POLICIES)), st.integers(0, 2**40))
def test_every_policy_ranks_every_candidate_once_and_the_same_way_twice(
    rows: list[tuple[int, int, int, int, int]], policy: str, rotation: int
) -> None:
    views = [view(f"r{i}", pending, requests, recent) for i, (pending, requests, recent, _, _) in enumerate(rows)]
    prefixes = Prefixes({f"r{i}": row[3] for i, row in enumerate(rows)}, {f"r{i}": row[4] for i, row in enumerate(rows)})
    decision = POLICIES[policy](ASKED, views, prefixes, TUNING, rotation)
    assert decision == POLICIES[policy](ASKED, views, prefixes, TUNING, rotation)
    assert sorted(decision.ranking) == sorted(found.replica for found in views)
    assert [each.replica for each in decision.candidates] == list(decision.ranking)


@given(st.lists(loads, min_size=2, max_size=9))
def test_nobody_else_answers_sooner_than_the_chosen_by_the_margin(rows: list[tuple[int, int, int, int, int]]) -> None:
    views = [view(f"r{i}", pending, requests, recent) for i, (pending, requests, recent, _, _) in enumerate(rows)]
    decision = decide(views, {f"r{i}": row[3] for i, row in enumerate(rows)})
    chosen_s, best_s = decision.predicted_ttft_s, min(decision.ttft_s_each or ())
    assert chosen_s is not None
    assert chosen_s - best_s <= max(TUNING.margin_s, TUNING.margin * chosen_s) + 1e-9
    longest = max(each.matched_tokens for each in decision.candidates)
    if decision.reason == Reason.LONGEST_MATCH:
        assert decision.matched_tokens >= longest - ASKED.num_prompt_tokens // 8 * 2
