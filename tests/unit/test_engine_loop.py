"""The engine around scheduler and runner: its inbox, its thread, and what happens when something breaks."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict

import pytest
from scripted_runner import EOS, VOCAB_SIZE, ScriptedRunner, expected_output, make_request

from configs.schema import AppConfig
from replicas.contract import Delta, Engine, EngineInfo, FinishReason, StepOutput
from replicas.engine.engine import NativeEngine
from replicas.engine.step import ChunkResult, StepPlan, StepResult
from replicas.errors import ConfigError, ContextLengthError, EngineError, OverloadedError, RequestError
from replicas.step_time import StepTimeModel

INFO = EngineInfo(
    model_name="scripted",
    model_revision="1",
    vocab_size=VOCAB_SIZE,
    max_model_len=256,
    block_size=16,
    num_blocks=32,
    eos_token_ids=(EOS,),
    max_num_batched_tokens=64,
    max_num_seqs=4,
)
TIMEOUT_S = 10.0  # of waiting for another thread; never reached when all is well


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Outbox:
    """A sink that sorts deltas by request, and lets a test wait for a request's end."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self._ends: queue.Queue[str] = queue.Queue()
        self._ended: set[str] = set()

    def __call__(self, output: StepOutput | None) -> None:
        if output is None:
            return
        self.outputs.append(output)
        for delta in output.deltas:
            self.deltas[delta.request_id].append(delta)
            if delta.finish_reason:
                self._ends.put(delta.request_id)

    def wait_for(self, *request_ids: str) -> None:
        while not self._ended.issuperset(request_ids):
            self._ended.add(self._ends.get(timeout=TIMEOUT_S))

    def tokens(self, request_id: str) -> list[int]:
        return [token_id for delta in self.deltas[request_id] for token_id in delta.token_ids]

    def reason(self, request_id: str) -> FinishReason | None:
        (reason,) = {delta.finish_reason for delta in self.deltas[request_id]} - {None}
        return reason


def make_engine(runner: ScriptedRunner | None = None, **options) -> NativeEngine:
    return NativeEngine(runner or ScriptedRunner(INFO.num_blocks), INFO, StepTimeModel(), **options)


def run_to_end(engine: NativeEngine, max_steps: int = 1000) -> Outbox:
    outbox = Outbox()
    for _ in range(max_steps):
        output = engine.step_once()
        if output is None:
            return outbox
        outbox(output)
    raise AssertionError(f"unfinished after {max_steps} steps")


@pytest.fixture
def started():
    """A function that starts engines, which are shut down at the end of the test."""
    engines = []

    def start(engine: NativeEngine) -> Outbox:
        engines.append(engine)
        outbox = Outbox()
        engine.start(outbox)
        return outbox

    yield start
    for engine in engines:
        engine.shutdown()


def test_the_native_engine_is_an_engine():
    engine: Engine = make_engine()
    assert engine.info is INFO


def test_requests_from_many_threads_are_answered_as_if_each_was_alone(started):
    """cases NS11"""
    engine = make_engine()
    outbox = started(engine)
    requests = [make_request(str(i), [*range(20), i % 7, i], 5 + i % 30) for i in range(40)]
    threads = [threading.Thread(target=engine.submit, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outbox.wait_for(*(request.request_id for request in requests))
    for request in requests:
        assert outbox.tokens(request.request_id) == expected_output(request)
    assert engine.stats().num_blocks_used == 0


def test_an_idle_engine_wakes_for_a_request_for_an_abort_and_for_clearing_the_cache(started):
    engine = make_engine()
    outbox = started(engine)
    engine.submit(make_request("a", range(40), 2))
    outbox.wait_for("a")
    engine.submit(make_request("b", range(20), 200))
    engine.abort("b", FinishReason.STOP)
    outbox.wait_for("b")
    assert outbox.reason("b") is FinishReason.STOP
    engine.clear_cache()
    engine.submit(make_request("c", range(40), 2))
    outbox.wait_for("c")
    assert outbox.deltas["c"][0].num_cached_tokens == 0


def test_a_clear_without_requests_reports_what_was_removed():
    engine = make_engine()
    request = make_request("a", range(40), 2)
    engine.submit(request)
    run_to_end(engine)
    engine.clear_cache()
    output = engine.step_once()
    assert set(output.kv_events.removed) == set(request.block_hashes)
    assert output.stats.num_blocks_free == INFO.num_blocks
    assert engine.step_once() is None


def test_an_abort_frees_the_blocks_within_a_step():
    engine = make_engine()
    engine.submit(make_request("a", range(40), 100))
    engine.step_once()
    assert engine.stats().num_blocks_used == 3
    engine.abort("a")
    engine.abort("unknown")
    (delta,) = engine.step_once().deltas
    assert delta == Delta("a", finish_reason=FinishReason.ABORT)
    assert engine.stats().num_blocks_used == 0
    assert engine.step_once() is None


def test_an_id_that_is_under_way_is_refused_and_free_again_after_the_end():
    """cases RQ06"""
    engine = make_engine()
    engine.submit(make_request("a", range(40), 2))
    with pytest.raises(RequestError) as caught:
        engine.submit(make_request("a", range(5), 2))
    assert caught.value.param == "request_id"
    run_to_end(engine)
    engine.submit(make_request("a", range(5), 2))
    assert run_to_end(engine).tokens("a") == expected_output(make_request("a", range(5), 2))


def test_a_full_queue_refuses_and_says_when_to_come_back():
    """cases KV05"""
    engine = make_engine(max_queued_requests=2)
    for name in "ab":
        engine.submit(make_request(name, range(5), 3))
    with pytest.raises(OverloadedError) as caught:
        engine.submit(make_request("c", range(5), 3))
    assert caught.value.retry_after_s >= 1.0
    engine.step_once()  # now they run, and wait no more
    engine.submit(make_request("c", range(5), 3))
    run_to_end(engine)
    assert engine.stats().finished_total["length"] == 3


def test_what_can_never_fit_is_refused_at_once_with_the_counts():
    """cases KV01, SP02"""
    engine = make_engine()
    with pytest.raises(ContextLengthError, match=r"256 tokens.*200 .*57 more"):
        engine.submit(make_request("a", [1] * 200, 57))
    assert engine.step_once() is None


def test_a_request_that_makes_the_runner_raise_ends_alone(started):
    def refuse(plan: StepPlan) -> None:
        if any(chunk.request_id == "bad" for chunk in plan.chunks):
            raise RuntimeError("secret tensor")

    engine = make_engine(ScriptedRunner(INFO.num_blocks, refuse))
    requests = [make_request(name, [*range(20), ord(name[0])], 5) for name in ("a", "bad", "c")]
    for request in requests:
        engine.submit(request)
    outbox = started(engine)
    outbox.wait_for("a", "bad", "c")
    assert outbox.reason("bad") is FinishReason.ERROR
    error = outbox.deltas["bad"][-1].error
    assert error.name == "EngineError"
    assert "secret" not in error.message
    assert outbox.tokens("a") == expected_output(requests[0])
    assert outbox.tokens("c") == expected_output(requests[2])


def test_a_runner_that_is_broken_for_all_ends_all_and_the_engine_lives_on():
    broken = True

    def refuse(plan: StepPlan) -> None:
        if broken:
            raise RuntimeError

    engine = make_engine(ScriptedRunner(INFO.num_blocks, refuse))
    for name in "ab":
        engine.submit(make_request(name, range(20), 5))
    outbox = run_to_end(engine)
    assert outbox.reason("a") is outbox.reason("b") is FinishReason.ERROR
    assert engine.stats().num_blocks_used == 0
    broken = False
    engine.submit(make_request("a", range(20), 5))
    assert run_to_end(engine).tokens("a") == expected_output(make_request("a", range(20), 5))


@pytest.mark.parametrize(
    "chunks",
    [(), (ChunkResult("other", 1),), (ChunkResult("a"),), (ChunkResult("a", 1), ChunkResult("a", 1))],
    ids=["none", "of another", "without a token", "too many"],
)
def test_a_runner_whose_results_do_not_match_the_plan_ends_the_request(chunks):
    class Wrong:
        def run(self, plan: StepPlan) -> StepResult:
            return StepResult(chunks, 0.01)

    engine = make_engine(Wrong())
    engine.submit(make_request("a", range(20), 5))
    assert run_to_end(engine).reason("a") is FinishReason.ERROR


def test_a_scheduler_that_contradicts_itself_ends_every_request_and_makes_the_engine_unhealthy(started, monkeypatch):
    """cases KV02, RF10"""
    clock = Clock()
    engine = make_engine(clock=clock)
    monkeypatch.setattr(engine._scheduler, "plan", lambda now: 1 / 0)
    engine.submit(make_request("a", range(20), 5))
    outbox = started(engine)
    outbox.wait_for("a")
    assert outbox.deltas["a"][-1].error.name == "EngineError"
    clock.now += 7.0
    assert engine.heartbeat_age_s() == 7.0
    with pytest.raises(EngineError):
        engine.submit(make_request("b", range(20), 5))


def test_a_sink_that_raises_is_logged_once_and_does_not_stop_the_engine(caplog):
    engine = make_engine()
    ended = threading.Event()

    def sink(output: StepOutput) -> None:
        if any(delta.finish_reason for delta in output.deltas):
            ended.set()
        raise ValueError

    engine.submit(make_request("a", range(20), 5))
    engine.start(sink)
    assert ended.wait(TIMEOUT_S)
    engine.shutdown()
    assert len([record for record in caplog.records if "sink" in record.message]) == 1


def test_the_heartbeat_ages_while_a_step_hangs_and_is_zero_when_idle():
    """cases RF10"""
    clock = Clock()
    ages = []

    def hang(plan: StepPlan) -> None:
        clock.now += 5.0
        ages.append(engine.heartbeat_age_s())

    engine = make_engine(ScriptedRunner(INFO.num_blocks, hang), clock=clock)
    clock.now += 1000.0
    assert engine.heartbeat_age_s() == 0.0
    engine.submit(make_request("a", range(20), 2))
    assert engine.heartbeat_age_s() == 0.0  # a long idle time doesn't count
    run_to_end(engine)
    assert ages == [5.0, 5.0]
    clock.now += 1000.0
    assert engine.heartbeat_age_s() == 0.0


def test_shutdown_ends_every_sequence_with_abort_and_may_be_repeated(started):
    entered, release = threading.Event(), threading.Event()

    def hold(plan: StepPlan) -> None:
        entered.set()
        assert release.wait(TIMEOUT_S)

    engine = make_engine(ScriptedRunner(INFO.num_blocks, hold))
    outbox = started(engine)
    engine.submit(make_request("runs", range(20), 100))
    assert entered.wait(TIMEOUT_S)
    engine.submit(make_request("in the inbox", range(20), 100))
    stopper = threading.Thread(target=engine.shutdown)
    stopper.start()
    release.set()
    stopper.join(TIMEOUT_S)
    engine.shutdown()
    assert outbox.reason("runs") is outbox.reason("in the inbox") is FinishReason.ABORT
    assert outbox.outputs[-1].stats.num_running == outbox.outputs[-1].stats.num_waiting == 0
    with pytest.raises(OverloadedError) as caught:
        engine.submit(make_request("late", range(20), 5))
    assert caught.value.code == "shutting_down"


def test_shutdown_before_start_and_from_the_sink_does_not_hang(started):
    never_started = make_engine()
    never_started.submit(make_request("a", range(20), 5))
    never_started.shutdown()
    assert never_started.stats().finished_total["abort"] == 1
    ended, heard = threading.Event(), threading.Event()

    def hold(plan: StepPlan) -> None:
        """Steps go on while the sink is called: keep them from being through before it is."""
        assert plan.chunks[0].start == 0 or heard.wait(TIMEOUT_S)

    engine = make_engine(ScriptedRunner(INFO.num_blocks, hold))
    engine.submit(make_request("a", range(20), 200))

    def sink(output: StepOutput) -> None:
        heard.set()
        engine.shutdown()
        if any(delta.finish_reason is FinishReason.ABORT for delta in output.deltas):
            ended.set()

    engine.start(sink)
    assert ended.wait(TIMEOUT_S)


def test_each_step_teaches_the_step_time_model_and_stats_add_up():
    """cases MT01"""
    engine = make_engine()
    for i in range(6):
        engine.submit(make_request(str(i), [*range(20), i], 3))
    engine.abort("5")
    outbox = run_to_end(engine)
    stats = outbox.outputs[-1].stats
    assert stats == engine.stats()
    assert stats.step_time.num_samples == stats.steps_total
    assert stats.started_total == 6 == sum(stats.finished_total.values())
    assert stats.generation_tokens_total == 15 == sum(len(outbox.tokens(str(i))) for i in range(6))


def test_the_configuration_reaches_the_scheduler():
    config = AppConfig()
    engine = NativeEngine.from_runner(config, ScriptedRunner(INFO.num_blocks), INFO)
    assert engine._scheduler.config.prefix_caching == config.engine.prefix_caching
    assert engine._scheduler.config.max_model_len == INFO.max_model_len


def test_a_model_length_beyond_the_whole_cache_is_refused_at_start():
    """cases KV01"""
    info = EngineInfo("m", "1", VOCAB_SIZE, 513, 16, 32, (), 64, 4)
    with pytest.raises(ConfigError):
        NativeEngine(ScriptedRunner(32), info, StepTimeModel())
