"""What our engine interface adds to vLLM's time to first token: the same requests to the same AsyncLLM, once straight and once
through VllmEngine, in turns, so that whatever else the machine does hits both alike."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from itertools import count
from typing import Any

from rich.progress import Progress
from vllm_parity import VLLM_CONFIG

from configs.load import load
from replicas.blocks import chain_root, hash_blocks
from replicas.build import build_engine
from replicas.contract import GenerationRequest, SamplingParams, StepOutput
from replicas.vllm_engine import VllmEngine
from replicas.vllm_support.sampling import sampling_arguments

NUM_PROMPT_TOKENS = 16  # so that computing them hides as little as can be
NUM_NEW_TOKENS = 2
NUM_ROUNDS = {1: 100, 16: 60}
_SECONDS_TO_MS = 1e3


def measure(progress: Progress) -> dict[str, Any]:
    """The figures `ttft_ms_*`, `added_ttft_ms_*` at each number of streams.

    What is added is the difference of a round's two means, straight and through us; P50, P90 and P99 are over rounds.
    """
    config = load(VLLM_CONFIG, ["replicas.num=1", f"engine.num_threads={os.cpu_count()}"])
    engine = build_engine(config, replicas_on_node=1)
    assert isinstance(engine, VllmEngine)
    figures: dict[str, Any] = {}
    try:
        bench = _Bench(engine)
        for num_streams, num_rounds in NUM_ROUNDS.items():
            straight_s, added_s = [], []
            rounds = progress.track(range(num_rounds), description=f"ttft: {num_streams} streams, straight and through us")
            for number in rounds:
                ways = (bench.straight, bench.through_us) if number % 2 else (bench.through_us, bench.straight)
                seconds = {way: statistics.mean(way(num_streams)) for way in ways}
                straight_s.append(seconds[bench.straight])
                added_s.append(seconds[bench.through_us] - seconds[bench.straight])
            for name, values in (("ttft_straight_ms", straight_s), ("added_ttft_ms", added_s)):
                percentiles = statistics.quantiles(values, n=100, method="inclusive")
                for percent in (50, 90, 99):
                    figures[f"{name}_{num_streams}_p{percent}"] = percentiles[percent - 1] * _SECONDS_TO_MS
    finally:
        engine.shutdown()
    return figures


class _Bench:
    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        # The engine's own, reached into: a second one would share neither the process nor its cache with it.
        self._llm, self._thread = engine._llm, engine._thread
        self._rng = random.Random(5)
        self._ids = count()
        self._root = chain_root(b"bench")
        self._first_s: dict[str, float] = {}
        self._unfinished: set[str] = set()
        self._changed = threading.Condition()
        engine.start(self._take)

    def straight(self, num_streams: int) -> list[float]:
        """Handed over one by one from this thread, as `submit` takes them: how they arrive decides what vLLM puts in a step."""
        futures = [
            self._thread.spawn(self._one_straight(request, time.perf_counter())) for request in self._requests(num_streams)
        ]
        return [future.result() for future in futures]

    def through_us(self, num_streams: int) -> list[float]:
        requests = self._requests(num_streams)
        sent_s = {}
        with self._changed:
            self._unfinished = {request.request_id for request in requests}
        for request in requests:
            sent_s[request.request_id] = time.perf_counter()
            self._engine.submit(request)
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)
        return [self._first_s.pop(request_id) - sent for request_id, sent in sent_s.items()]

    async def _one_straight(self, request: GenerationRequest, sent_s: float) -> float:
        first_s = 0.0
        async for _ in self._llm.generate(request, sampling_arguments(request, ())):
            first_s = first_s or time.perf_counter()
        return first_s - sent_s

    def _take(self, output: StepOutput) -> None:
        now_s = time.perf_counter()
        with self._changed:
            for delta in output.deltas:
                self._first_s.setdefault(delta.request_id, now_s)
                if delta.finish_reason is not None:
                    self._unfinished.discard(delta.request_id)
            self._changed.notify_all()

    def _requests(self, num_streams: int) -> list[GenerationRequest]:
        """Prompts that nothing is cached of, named as an ingress does it."""
        params = SamplingParams(NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)
        prompts = [tuple(self._rng.choices(range(3, 40_000), k=NUM_PROMPT_TOKENS)) for _ in range(num_streams)]
        size = self._engine.info.block_size
        return [
            GenerationRequest(f"b{next(self._ids)}", ids, params, self._root, hash_blocks(self._root, ids, size))
            for ids in prompts
        ]
