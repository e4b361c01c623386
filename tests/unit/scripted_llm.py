"""VllmEngine over a vLLM whose outputs, statistics, KV events, answers and death are a test's to decide."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import repeat
from types import SimpleNamespace
from typing import Any

from replicas.contract import EngineInfo, GenerationRequest
from replicas.vllm_engine import VllmEngine
from replicas.vllm_support.kv_events import BlockStored
from tests.conformance.rig import ROOT, Abilities, Rig

INFO = EngineInfo("m", "1", 1000, 512, 16, 64, (2,), 128, 8)


class ScriptedLlm:
    """Its outputs are what the test puts into a request's queue; None ends it without a last one."""

    def __init__(self, on_stats: Callable[[Any, Any], None]) -> None:
        self.on_stats = on_stats
        self.loop = asyncio.get_running_loop()
        self.queues: dict[str, asyncio.Queue[Any]] = {}
        self.lingers = _gate()  # open: a generator ends with its last output
        self.aborted: list[str] = []
        self.is_dead = False
        self.clears = repeat(True)  # answers to clear_cache
        self.num_clears = 0
        self.answers_pings = _gate()
        self.num_pings = 0
        self.num_tasks_left: int | None = None  # when it was shut down, beside the thread's own and the one that does it

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
                    await self.lingers.wait()
                    return
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request.request_id)
            raise

    async def clear_cache(self) -> bool:
        self.num_clears += 1
        return next(self.clears)

    async def ping(self) -> None:
        self.num_pings += 1
        await self.answers_pings.wait()

    def shutdown(self) -> None:
        self.num_tasks_left = len(asyncio.all_tasks(self.loop)) - 2


class ScriptedFeed:
    """Batches of events; None where some were lost."""

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
    """The engine, what it hands out (`rig`), and hands on what is behind it."""

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
        self.until(lambda: request.request_id in self.llm.queues)
        return request

    def publish(self, *batches: Sequence[Any] | None) -> None:
        for batch in batches:
            self.on_loop(self.feed.batches.put_nowait, batch)
        self.until(self.feed.batches.empty)

    def on_loop(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call on the engine's loop, and wait."""

        async def work() -> Any:
            found = function(*arguments)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(work(), self.llm.loop).result(10)

    def until(self, condition: Callable[[], bool]) -> None:
        """Let the engine's loop run until then."""

        async def work() -> None:
            async with asyncio.timeout(10):
                while not condition():
                    await asyncio.sleep(0)

        self.on_loop(work)

    def hold_pings(self) -> None:
        """None is answered any more, and one is out."""

        async def work() -> None:
            self.llm.answers_pings.clear()
            num_answered = self.llm.num_pings
            while self.llm.num_pings == num_answered:
                await asyncio.sleep(0)

        self.on_loop(work)

    def step(self, outputs: Mapping[str, Any], *, num_running: int = 1) -> None:
        """What one step of vLLM does: its outputs are there at once, and then its statistics."""

        def work() -> None:
            for request_id, each in outputs.items():
                self.llm.queues[request_id].put_nowait(each)
            self.llm.on_stats(_scheduler(num_running), None)

        self.on_loop(work)


def output(request: GenerationRequest, *token_ids: int, finish: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=request.request_id,
        outputs=[SimpleNamespace(token_ids=list(token_ids), finish_reason=finish, logprobs=None)],
        num_cached_tokens=0,
        metrics=None,
    )


def stored(num_tokens: int) -> BlockStored:
    """The blocks of such a prompt of `Bench.submit`'s."""
    hashes = [bytes([number]) for number in range(num_tokens // 16)]
    keys = [[ROOT.hex()], *([None] * (len(hashes) - 1))]
    tokens = list(range(10, 10 + 16 * len(hashes)))
    return BlockStored(hashes, None, tokens, 16, medium="GPU", extra_keys=keys, group_idx=0)


def _scheduler(num_running: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_running_reqs=num_running,
        kv_cache_usage=0.1,
        iteration_details=None,
        spec_decoding_stats=None,
        prefix_cache_stats=SimpleNamespace(queries=0, hits=0),
    )


def _gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate
