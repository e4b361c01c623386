"""What the scheduler grants, to whom, and in which order. Each rule of replicas/engine/scheduler.py has its test."""

from __future__ import annotations

from collections import defaultdict

import pytest
from scripted_runner import EOS, ScriptedRunner, expected_output, make_request

from replicas.blocks import hash_blocks
from replicas.contract import Delta, FinishReason, GenerationRequest
from replicas.engine.scheduler import Applied, Scheduler, SchedulerConfig
from replicas.engine.step import ChunkResult, StepPlan, StepResult
from replicas.errors import ConfigError


class Bench:
    """A scheduler with a scripted runner, and everything that came out of it by request."""

    def __init__(self, num_blocks: int = 64, max_num_seqs: int = 8, max_num_batched_tokens: int = 64, **options) -> None:
        options.setdefault("max_model_len", num_blocks * 16)
        config = SchedulerConfig(
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            eos_token_ids=(EOS,),
            **options,
        )
        self.scheduler = Scheduler(config)
        self.runner = ScriptedRunner(num_blocks)
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self.now = 0.0

    def add(self, *requests: GenerationRequest) -> None:
        for request in requests:
            self.scheduler.add(request, self.now)

    def step(self) -> list[tuple[str, int, int]]:
        """(request id, start, number of tokens) of each chunk."""
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        self.apply(plan, self.runner.run(plan))
        return self.runner.plans[-1]

    def apply(self, plan: StepPlan, result: StepResult) -> Applied:
        applied = self.scheduler.apply(plan, result)
        for delta in applied.deltas:
            self.deltas[delta.request_id].append(delta)
        return applied

    def finish(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps: {self.scheduler.request_ids}")

    def output(self, request_id: str) -> list[int]:
        return [token_id for delta in self.deltas[request_id] for token_id in delta.token_ids]

    def reason(self, request_id: str) -> FinishReason | None:
        reasons = [delta.finish_reason for delta in self.deltas[request_id] if delta.finish_reason]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_only_the_last_one_samples():
    bench = Bench(max_num_batched_tokens=64)
    bench.add(make_request("a", range(100), 2))
    assert bench.step() == [("a", 0, 64)]
    assert not bench.deltas
    assert bench.step() == [("a", 64, 36)]
    assert bench.step() == [("a", 100, 1)]
    assert bench.output("a") == expected_output(make_request("a", range(100), 2))


def test_decoding_sequences_come_before_prompts_that_arrived_earlier():
    bench = Bench(max_num_batched_tokens=16)
    bench.add(make_request("short", range(8)), make_request("long", range(50, 100)))
    assert bench.step() == [("short", 0, 8), ("long", 0, 8)]
    bench.add(make_request("late", range(20, 24)))
    for start in (8, 23, 38):
        chunks = bench.step()
        assert chunks[:2] == [("short", chunks[0][1], 1), ("long", start, min(15, 50 - start))]


def test_prompts_under_way_are_served_in_order_of_arrival():
    bench = Bench(max_num_batched_tokens=32)
    bench.add(make_request("a", range(40)), make_request("b", range(50, 90)), make_request("c", range(60, 70)))
    assert bench.step() == [("a", 0, 32)]
    assert bench.step() == [("a", 32, 8), ("b", 0, 24)]
    assert bench.step() == [("a", 40, 1), ("b", 24, 16), ("c", 0, 10)]


def test_without_chunked_prefill_a_prompt_is_computed_whole_however_long():
    bench = Bench(max_num_batched_tokens=32, chunked_prefill=False)
    bench.add(make_request("a", range(90)), make_request("b", range(50, 60)))
    assert bench.step() == [("a", 0, 90)]
    assert bench.step() == [("a", 90, 1), ("b", 0, 10)]


def test_no_more_sequences_run_than_max_num_seqs():
    bench = Bench(max_num_seqs=2)
    bench.add(*(make_request(name, [ord(name)], 2) for name in "abc"))
    assert [chunk[0] for chunk in bench.step()] == ["a", "b"]
    assert bench.scheduler.stats().num_waiting == 1
    bench.finish()
    assert bench.output("c") == expected_output(make_request("c", [ord("c")], 2))


def test_a_prompt_that_does_not_fit_now_holds_up_those_behind_it():
    bench = Bench(num_blocks=8, max_num_batched_tokens=128)
    bench.add(make_request("a", range(64), 2), make_request("big", range(1, 81), 2), make_request("small", [7], 2))
    assert [chunk[0] for chunk in bench.step()] == ["a"]
    assert [chunk[0] for chunk in bench.step()] == ["a"]
    assert [chunk[0] for chunk in bench.step()] == ["big", "small"]


def test_a_newcomer_leaves_one_block_for_each_running_sequence():
    bench = Bench(num_blocks=4)
    bench.add(make_request("a", range(16), 32), make_request("b", range(50, 82), 2))
    assert [chunk[0] for chunk in bench.step()] == ["a", "b"]  # 1 + 2 blocks, and one for a's growth
    bench = Bench(num_blocks=3)
    bench.add(make_request("a", range(16), 32), make_request("b", range(50, 82), 2))
    assert [chunk[0] for chunk in bench.step()] == ["a"]


def test_a_cached_prefix_is_not_computed_again_and_the_first_delta_says_how_long_it_was():
    bench = Bench()
    bench.add(make_request("a", range(40), 2))
    bench.finish()
    bench.add(make_request("b", range(40), 2))
    assert bench.step() == [("b", 32, 8)]
    bench.finish()
    assert [delta.num_cached_tokens for delta in bench.deltas["a"]] == [0, None]
    assert [delta.num_cached_tokens for delta in bench.deltas["b"]] == [32, None]
    assert bench.output("a") == bench.output("b")
    stats = bench.scheduler.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total, stats.prompt_tokens_total) == (80, 32, 80)


def test_the_last_prompt_token_is_computed_even_if_the_whole_prompt_is_cached():
    bench = Bench()
    bench.add(make_request("a", range(32), 2))
    bench.finish()
    bench.add(make_request("b", range(32), 2))
    assert bench.step() == [("b", 16, 16)]
    assert bench.scheduler.stats().num_blocks_used == 2
    bench.finish()
    assert bench.output("a") == bench.output("b")


def test_generated_blocks_are_cached_for_the_next_turn():
    bench = Bench()
    bench.add(make_request("a", range(20), 30))
    bench.finish()
    turn = [*range(20), *bench.output("a"), 1, 2, 3]
    bench.add(make_request("b", turn, 1))
    assert bench.step() == [("b", 48, 5)]


def test_another_root_shares_nothing():
    """cases NS06, NS07"""
    bench = Bench()
    bench.add(make_request("a", range(40), 2))
    bench.finish()
    bench.add(make_request("b", range(40), 2, root=b"another tenant"))
    assert bench.step() == [("b", 0, 40)]


def test_without_prefix_caching_nothing_is_kept_and_nothing_reported():
    bench = Bench(prefix_caching=False)
    bench.add(make_request("a", range(30), 20), make_request("b", range(30), 20))
    assert bench.step() == [("a", 0, 30), ("b", 0, 30)]
    bench.finish()
    assert bench.output("a") == bench.output("b")
    assert bench.scheduler.stats().num_blocks_free == 64
    assert bench.scheduler.stats().prefix_queries_total == 0


def test_a_sequence_waits_for_a_block_that_another_is_computing_and_those_behind_it_do_not():
    bench = Bench(max_num_batched_tokens=16)
    shared = [*range(1, 33)]
    bench.add(make_request("a", [*shared, 40], 1), make_request("b", [*shared, 50], 1))
    assert bench.step() == [("a", 0, 16)]
    bench.add(make_request("c", [60, 61], 1))
    assert bench.step() == [("a", 16, 16)]
    assert bench.step() == [("a", 32, 1), ("b", 32, 1), ("c", 0, 2)]
    assert bench.deltas["b"][0].num_cached_tokens == 32


def test_a_sequence_waits_no_longer_than_the_prefix_is_shared():
    bench = Bench(max_num_batched_tokens=32, max_num_seqs=8)
    bench.add(make_request("a", range(64), 1), make_request("b", [*range(16), *range(80, 90)], 1))
    assert bench.step() == [("a", 0, 32)]
    assert bench.step() == [("a", 32, 32)]
    assert bench.step() == [("b", 16, 10)]


def test_a_sequence_that_waits_for_a_block_goes_on_when_the_other_is_aborted():
    bench = Bench(max_num_batched_tokens=16)
    shared = [*range(1, 49)]
    bench.add(make_request("a", shared, 1), make_request("b", [*shared, 50], 1))
    bench.step()
    bench.scheduler.abort("a")
    assert bench.step() == [("b", 16, 16)]
    bench.finish()
    assert bench.output("b") == expected_output(make_request("b", [*shared, 50], 1))


def test_two_sequences_that_compute_the_same_block_end_up_with_one():
    bench = Bench()
    bench.add(make_request("a", range(32), 20), make_request("b", range(32), 20))
    bench.step()
    bench.step()  # b reuses block 0 and computes block 1 itself: its last token has to be computed
    assert bench.scheduler.stats().num_blocks_used == 3  # 2 shared, and one for what a generates
    bench.finish()
    assert bench.output("a") == bench.output("b") == expected_output(make_request("a", range(32), 20))


def test_the_latest_arrival_is_preempted_returns_first_and_loses_no_token():
    bench = Bench(num_blocks=5, max_num_seqs=2)
    requests = [make_request(name, range(at, at + 16), 40) for name, at in (("a", 0), ("b", 20))]
    bench.add(*requests, make_request("c", [99], 1))
    while bench.scheduler.stats().preemptions_total == 0:
        bench.step()
    num_before = len(bench.output("b"))
    assert num_before > 0
    assert [chunk[0] for chunk in bench.runner.plans[-1]] == ["a"]
    assert bench.scheduler.stats().num_waiting == 2
    bench.finish()
    ids = [[chunk[0] for chunk in plan] for plan in bench.runner.plans]
    assert next(plan for plan in ids if "c" in plan) == ["b", "c"]
    for request in requests:
        assert bench.output(request.request_id) == expected_output(request)
    assert [delta.num_cached_tokens for delta in bench.deltas["b"]] == [0] + [None] * 39
    assert bench.scheduler.stats().prompt_tokens_total == 33  # a return is not a second prompt


def test_one_sequence_may_fill_the_whole_cache():
    bench = Bench(num_blocks=3)
    request = make_request("a", range(20), 28)
    bench.add(request)
    bench.finish()
    assert bench.output("a") == expected_output(request)
    assert bench.scheduler.stats().preemptions_total == 0


def test_a_sequence_ends_at_the_model_length_whatever_max_tokens_says():
    bench = Bench(max_model_len=25)
    bench.add(make_request("a", range(20), 1000))
    bench.finish()
    assert bench.reason("a") is FinishReason.LENGTH
    assert len(bench.output("a")) == 5


def test_a_stop_token_ends_the_sequence_is_counted_and_named():
    probe = expected_output(make_request("a", range(20), 10))
    bench = Bench()
    bench.add(make_request("a", range(20), 10, stop_token_ids=(probe[3],)))
    bench.finish()
    assert bench.output("a") == probe[: probe.index(probe[3]) + 1]
    last = bench.deltas["a"][-1]
    assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, probe[3])


def test_an_end_of_sequence_token_stops_unless_ignored():
    start = next(i for i in range(10_000) if EOS in expected_output(make_request("p", [i % 100, i // 100], 3))[:2])
    prompt = [start % 100, start // 100]
    bench = Bench()
    bench.add(make_request("stops", prompt, 3, ignore_eos=False), make_request("goes on", prompt, 3))
    bench.finish()
    assert bench.output("stops")[-1] == EOS
    assert bench.reason("stops") is FinishReason.STOP
    assert len(bench.output("goes on")) == 3
    assert bench.reason("goes on") is FinishReason.LENGTH


def test_stop_tokens_are_forbidden_until_min_tokens_are_out():
    bench = Bench()
    bench.add(make_request("a", range(5), 4, ignore_eos=False, min_tokens=2, stop_token_ids=(7, 3)))
    forbidden, positions = [], []
    while bench.scheduler.has_work:
        plan = bench.scheduler.plan(0.0)
        forbidden.append(plan.chunks[0].sample.forbidden_token_ids)
        positions.append(plan.chunks[0].sample.position)
        bench.apply(plan, StepResult((ChunkResult("a", 7),), 0.01))  # a runner that draws it all the same
    assert forbidden == [(EOS, 3, 7), (EOS, 3, 7), ()]
    assert positions == [0, 1, 2]
    assert bench.output("a") == [7, 7, 7]
    assert bench.reason("a") is FinishReason.STOP


def test_prior_output_counts_for_position_penalties_and_min_tokens_but_not_for_max_tokens():
    bench = Bench()
    prompt = [*range(30, 40), 1, 2, 3]
    bench.add(make_request("a", prompt, 2, num_prior_output_tokens=3, min_tokens=4, stop_token_ids=(9,)))
    plan = bench.scheduler.plan(0.0)
    sample = plan.chunks[0].sample
    assert (sample.position, list(sample.output_token_ids)) == (3, [1, 2, 3])
    assert list(sample.prompt_token_ids) == [*range(30, 40)]
    assert sample.forbidden_token_ids == (9,)
    bench.apply(plan, bench.runner.run(plan))
    sample = bench.scheduler.plan(0.0).chunks[0].sample
    assert (sample.position, sample.forbidden_token_ids) == (4, ())
    assert list(sample.output_token_ids) == [1, 2, 3, *bench.output("a")]


def test_a_resumed_answer_continues_as_if_it_had_never_been_interrupted():
    """cases RF02"""
    whole = make_request("a", range(20), 30)
    output = expected_output(whole)
    bench = Bench()
    bench.add(make_request("b", [*range(20), *output[:12]], 18, num_prior_output_tokens=12))
    bench.finish()
    assert bench.output("b") == output[12:]


def test_an_aborted_sequence_gives_its_blocks_back_at_once_and_has_one_last_delta():
    """cases KV03"""
    bench = Bench(max_num_seqs=1)
    bench.add(make_request("runs", range(20), 9), make_request("waits", range(40, 60), 9))
    bench.step()
    for name in ("runs", "waits", "runs", "unknown"):
        bench.scheduler.abort(name, FinishReason.STOP)
    assert bench.scheduler.stats().num_blocks_used == 0
    bench.step()
    assert bench.runner.plans[-1] == []
    assert bench.reason("runs") is bench.reason("waits") is FinishReason.STOP
    assert bench.deltas["waits"] == [Delta("waits", finish_reason=FinishReason.STOP)]
    assert set(bench.deltas) == {"runs", "waits"}


def test_the_result_of_a_sequence_aborted_during_its_step_is_dropped():
    bench = Bench()
    bench.add(make_request("a", range(20), 9), make_request("b", range(40, 60), 9))
    plan = bench.scheduler.plan(0.0)
    result = bench.runner.run(plan)
    bench.scheduler.abort("a")
    bench.add(make_request("a", range(30), 9))  # the id may come back at once
    bench.apply(plan, result)
    assert bench.output("a") == []
    assert len(bench.output("b")) == 1


def test_an_error_of_the_runner_ends_that_sequence_only():
    bench = Bench()
    bench.add(make_request("bad", range(20), 3), make_request("good", range(40, 60), 3))
    plan = bench.scheduler.plan(0.0)
    good = bench.runner.run(plan).chunks[1]
    bench.apply(plan, StepResult((ChunkResult("bad", error="broken"), good), 0.01))
    assert bench.reason("bad") is FinishReason.ERROR
    assert bench.deltas["bad"][0].error.message == "broken"
    assert hash_blocks(b"root", range(20))[0] not in bench.scheduler._pool.names()
    bench.finish()
    assert bench.output("good") == expected_output(make_request("good", range(40, 60), 3))


def test_events_name_blocks_after_they_were_computed_and_count_up_from_one():
    bench = Bench(num_blocks=4)
    first = make_request("a", range(33), 1)
    bench.add(first)
    plan = bench.scheduler.plan(0.0)
    events = bench.apply(plan, bench.runner.run(plan)).kv_events
    assert (events.sequence, events.stored, events.removed) == (1, first.block_hashes, ())
    second = make_request("b", range(50, 83), 1)
    bench.add(second)
    plan = bench.scheduler.plan(0.0)
    events = bench.apply(plan, bench.runner.run(plan)).kv_events
    assert (events.sequence, events.stored, events.removed) == (2, second.block_hashes, first.block_hashes[1:])
    plan = bench.scheduler.plan(0.0)
    assert bench.apply(plan, bench.runner.run(plan)) == Applied((), None)


def test_the_wait_in_the_queue_is_on_the_first_delta():
    bench = Bench(max_num_seqs=1)
    bench.add(make_request("a", [1], 3), make_request("b", [2], 2))
    bench.finish()
    assert [delta.queue_s for delta in bench.deltas["b"]] == [4.0, None]


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_seqs": 9, "max_num_batched_tokens": 8, "max_model_len": 16},
        {"max_num_seqs": 0, "max_num_batched_tokens": 8, "max_model_len": 16},
        {"max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 33},
    ],
)
def test_limits_that_contradict_each_other_are_refused(limits):
    with pytest.raises(ConfigError):
        SchedulerConfig(num_blocks=2, **limits)
