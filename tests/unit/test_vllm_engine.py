"""The engine over vLLM without vLLM: what its outputs, errors, events and death become."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from replicas.blocks import hash_blocks
from replicas.contract import EngineInfo, FinishReason, GenerationRequest
from replicas.errors import OverloadedError, ReplicaLostError, RequestError
from replicas.vllm_engine import VllmEngine
from replicas.vllm_support.kv_events import AllBlocksCleared, BlockStored
from tests.conformance.rig import ROOT, Abilities, Rig

INFO = EngineInfo("m", "1", 1000, 512, 16, 64, (2,), 128, 8)


class ScriptedLlm:
    """Its outputs are what the test puts into a request's queue; None ends it without a last one."""

    def __init__(self, on_stats: Callable[[Any, Any], None]) -> None:
        self.on_stats = on_stats
        self.loop = asyncio.get_running_loop()
        self.queues: dict[str, asyncio.Queue[Any]] = {}
        self.aborted: list[str] = []
        self.is_dead = False
        self.clears = iter(())  # answers to clear_cache, True when there are no more
        self.num_clears = 0
        self.answers_pings = True
        self.is_shut_down = False

    def actual(self, info: EngineInfo) -> EngineInfo:
        return info

    def core_pids(self) -> tuple[int, ...]:
        return (1,)

    async def generate(self, request: GenerationRequest, sampling: Mapping[str, Any]) -> AsyncIterator[Any]:
        queue = self.queues.setdefault(request.request_id, asyncio.Queue())
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.outputs[0].finish_reason is not None:
                    return
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise

    async def clear_cache(self) -> bool:
        self.num_clears += 1
        return next(self.clears, True)

    async def ping(self) -> None:
        while not self.answers_pings:
            await asyncio.sleep(0.005)

    def shutdown(self) -> None:
        self.is_shut_down = True


class ScriptedFeed:
    def __init__(self) -> None:
        self.batches: asyncio.Queue[Sequence[Any] | None] = asyncio.Queue()

    async def run(self, on_batch: Callable[[Sequence[Any]], None], on_lost: Callable[[], None]) -> None:
        while True:
            batch = await self.batches.get()
            if batch is None:
                on_lost()
            else:
                on_batch(batch)


class Bench:
    """The engine, and hands on what is behind it."""

    def __init__(self) -> None:
        self.now_s = 100.0

        def start(on_stats: Callable[[Any, Any], None]) -> ScriptedLlm:
            self.llm = ScriptedLlm(on_stats)
            return self.llm

        def feed() -> ScriptedFeed:
            self.feed = ScriptedFeed()
            return self.feed

        self.num_cleanings = 0
        self.engine = VllmEngine(start, feed, INFO, max_queued_requests=2, clean_up=self.clean_up, clock=lambda: self.now_s)
        self.rig = Rig(self.engine, Abilities())

    def clean_up(self) -> None:
        self.num_cleanings += 1

    def submit(self, num_prompt_tokens: int = 40, **sampling: Any) -> GenerationRequest:
        """A request, once it has reached vLLM."""
        request = self.rig.request(range(10, 10 + num_prompt_tokens), 20, **sampling)
        self.rig.submit(request)
        self.on_loop(self._reached, request)
        return request

    def on_loop(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call on the engine's loop, and wait."""

        async def work() -> Any:
            found = function(*arguments)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(work(), self.llm.loop).result(10)

    def step(self, outputs: Mapping[str, Any], *, num_running: int = 1) -> None:
        """What one step of vLLM does: its outputs are there at once, and then its statistics."""

        def work() -> None:
            for request_id, output in outputs.items():
                self.llm.queues[request_id].put_nowait(output)
            self.llm.on_stats(scheduler(num_running), None)

        self.on_loop(work)

    async def _reached(self, request: GenerationRequest) -> None:
        while request.request_id not in self.llm.queues:
            await asyncio.sleep(0)


def scheduler(num_running: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_running_reqs=num_running,
        kv_cache_usage=0.1,
        iteration_details=None,
        spec_decoding_stats=None,
        prefix_cache_stats=SimpleNamespace(queries=0, hits=0),
    )


def output(request: GenerationRequest, *token_ids: int, finish: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=request.request_id,
        outputs=[SimpleNamespace(token_ids=list(token_ids), finish_reason=finish, logprobs=None)],
        num_cached_tokens=0,
        metrics=None,
    )


def stored(num_tokens: int) -> BlockStored:
    hashes = [bytes([number]) for number in range(num_tokens // 16)]
    tokens = list(range(10, 10 + num_tokens // 16 * 16))
    return BlockStored(hashes, None, tokens, 16, "GPU", [[ROOT.hex()], *([None] * (len(hashes) - 1))], 0, "full_attention")


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.engine.shutdown()
    assert made.rig.faults == []


class TestRequests:
    def test_deltas_of_one_step_leave_together(self, bench: Bench) -> None:
        outputs = []
        bench.engine.start(outputs.append)
        one, other = bench.submit(), bench.submit()
        bench.step({one.request_id: output(one, 5), other.request_id: output(other, 6)}, num_running=2)
        bench.on_loop(asyncio.sleep, 0)
        with_deltas = [each for each in outputs if each.deltas]
        assert [[delta.token_ids for delta in each.deltas] for each in with_deltas] == [[(5,), (6,)]]
        assert with_deltas[0].stats.num_running == 2

    def test_an_abort_that_comes_before_the_request_began_still_ends_it(self, bench: Bench) -> None:
        request = bench.rig.request(range(10, 30), 20)
        release = threading.Event()
        bench.llm.loop.call_soon_threadsafe(release.wait)  # so that both are there when the loop goes on
        bench.rig.submit(request)
        bench.engine.abort(request.request_id, FinishReason.STOP)
        release.set()
        assert bench.rig.ended(request).finish_reason is FinishReason.STOP
        assert request.request_id not in bench.llm.queues

    def test_an_abort_after_the_last_output_changes_nothing(self, bench: Bench) -> None:
        request = bench.submit()
        bench.step({request.request_id: output(request, 5, finish="length")})
        bench.engine.abort(request.request_id)
        assert bench.rig.ended(request).finish_reason is FinishReason.LENGTH
        bench.on_loop(asyncio.sleep, 0.01)
        assert bench.llm.aborted == []

    @pytest.mark.parametrize(("names", "expected"), [(("VLLMClientError",), RequestError), (("Whatever",), None)])
    def test_what_vllm_raises_ends_the_request_alone(self, bench: Bench, names: tuple[str], expected: type | None) -> None:
        bad, good = bench.submit(), bench.submit()
        error = type(names[0], (Exception,), {})("min_p is not supported")
        bench.step({bad.request_id: error, good.request_id: output(good, 5, finish="length")})
        info = bench.rig.ended(bad).deltas[-1].error
        assert info is not None
        assert info.name == (expected.__name__ if expected else "EngineError")
        assert bench.rig.ended(good).finish_reason is FinishReason.LENGTH

    def test_a_generator_that_just_ends_is_an_abort(self, bench: Bench) -> None:
        request = bench.submit()
        bench.step({request.request_id: None})
        assert bench.rig.ended(request).finish_reason is FinishReason.ABORT

    def test_the_queue_has_an_end(self, bench: Bench) -> None:
        for _ in range(2):
            bench.submit()
        with pytest.raises(OverloadedError) as caught:
            bench.submit()
        assert caught.value.retry_after_s >= 1.0


class TestCache:
    def test_events_become_names_and_tell_what_is_pending(self, bench: Bench) -> None:
        bench.on_loop(bench.feed.batches.put_nowait, [stored(48)])
        bench.rig.until(lambda: bench.rig.held == set(hash_blocks(ROOT, range(10, 58))), "no events")
        bench.submit(60)
        bench.step({})
        bench.rig.until(lambda: bench.engine.stats().num_pending_tokens == 12, "cached tokens count as pending")

    def test_a_clear_is_asked_for_until_nothing_runs(self, bench: Bench) -> None:
        bench.on_loop(bench.feed.batches.put_nowait, [stored(48)])
        bench.rig.until(lambda: bench.rig.held, "no events")
        bench.llm.clears = iter((False,))
        bench.engine.clear_cache()
        bench.rig.until(lambda: not bench.rig.held, "not cleared")
        assert bench.llm.num_clears == 2

    def test_lost_events_empty_both_caches(self, bench: Bench) -> None:
        bench.on_loop(bench.feed.batches.put_nowait, [stored(48)])
        bench.rig.until(lambda: bench.rig.held, "no events")
        bench.on_loop(bench.feed.batches.put_nowait, None)
        bench.rig.until(lambda: not bench.rig.held, "not cleared")
        bench.on_loop(asyncio.sleep, 0.01)
        assert bench.llm.num_clears == 1
        bench.on_loop(bench.feed.batches.put_nowait, [AllBlocksCleared(), stored(16)])
        bench.rig.until(lambda: bench.rig.held == set(hash_blocks(ROOT, range(10, 26))), "no events after a loss")


class TestLife:
    def test_a_dead_core_ends_everything_and_takes_nothing_more(self, bench: Bench) -> None:
        request = bench.submit()
        bench.llm.is_dead = True
        info = bench.rig.ended(request).deltas[-1].error
        assert info is not None
        assert info.name == "ReplicaLostError"
        assert bench.engine.failure() is not None
        with pytest.raises(ReplicaLostError):
            bench.engine.submit(replace(request, request_id="another"))

    def test_a_request_that_meets_the_death_first_tells_of_it(self, bench: Bench) -> None:
        one, other = bench.submit(), bench.submit()
        bench.step({one.request_id: type("EngineDeadError", (Exception,), {})()})
        assert bench.rig.ended(other).finish_reason is FinishReason.ERROR
        assert bench.engine.failure() is not None

    def test_a_busy_engine_is_as_late_as_its_last_step(self, bench: Bench) -> None:
        request = bench.submit()
        bench.now_s += 7.0
        assert bench.engine.heartbeat_age_s() == 7.0
        bench.step({request.request_id: output(request, 5)})
        assert bench.engine.heartbeat_age_s() == 0.0

    def test_an_idle_engine_is_as_late_as_its_core_owes_an_answer(self, bench: Bench) -> None:
        bench.llm.answers_pings = False
        bench.rig.until(lambda: True, "")
        bench.on_loop(asyncio.sleep, 0.3)  # a ping is out
        bench.now_s += 7.0
        assert bench.engine.heartbeat_age_s() == pytest.approx(6.0)
        bench.llm.answers_pings = True

    def test_shutdown_ends_what_runs_and_can_be_asked_for_twice(self, bench: Bench) -> None:
        request = bench.submit()
        bench.engine.shutdown()
        bench.engine.shutdown()
        assert bench.rig.ended(request).finish_reason is FinishReason.ABORT
        assert (bench.llm.is_shut_down, bench.num_cleanings) == (True, 1)
        with pytest.raises(OverloadedError):
            bench.engine.submit(replace(request, request_id="another"))

    def test_a_vllm_that_does_not_start_is_cleaned_up_after(self) -> None:
        cleaned: list[bool] = []

        def start(_: Any) -> Any:
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            VllmEngine(start, None, INFO, max_queued_requests=2, clean_up=lambda: cleaned.append(True))
        assert cleaned == [True]

    def test_a_warm_up_leaves_no_trace(self, bench: Bench) -> None:
        request = bench.rig.request(range(10, 30), 4)

        async def serve_twice() -> None:
            for _ in range(2):
                while request.request_id not in bench.llm.queues:
                    await asyncio.sleep(0)
                bench.llm.queues.pop(request.request_id).put_nowait(output(request, 5, finish="length"))

        serving = asyncio.run_coroutine_threadsafe(serve_twice(), bench.llm.loop)
        bench.engine.warm_up([request])
        serving.result(10)
        assert bench.engine.stats().started_total == 0
        assert bench.llm.num_clears == 1
        bench.engine.start(bench.rig._take)
        bench.on_loop(bench.feed.batches.put_nowait, [stored(16)])  # older than the clear
        bench.on_loop(bench.feed.batches.put_nowait, [AllBlocksCleared(), stored(48)])
        bench.rig.until(lambda: len(bench.rig.held) == 3, "no events")  # the rig finds fault with any number but 1
