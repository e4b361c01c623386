import hashlib
import threading

from hypothesis import given
from hypothesis import strategies as st

from replicas.contract import EngineStats, StepTimeCoefficients
from replicas.step_time import PRIOR
from router.fleet import DEFAULT_FACTS, HALF_LIFE_S, LINGER_S, TRANSIT_S, Fleet, Lease, ReplicaFacts, ReplicaView

FACTS = ReplicaFacts(max_num_batched_tokens=512, max_num_seqs=8)
LAW = StepTimeCoefficients(base_s=0.01, per_token_s=0.001, per_context_s=0.0, per_sequence_s=0.0, num_samples=9)


def chain(name: str, length: int) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(f"{name}/{depth}".encode()).digest() for depth in range(length))


def make_fleet(*replicas: str) -> Fleet:
    fleet = Fleet(stale_after_s=5.0, lease_s=120.0)
    for replica in replicas:
        fleet.join(replica, FACTS)
    return fleet


def send(fleet: Fleet, replica: str, now: float, hashes: tuple[bytes, ...] = (), num_uncached_tokens: int = 100) -> Lease:
    return fleet.lease(replica, block_hashes=hashes, num_prompt_tokens=200, num_uncached_tokens=num_uncached_tokens, now=now)


def view(fleet: Fleet, replica: str, now: float) -> ReplicaView:
    [found] = fleet.views([replica], now)
    return found


def test_without_telemetry_a_replica_is_judged_by_its_leases_alone() -> None:
    fleet = make_fleet("a", "b")
    send(fleet, "a", 1.0)
    send(fleet, "a", 1.1).first_token()
    found = view(fleet, "a", 2.0)
    assert (found.num_pending_tokens, found.num_requests, found.num_running, found.is_stale) == (100, 2, 1, True)
    assert found.step_time == PRIOR
    assert view(fleet, "b", 2.0).num_requests == 0


def test_a_report_takes_over_the_leases_that_it_can_hold_and_newer_ones_count_on_top() -> None:
    fleet = make_fleet("a")
    send(fleet, "a", 1.0)
    send(fleet, "a", 2.0 - TRANSIT_S / 2)
    fleet.report("a", EngineStats(num_running=3, num_waiting=1, num_pending_tokens=700, num_context_tokens=50), 2.0)
    send(fleet, "a", 2.1)
    found = view(fleet, "a", 2.2)
    assert (found.num_pending_tokens, found.num_requests, found.num_running) == (700 + 200, 4 + 2, 3)
    assert (found.num_context_tokens, found.is_stale) == (50, False)


def test_stale_telemetry_is_not_trusted_and_fresh_one_is_again() -> None:
    fleet = make_fleet("a")
    fleet.report("a", EngineStats(num_waiting=9, num_pending_tokens=5000, step_time=LAW), 1.0)
    assert view(fleet, "a", 6.0).num_pending_tokens == 5000
    found = view(fleet, "a", 6.1)
    assert (found.num_pending_tokens, found.num_requests, found.is_stale, found.step_time) == (0, 0, True, LAW)
    fleet.report("a", EngineStats(num_pending_tokens=7), 6.2)
    assert (view(fleet, "a", 6.3).num_pending_tokens, view(fleet, "a", 6.3).is_stale) == (7, False)


def test_when_telemetry_goes_stale_requests_under_way_count_again() -> None:
    fleet = make_fleet("a")
    send(fleet, "a", 1.0)
    fleet.report("a", EngineStats(), 2.0)
    assert view(fleet, "a", 3.0).num_requests == 0
    assert view(fleet, "a", 30.0).num_requests == 1


def test_a_released_lease_is_no_load_however_often_it_is_released() -> None:
    """cases AS01"""
    fleet = make_fleet("a")
    lease = send(fleet, "a", 1.0)
    lease.release()
    lease.release()
    lease.first_token()
    assert view(fleet, "a", 1.1).num_requests == 0
    assert fleet.num_leases == 0


def test_a_lease_that_nobody_releases_expires() -> None:
    """cases AS01"""
    fleet = make_fleet("a")
    send(fleet, "a", 1.0)
    late = send(fleet, "a", 60.0)
    assert view(fleet, "a", 120.9).num_requests == 2
    assert view(fleet, "a", 121.0).num_requests == 1
    late.release()
    assert view(fleet, "a", 121.0).num_requests == 0
    assert fleet.expected_match(chain("p", 3), {}, 500.0) == {}


def test_a_report_settles_leases_so_that_gauges_fall_without_new_requests() -> None:
    fleet = make_fleet("a")
    send(fleet, "a", 1.0).release()
    fleet.report("a", EngineStats(), 2.0)
    assert fleet.num_leases == 0


def test_a_replica_that_leaves_takes_its_leases_and_late_words_are_ignored() -> None:
    fleet = make_fleet("a", "b")
    prompt = chain("p", 5)
    lease = send(fleet, "a", 1.0, prompt)
    fleet.drain("a")
    fleet.leave("a")
    fleet.report("a", EngineStats(num_waiting=1), 1.1)
    lease.first_token()
    lease.release()
    assert fleet.expected_match(prompt, {}, 1.2) == {}
    assert (fleet.replicas, fleet.num_leases, fleet.draining) == (("b",), 0, set())


def test_a_replica_that_joins_again_starts_without_telemetry() -> None:
    fleet = make_fleet("a")
    fleet.report("a", EngineStats(num_waiting=9), 1.0)
    fleet.join("a", FACTS)
    assert (view(fleet, "a", 1.1).num_requests, view(fleet, "a", 1.1).is_stale) == (0, True)


def test_a_replica_that_never_introduced_itself_is_still_judged_by_what_was_sent_there() -> None:
    """A worker whose events and reports never come (dynamo#11194) must not take everything, nor nothing."""
    fleet = make_fleet()
    assert view(fleet, "x", 1.0).facts == DEFAULT_FACTS
    send(fleet, "x", 1.0)
    assert view(fleet, "x", 1.1).num_requests == 1
    fleet.join("x", FACTS)
    assert (view(fleet, "x", 1.1).num_requests, view(fleet, "x", 1.1).facts) == (1, FACTS)


def test_a_replica_without_a_law_is_given_the_one_that_another_told() -> None:
    fleet = make_fleet("a", "b")
    assert view(fleet, "b", 1.0).step_time == PRIOR
    fleet.report("a", EngineStats(step_time=LAW), 1.0)
    assert view(fleet, "b", 1.0).step_time == LAW


def test_a_law_that_is_no_number_is_not_used() -> None:
    fleet = make_fleet("a")
    fleet.report("a", EngineStats(step_time=StepTimeCoefficients(float("nan"), 0.1, 0.0, 0.0)), 1.0)
    assert view(fleet, "a", 1.0).step_time == PRIOR


def test_mean_answers_come_from_what_was_finished() -> None:
    fleet = make_fleet("a")
    stats = EngineStats(generation_tokens_total=900, finished_total={"stop": 2, "length": 1})
    fleet.report("a", stats, 1.0)
    assert view(fleet, "a", 1.0).mean_output_tokens == 300


def test_tokens_sent_lately_fade() -> None:
    fleet = make_fleet("a")
    send(fleet, "a", 0.0)
    assert view(fleet, "a", HALF_LIFE_S / 2).num_recent_tokens == 200
    assert view(fleet, "a", HALF_LIFE_S).num_recent_tokens == 100
    assert view(fleet, "a", HALF_LIFE_S * 3.5).num_recent_tokens == 25
    assert view(fleet, "a", HALF_LIFE_S * 1000).num_recent_tokens == 0


def test_blocks_are_expected_where_requests_under_way_will_leave_them() -> None:
    fleet = make_fleet("a", "b", "c")
    prompt = chain("p", 30)
    send(fleet, "a", 1.0, prompt[:10] + chain("q", 10))
    send(fleet, "b", 1.0, prompt)
    assert fleet.expected_match(prompt, {"a": 4, "c": 2}, 1.1) == {"a": 10, "b": 30, "c": 2}
    assert fleet.expected_match(prompt[:5], {}, 1.1) == {"a": 5, "b": 5}
    assert fleet.expected_match((), {}, 1.1) == {}


def test_a_request_that_failed_before_its_first_token_leaves_no_blocks() -> None:
    """cases RF04"""
    fleet = make_fleet("a")
    prompt = chain("p", 5)
    send(fleet, "a", 1.0, prompt).release()
    assert fleet.expected_match(prompt, {}, 1.0) == {}


def test_the_blocks_of_a_short_answer_are_expected_until_events_had_time_to_come() -> None:
    fleet = make_fleet("a")
    prompt = chain("p", 5)
    lease = send(fleet, "a", 1.0, prompt)
    lease.first_token()
    lease.release()
    assert fleet.expected_match(prompt, {}, 1.1) == {"a": 5}
    assert view(fleet, "a", 1.1).num_requests == 0
    assert fleet.expected_match(prompt, {}, 1.1 + LINGER_S) == {}


def test_leases_may_be_told_from_other_threads() -> None:
    fleet = make_fleet("a")
    leases = [send(fleet, "a", 1.0, chain(f"p{i % 7}", 3)) for i in range(300)]
    threads = [
        threading.Thread(target=lambda part=leases[i::3]: [(each.first_token(), each.release()) for each in part])
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    for _ in range(50):
        assert 0 <= view(fleet, "a", 1.5).num_requests <= 300
    for thread in threads:
        thread.join()
    assert (view(fleet, "a", 1.5).num_requests, fleet.num_leases) == (0, 0)


def linear_match(
    prompt: tuple[bytes, ...], held: dict[str, int], leases: list[tuple[str, tuple[bytes, ...]]]
) -> dict[str, int]:
    """The plain twin of `expected_match`."""
    found = dict(held)
    for replica, hashes in leases:
        depth = 0
        while depth < min(len(hashes), len(prompt)) and hashes[depth] == prompt[depth]:
            depth += 1
        if depth > found.get(replica, 0):
            found[replica] = depth
    return found


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20), st.integers(0, 5)), max_size=12),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 20)),
)
def test_expected_matches_agree_with_a_walk_over_all_leases(sent: list[tuple[str, int, int]], held: dict[str, int]) -> None:
    fleet = make_fleet("a", "b", "c")
    prompt = chain("p", 20)
    leases = [(replica, prompt[:shared] + chain(f"{i}", own)) for i, (replica, shared, own) in enumerate(sent)]
    for replica, hashes in leases:
        send(fleet, replica, 1.0, hashes)
    assert fleet.expected_match(prompt, held, 1.0) == linear_match(prompt, held, leases)


@given(st.lists(st.tuples(st.sampled_from(["send", "first", "release", "report", "wait"]), st.integers(0, 40)), max_size=60))
def test_load_is_never_negative_and_nothing_is_left_when_all_is_over(acts: list[tuple[str, int]]) -> None:
    """cases AS01, MT04"""
    fleet, now, leases = make_fleet("a", "b"), 0.0, []
    for act, number in acts:
        if act == "send":
            leases.append(send(fleet, "ab"[number % 2], now, chain("p", number)))
        elif act == "wait":
            now += number
        elif act == "report":
            fleet.report("ab"[number % 2], EngineStats(), now)
        elif leases:
            lease = leases[number % len(leases)]
            lease.first_token() if act == "first" else lease.release()
        for found in fleet.views(["a", "b"], now):
            assert min(found.num_pending_tokens, found.num_requests, found.num_running, found.num_recent_tokens) >= 0
    now += 121.0
    assert [found.num_requests for found in fleet.views(["a", "b"], now)] == [0, 0]
    fleet.views([], now + LINGER_S)
    assert (fleet.num_leases, fleet._by_first_block, len(fleet._lingering)) == (0, {}, 0)


def test_a_replica_that_has_measured_nothing_yet_does_not_look_better_than_it_is() -> None:
    fleet = Fleet(stale_after_s=5.0, lease_s=60.0)
    for name in ("measured", "new"):
        fleet.join(name, ReplicaFacts(512, 64))
    fleet.report("measured", EngineStats(step_time=LAW), 1.0)
    fleet.report("new", EngineStats(step_time=StepTimeCoefficients(1e-6, 1e-9, 0.0, 0.0, num_samples=0)), 1.0)
    assert [view.step_time for view in fleet.views(["measured", "new"], 1.0)] == [LAW, LAW]
