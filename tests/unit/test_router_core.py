"""The facade, and whole workloads on a fake clock: replicas that prefill one prompt at a time by a step-time law."""

import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest

from configs.schema import RouterConfig
from replicas.contract import EngineStats, KVEvents, StepTimeCoefficients
from replicas.errors import NoReplicaError
from replicas.step_time import prefill_seconds
from router.core import Router
from router.fleet import Lease, ReplicaFacts
from router.policy import Question, Reason

BLOCK = 16
FACTS = ReplicaFacts(max_num_batched_tokens=512, max_num_seqs=64)
CPU = StepTimeCoefficients(base_s=0.005, per_token_s=0.0002, per_context_s=1e-8, per_sequence_s=0.0001, num_samples=9)
GPU = StepTimeCoefficients(base_s=0.008, per_token_s=0.00002, per_context_s=1e-9, per_sequence_s=0.0001, num_samples=9)
NUM_OUTPUT_TOKENS = 32


def chain(name: str, length: int) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(f"{name}/{depth}".encode()).digest() for depth in range(length))


def question_of(prefix: str, num_prefix_tokens: int, suffix: str = "", num_suffix_tokens: int = 0) -> Question:
    num_tokens = num_prefix_tokens + num_suffix_tokens
    shared = chain(prefix, num_prefix_tokens // BLOCK)
    return Question(num_tokens, shared + chain(f"{prefix}+{suffix}", num_tokens // BLOCK - len(shared)))


def make_router(*replicas: str, policy: str = "prefix") -> Router:
    router = Router.from_config(RouterConfig(policy=policy))
    for replica in replicas:
        router.join(replica, FACTS)
    return router


@dataclass
class Job:
    question: Question
    lease: Lease
    num_cached_tokens: int = 0


@dataclass
class ModelReplica:
    law: StepTimeCoefficients
    waiting: deque[Job] = field(default_factory=deque)
    prefilling: Job | None = None
    num_decoding: int = 0
    cached: set[bytes] = field(default_factory=set)
    sequence: int = 0
    served: list[Job] = field(default_factory=list)

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        return next((i for i, name in enumerate(hashes) if name not in self.cached), len(hashes)) * BLOCK

    def stats(self) -> EngineStats:
        jobs = list(self.waiting) + ([self.prefilling] if self.prefilling else [])
        pending = sum(job.question.num_prompt_tokens - self.num_cached(job.question.block_hashes) for job in jobs)
        running = self.num_decoding + (self.prefilling is not None)
        return EngineStats(running, len(self.waiting), pending, step_time=self.law)


class World:
    """Requests in a closed loop over model replicas; whatever these say reaches the routers `delay_s` later."""

    def __init__(self, routers: Sequence[Router], num_replicas: int, law: StepTimeCoefficients, delay_s: float = 0.03) -> None:
        self.routers, self.law, self.delay_s, self.now = routers, law, delay_s, 0.0
        self.replicas = {f"replica{i}": ModelReplica(law) for i in range(num_replicas)}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = count()
        self._todo: deque[Question] = deque()
        self._in_flight = 0
        self._num_sent = 0
        for router in routers:
            for name in self.replicas:
                router.join(name, FACTS)

    def run(self, questions: Sequence[Question], concurrency: int) -> None:
        self._todo.extend(questions)
        self._report()
        for _ in range(concurrency):
            self._send()
        while self._agenda:
            self.now, _, act = heapq.heappop(self._agenda)
            act()

    def _at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._ids), act))

    def _report(self) -> None:
        for name, replica in self.replicas.items():
            stats = replica.stats()
            self._at(self.delay_s, lambda name=name, stats=stats: [r.report(name, stats, self.now) for r in self.routers])
        if self._todo or self._in_flight:
            self._at(0.05, self._report)

    def _send(self) -> None:
        if not self._todo:
            return
        question = self._todo.popleft()
        router = self.routers[self._num_sent % len(self.routers)]
        decision = router.route(question, tuple(self.replicas), self.now)
        job = Job(question, router.commit(decision, question, self.now))
        self._num_sent += 1
        self._in_flight += 1
        self._at(0.001, lambda: self._arrive(job))

    def _arrive(self, job: Job) -> None:
        replica = self.replicas[job.lease.replica]
        replica.waiting.append(job)
        replica.served.append(job)
        if replica.prefilling is None:
            self._start(replica)

    def _start(self, replica: ModelReplica) -> None:
        if not replica.waiting:
            return
        job = replica.prefilling = replica.waiting.popleft()
        job.num_cached_tokens = replica.num_cached(job.question.block_hashes)
        todo = max(1, job.question.num_prompt_tokens - job.num_cached_tokens)
        seconds = prefill_seconds(self.law, todo, job.num_cached_tokens, FACTS.max_num_batched_tokens, replica.num_decoding)
        self._at(seconds, lambda: self._first_token(replica, job))

    def _first_token(self, replica: ModelReplica, job: Job) -> None:
        job.lease.first_token()
        stored = tuple(name for name in job.question.block_hashes if name not in replica.cached)
        replica.cached.update(stored)
        replica.sequence += 1
        events, name = KVEvents(replica.sequence, stored), job.lease.replica
        self._at(self.delay_s, lambda: [router.apply(name, events) for router in self.routers])
        replica.prefilling = None
        replica.num_decoding += 1
        self._at(NUM_OUTPUT_TOKENS * self.law.base_s, lambda: self._finish(replica, job))
        self._start(replica)

    def _finish(self, replica: ModelReplica, job: Job) -> None:
        job.lease.release()
        replica.num_decoding -= 1
        self._in_flight -= 1
        self._send()

    @property
    def imbalance(self) -> float:
        """Most tokens (prompt + output) on a replica, by the mean."""
        loads = [
            sum(job.question.num_prompt_tokens + NUM_OUTPUT_TOKENS for job in replica.served)
            for replica in self.replicas.values()
        ]
        return max(loads) * len(loads) / sum(loads)

    @property
    def num_cached_tokens(self) -> int:
        return sum(job.num_cached_tokens for replica in self.replicas.values() for job in replica.served)


@pytest.mark.parametrize("law", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("num_routers", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_eight_tenants_on_two_replicas_reuse_their_prefixes_and_share_the_load(
    law: StepTimeCoefficients, num_routers: int, seed: int
) -> None:
    """Two routers stand for two ingresses: they see the same events and reports, but not each other's leases."""
    tenants = [f"tenant{i}" for i in range(8)] * 25
    random.Random(seed).shuffle(tenants)
    questions = [question_of(tenant, 600, f"{i}", 60) for i, tenant in enumerate(tenants)]
    world = World([make_router() for _ in range(num_routers)], 2, law)
    world.run(questions, concurrency=8)
    bound = (len(tenants) - 8) * (600 // BLOCK * BLOCK)
    assert world.num_cached_tokens >= 0.95 * bound
    assert world.imbalance <= 1.3
    for router in world.routers:
        router.views((), world.now)
        assert router.num_leases == 0


def test_a_hot_prefix_spreads_once_its_holder_is_overloaded() -> None:
    """One prefix, 60 requests at once, 4 replicas (cases: ray#59390's never rebalancing, sglang#32195's always)."""
    world = World([make_router()], 4, CPU)
    world.run([question_of("hot", 600)], concurrency=1)
    world.run([question_of("hot", 600, f"{i}", 400) for i in range(60)], concurrency=60)
    counts = sorted(len(replica.served) for replica in world.replicas.values())
    assert counts[0] >= 9
    assert counts[-1] <= 22
    assert world.num_cached_tokens >= 0.9 * 60 * 592
    assert world.routers[0].counters[Reason.MARGIN] >= 3


def test_cold_prefixes_one_at_a_time_spread_evenly_over_idle_replicas() -> None:
    world = World([make_router()], 4, CPU)
    for i in range(8):
        world.run([question_of(f"prefix{i}", 2000)], concurrency=1)
    assert [len(replica.served) for replica in world.replicas.values()] == [2, 2, 2, 2]


def test_a_header_that_all_prompts_share_does_not_gather_cold_prompts_on_its_first_holder() -> None:
    header = chain("header", 2)
    world = World([make_router()], 4, CPU)
    for i in range(8):
        question = question_of(f"prefix{i}", 2000)
        world.run([Question(2000, header + question.block_hashes[2:])], concurrency=1)
    assert [len(replica.served) for replica in world.replicas.values()] == [2, 2, 2, 2]


def test_without_candidates_or_with_draining_ones_only_there_is_no_replica() -> None:
    router = make_router("a")
    with pytest.raises(NoReplicaError):
        router.route(question_of("p", 64), (), 0.0)
    router.drain("a")
    with pytest.raises(NoReplicaError):
        router.route(question_of("p", 64), ("a",), 0.0)
    assert router.route(question_of("p", 64), ("a", "b"), 0.0).ranking == ("b",)
    router.join("a", FACTS)
    assert set(router.route(question_of("p", 64), ("a", "b"), 0.0).ranking) == {"a", "b"}


def test_a_failed_replica_is_not_chosen_again_when_the_caller_leaves_it_out() -> None:
    """cases RF04"""
    router = make_router("a", "b")
    question = question_of("p", 640)
    router.snapshot("a", 0, question.block_hashes)
    lease = router.commit(router.route(question, ("a", "b"), 0.0), question, 0.0)
    assert lease.replica == "a"
    lease.release()
    assert router.route(question, ("b",), 0.0).ranking == ("b",)


def test_the_blocks_of_a_replica_that_left_attract_nobody() -> None:
    router = make_router("a", "b")
    question = question_of("p", 640)
    router.snapshot("a", 0, question.block_hashes)
    router.leave("a")
    router.leave("a")
    decision = router.route(question, ("b",), 0.0)
    assert decision.matched_tokens == 0
    assert router.replicas == ("b",)


def test_a_gap_in_the_events_asks_for_a_snapshot_and_repeats_are_skipped() -> None:
    router = make_router("a")
    prompt = chain("p", 6)
    assert router.apply("a", KVEvents(1, stored=prompt[:1]))
    assert router.apply("a", KVEvents(2, stored=prompt[1:2]))
    assert not router.apply("a", KVEvents(4, stored=prompt[3:4]))
    assert not router.apply("a", KVEvents(5, stored=prompt[4:5]))
    assert router.trie.match(prompt) == {"a": 2}
    router.snapshot("a", 4, prompt[:4])
    assert router.apply("a", KVEvents(4, removed=prompt[3:4]))
    assert router.trie.match(prompt) == {"a": 4}
    assert router.apply("a", KVEvents(5, stored=prompt[4:5]))
    assert router.trie.match(prompt) == {"a": 5}


def test_a_lost_connection_forgets_the_blocks_until_the_next_snapshot() -> None:
    router = make_router("a")
    prompt = chain("p", 4)
    router.snapshot("a", 7, prompt)
    router.lost("a")
    assert router.trie.match(prompt) == {}
    assert not router.apply("a", KVEvents(8, stored=prompt))
    router.snapshot("a", 8, prompt)
    assert router.apply("a", KVEvents(9, removed=prompt[3:]))
    assert router.trie.match(prompt) == {"a": 3}


def test_what_a_stranger_says_is_ignored() -> None:
    router = make_router("a")
    prompt = chain("p", 4)
    assert not router.apply("x", KVEvents(1, stored=prompt))
    router.snapshot("x", 1, prompt)
    router.report("x", EngineStats(), 0.0)
    router.lost("x")
    assert router.trie.match(prompt) == {}
    assert router.replicas == ("a",)


def test_a_policy_that_fails_is_replaced_by_power_of_two_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    router = make_router("a", "b", "c")

    def broken(*_: object) -> dict[str, int]:
        raise ZeroDivisionError

    monkeypatch.setattr(router.trie, "match", broken)
    decisions = [router.route(question_of("p", 640), ("a", "b", "c"), 0.0) for _ in range(30)]
    assert {decision.reason for decision in decisions} == {Reason.FALLBACK_ERROR}
    assert len({decision.ranking[0] for decision in decisions}) == 3
    assert all(sorted(decision.ranking) == ["a", "b", "c"] for decision in decisions)
    assert router.counters[Reason.FALLBACK_ERROR] == 30
    assert router.commit(decisions[0], question_of("p", 640), 0.0).num_uncached_tokens == 640


def test_the_counters_add_up_to_the_decisions() -> None:
    router = make_router("a", "b")
    for i in range(20):
        question = question_of(f"p{i % 7}", 640)
        router.commit(router.route(question, ("a", "b")[: 1 + i % 2], float(i)), question, float(i))
    assert sum(router.counters.values()) == 20
    assert router.counters[Reason.ONLY_REPLICA] == 10


def test_a_request_may_be_committed_to_another_replica_than_the_first() -> None:
    router = make_router("a", "b")
    question = question_of("p", 640)
    router.snapshot("a", 0, question.block_hashes[:20])
    decision = router.route(question, ("a", "b"), 0.0)
    assert (router.commit(decision, question, 0.0).replica, decision.matched_tokens) == ("a", 320)
    other = router.commit(decision, question, 0.0, replica="b")
    assert (other.replica, other.num_uncached_tokens) == ("b", 640)


@pytest.mark.parametrize("policy", ["power_of_two", "round_robin"])
def test_the_other_policies_spread_one_prefix_and_still_tell_what_would_match(policy: str) -> None:
    router = make_router("a", "b", policy=policy)
    question = question_of("p", 640)
    router.snapshot("a", 0, question.block_hashes)
    chosen = Counter()
    for _ in range(100):
        decision = router.route(question, ("a", "b"), 0.0)
        chosen[decision.ranking[0]] += 1
        # All of it is cached, and the block of its last token is computed all the same.
        assert decision.matched_tokens == (624 if decision.ranking[0] == "a" else 0)
        assert decision.predicted_ttft_s is None
    assert abs(chosen["a"] - chosen["b"]) <= 30
    assert router.counters[Reason(policy)] == 100


def test_chats_that_share_no_more_than_the_templates_header_are_spread_by_the_answers_being_written() -> None:
    """A block in common saves milliseconds; sixteen long answers on one of two replicas cost everybody seconds."""
    slow = StepTimeCoefficients(0.02, 0.0005, 1e-8, 0.0015, num_samples=9)
    router = make_router()
    for name in ("a", "b"):
        router.join(name, FACTS)
        router.report(name, EngineStats(step_time=slow), 0.0)
    chosen = []
    for index in range(16):
        question = question_of("header", 16, f"{index}", 21)
        decision = router.route(question, ("a", "b"), 0.1 + index * 0.01)
        router.commit(decision, question, 0.1 + index * 0.01).first_token()
        chosen.append(decision.ranking[0])
    assert max(chosen.count("a"), chosen.count("b")) <= 11
