"""The engine over vLLM without vLLM: what its outputs, errors, events and death become."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import pytest

from replicas import vllm_engine
from replicas.blocks import hash_blocks
from replicas.contract import FinishReason, GenerationRequest
from replicas.errors import OverloadedError, ReplicaLostError, RequestError
from replicas.vllm_engine import VllmEngine
from replicas.vllm_support.kv_events import AllBlocksCleared
from tests.conformance.rig import ROOT
from tests.unit.scripted_llm import INFO, Bench, output, stored


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for period in ("_WATCH_PERIOD_S", "_PING_PERIOD_S"):
        monkeypatch.setattr(vllm_engine, period, 1e-3)
    made = Bench()
    yield made
    made.engine.shutdown()
    assert made.rig.faults == []
    assert made.llm.num_tasks_left == 0
    assert made.llm.loop.is_closed()


def error_of(bench: Bench, request: GenerationRequest) -> str:
    info = bench.rig.ended(request).deltas[-1].error
    assert info is not None
    return info.name


class TestRequests:
    def test_deltas_of_one_step_leave_together(self, bench: Bench) -> None:
        outputs = []
        bench.engine.start(outputs.append)
        one, other = bench.submit(), bench.submit()
        bench.step({one.request_id: output(one, 5), other.request_id: output(other, 6)}, num_running=2)
        bench.until(lambda: any(each.deltas for each in outputs))
        with_deltas = [each for each in outputs if each.deltas]
        assert [[delta.token_ids for delta in each.deltas] for each in with_deltas] == [[(5,), (6,)]]
        assert with_deltas[0].stats.num_running == 2

    @pytest.mark.parametrize("name", ["VLLMClientError", "Whatever"])
    def test_what_vllm_raises_ends_the_request_alone(self, bench: Bench, name: str) -> None:
        bad, good = bench.submit(), bench.submit()
        error = type(name, (Exception,), {})("min_p is not supported")
        bench.step({bad.request_id: error, good.request_id: output(good, 5, finish="length")})
        assert error_of(bench, bad) == (RequestError.__name__ if name == "VLLMClientError" else "EngineError")
        assert bench.rig.ended(good).finish_reason is FinishReason.LENGTH

    def test_an_output_that_is_not_understood_ends_its_request_and_is_aborted_in_vllm(self, bench: Bench) -> None:
        request = bench.submit(num_logprobs=1)
        strange = output(request, 5)
        strange.outputs[0].logprobs = [{}]  # without the token that was drawn
        bench.step({request.request_id: strange})
        assert error_of(bench, request) == "EngineError"
        bench.until(lambda: bench.llm.aborted == [request.request_id])

    def test_a_generator_that_just_ends_is_an_abort(self, bench: Bench) -> None:
        request = bench.submit()
        bench.step({request.request_id: None})
        assert bench.rig.ended(request).finish_reason is FinishReason.ABORT

    def test_an_id_is_free_as_soon_as_its_last_delta_is_out(self, bench: Bench) -> None:
        bench.llm.lingers.clear()
        first = bench.submit()
        bench.step({first.request_id: output(first, 5, finish="length")})
        bench.rig.ended(first)
        bench.rig.submit(first)  # while vLLM's generator of the first is about to end
        bench.on_loop(bench.llm.lingers.set)
        bench.step({first.request_id: output(first, 5, 6, finish="length")})
        assert bench.rig.ended(first).token_ids == [5, 6]

    def test_the_queue_has_an_end(self, bench: Bench) -> None:
        for _ in range(2):
            bench.submit()
        with pytest.raises(OverloadedError) as caught:
            bench.submit()
        assert caught.value.retry_after_s >= 1.0
        bench.step({}, num_running=2)
        bench.until(lambda: bench.engine.stats().num_running == 2)
        bench.submit()  # running ones don't wait

    def test_a_sink_that_fails_is_told_of_once_and_keeps_getting_outputs(self, bench: Bench, caplog) -> None:
        bench.rig.sink_error = ValueError("no")
        request = bench.submit()
        with caplog.at_level(logging.ERROR, vllm_engine.__name__):
            bench.step({request.request_id: output(request, 5)})
            bench.step({request.request_id: output(request, 6, finish="length")})
            assert bench.rig.ended(request).token_ids == [5, 6]
        assert len(caplog.records) == 1


class TestAborts:
    def test_one_that_comes_before_the_request_began_still_ends_it(self, bench: Bench) -> None:
        request = bench.rig.request(range(10, 30), 20)
        release = threading.Event()
        bench.llm.loop.call_soon_threadsafe(release.wait)  # so that both are there when the loop goes on
        bench.rig.submit(request)
        bench.engine.abort(request.request_id, FinishReason.STOP)
        release.set()
        assert bench.rig.ended(request).finish_reason is FinishReason.STOP
        assert request.request_id not in bench.llm.queues

    @pytest.mark.parametrize("is_first", [True, False])
    def test_whichever_of_an_abort_and_the_last_output_is_first_decides(self, bench: Bench, is_first: bool) -> None:
        request = bench.submit()

        def work() -> None:
            """Both in one turn of the loop."""
            if is_first:
                bench.engine.abort(request.request_id, FinishReason.STOP)
            bench.llm.queues[request.request_id].put_nowait(output(request, 5, finish="length"))
            if not is_first:
                bench.engine.abort(request.request_id, FinishReason.STOP)

        bench.on_loop(work)
        answer = bench.rig.ended(request)
        assert answer.finish_reason is (FinishReason.STOP if is_first else FinishReason.LENGTH)
        bench.rig.until_idle()
        assert [delta.finish_reason for delta in answer.deltas] == [answer.finish_reason]
        assert bench.llm.aborted == ([request.request_id] if is_first else [])

    def test_of_two_the_first_says_why(self, bench: Bench) -> None:
        request = bench.submit()
        bench.engine.abort(request.request_id, FinishReason.STOP)
        bench.engine.abort(request.request_id)
        assert bench.rig.ended(request).finish_reason is FinishReason.STOP
        bench.engine.abort(request.request_id)
        assert bench.rig.until_idle().finished_total == {"stop": 1, "length": 0, "abort": 0, "error": 0}
        assert bench.llm.aborted == [request.request_id]


class TestCache:
    def test_events_become_names_and_tell_what_is_pending(self, bench: Bench) -> None:
        bench.publish([stored(48)])
        bench.rig.until(lambda: bench.rig.held == set(hash_blocks(ROOT, range(10, 58))), "no events")
        bench.submit(60)
        bench.step({})
        bench.rig.until(lambda: bench.engine.stats().num_pending_tokens == 12, "cached tokens count as pending")

    def test_a_clear_is_asked_for_until_nothing_runs(self, bench: Bench) -> None:
        bench.publish([stored(48)])
        bench.llm.clears = chain(repeat(False, 3), repeat(True))
        bench.engine.clear_cache()
        bench.engine.clear_cache()  # the same
        bench.rig.until(lambda: not bench.rig.held, "not cleared")
        assert bench.llm.num_clears == 4
        bench.engine.clear_cache()
        bench.until(lambda: bench.llm.num_clears == 5)

    def test_lost_events_empty_both_caches(self, bench: Bench) -> None:
        bench.publish([stored(48)], None)
        bench.rig.until(lambda: not bench.rig.held, "not cleared")
        bench.until(lambda: bench.llm.num_clears == 1)
        bench.publish([AllBlocksCleared(), stored(16)])
        bench.rig.until(lambda: bench.rig.held == set(hash_blocks(ROOT, range(10, 26))), "no events after a loss")

    def test_a_warm_up_leaves_no_trace(self, bench: Bench) -> None:
        request = bench.rig.request(range(10, 30), 4)

        async def serve_twice() -> None:
            for _ in range(2):
                while request.request_id not in bench.llm.queues:
                    await asyncio.sleep(0)
                bench.llm.queues.pop(request.request_id).put_nowait(output(request, 5, finish="length"))
                bench.llm.on_stats(None, None)
                await bench.feed.batches.put([stored(16)])

        serving = asyncio.run_coroutine_threadsafe(serve_twice(), bench.llm.loop)
        bench.engine.warm_up([request])
        serving.result(10)
        assert bench.engine.stats().started_total == 0
        assert bench.llm.num_clears == 2  # before it measures, so that it doesn't measure the cache, and when it has
        bench.engine.start(bench.rig._take)
        bench.publish([AllBlocksCleared(), stored(16)])  # older than the second
        bench.publish([AllBlocksCleared(), stored(48)])
        bench.rig.until(lambda: len(bench.rig.held) == 3, "no events")  # the rig finds fault with any number but 1

    def test_a_warm_up_that_fails_says_so(self, bench: Bench) -> None:
        bench.llm.is_dead = True
        with pytest.raises((RuntimeError, ReplicaLostError)):
            bench.engine.warm_up([bench.rig.request(range(10, 30), 4)])


class TestLife:
    def test_a_dead_core_ends_everything_and_takes_nothing_more(self, bench: Bench) -> None:
        one, other = bench.submit(), bench.submit()
        bench.llm.is_dead = True
        assert [error_of(bench, request) for request in (one, other)] == [ReplicaLostError.__name__] * 2
        assert bench.engine.failure() is not None
        with pytest.raises(ReplicaLostError):
            bench.engine.submit(replace(one, request_id="another"))
        bench.engine.clear_cache()
        assert bench.llm.num_clears == 0

    def test_a_request_that_meets_the_death_first_tells_of_it(self, bench: Bench) -> None:
        one, other = bench.submit(), bench.submit()
        bench.step({one.request_id: type("EngineDeadError", (Exception,), {})()})
        assert [error_of(bench, request) for request in (one, other)] == [ReplicaLostError.__name__] * 2
        assert bench.engine.failure() is not None

    def test_a_busy_engine_is_as_late_as_its_last_step(self, bench: Bench) -> None:
        request = bench.submit()
        bench.now_s += 7.0
        assert bench.engine.heartbeat_age_s() == 7.0
        bench.step({request.request_id: output(request, 5)})
        assert bench.engine.heartbeat_age_s() == 0.0

    def test_a_rest_is_no_lateness_of_what_comes_after(self, bench: Bench) -> None:
        bench.now_s += 3600.0
        bench.submit()
        assert bench.engine.heartbeat_age_s() == 0.0

    def test_an_idle_engine_is_as_late_as_its_core_owes_an_answer(self, bench: Bench) -> None:
        bench.hold_pings()
        bench.now_s += 7.0
        assert bench.engine.heartbeat_age_s() == pytest.approx(7.0, abs=0.01)
        num_pings = bench.llm.num_pings
        bench.on_loop(bench.llm.answers_pings.set)
        bench.until(lambda: bench.llm.num_pings > num_pings)
        assert bench.engine.heartbeat_age_s() == 0.0

    def test_shutdown_ends_what_runs_and_can_be_asked_for_twice(self, bench: Bench) -> None:
        request = bench.submit()
        bench.engine.shutdown()
        bench.engine.shutdown()
        assert bench.rig.ended(request).finish_reason is FinishReason.ABORT
        assert bench.num_cleanings == 1
        with pytest.raises(OverloadedError):
            bench.engine.submit(replace(request, request_id="another"))
        bench.engine.abort(request.request_id)
        bench.engine.clear_cache()

    def test_shutdown_does_not_wait_for_a_clear(self, bench: Bench) -> None:
        bench.llm.clears = repeat(False)
        bench.engine.clear_cache()
        bench.until(lambda: bench.llm.num_clears > 1)
        bench.engine.shutdown()  # the fixture looks for tasks that are left

    def test_a_vllm_that_does_not_start_is_cleaned_up_after(self) -> None:
        cleaned: list[bool] = []

        def start(_: Any) -> Any:
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            VllmEngine(start, None, INFO, max_queued_requests=2, clean_up=lambda: cleaned.append(True))
        assert cleaned == [True]
