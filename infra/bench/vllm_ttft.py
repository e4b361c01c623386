"""What our engine interface adds to vLLM's time to first token: the same requests to the same AsyncLLM, once straight, as a
program would that knows vLLM alone, and once through VllmEngine; in turns, so that whatever else the machine does hits both."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from itertools import count
from typing import Any

from rich.progress import Progress
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm_parity import VLLM_CONFIG

from configs.load import load
from replicas.blocks import chain_root, hash_blocks
from replicas.build import build_engine
from replicas.contract import GenerationRequest, SamplingParams, StepOutput
from replicas.vllm_engine import VllmEngine

NUM_PROMPT_TOKENS = 16  # so that computing them hides as little as can be
NUM_NEW_TOKENS = 2
NUM_ROUNDS = {1: 100, 16: 60}
_SECONDS_TO_MS = 1e3


def measure(progress: Progress) -> dict[str, Any]:
    """The figures `ttft_straight_ms_*`, `ttft_through_us_ms_*` and `added_ttft_ms_*` at each number of streams.

    A value is the mean of a round's streams; what is added is the difference of the two rounds next to each other. P50, P90 and
    P99 are over rounds: of the differences they say how much such a pair scatters, so what we add is their P50.
    `added_ttft_share_*` is that P50 by the P50 of straight calls.
    """
    config = load(VLLM_CONFIG, ["replicas.num=1", f"engine.num_threads={os.cpu_count()}"])
    engine = build_engine(config, replicas_on_node=1)
    assert isinstance(engine, VllmEngine)
    figures: dict[str, Any] = {}
    try:
        bench = _Bench(engine)
        for num_streams, num_rounds in NUM_ROUNDS.items():
            straight_s, through_us_s = [], []
            both = ((bench.straight, straight_s), (bench.through_us, through_us_s))
            rounds = progress.track(range(num_rounds), description=f"ttft: {num_streams} streams, straight and through us")
            for number in rounds:
                for way, seconds in both if number % 2 else reversed(both):
                    seconds.append(statistics.mean(way(num_streams)))
            added_s = [ours - theirs for ours, theirs in zip(through_us_s, straight_s, strict=True)]
            for name, values in (("ttft_straight", straight_s), ("ttft_through_us", through_us_s), ("added_ttft", added_s)):
                percentiles = statistics.quantiles(values, n=100, method="inclusive")
                for percent in (50, 90, 99):
                    figures[f"{name}_ms_{num_streams}_p{percent}"] = percentiles[percent - 1] * _SECONDS_TO_MS
            figures[f"added_ttft_share_{num_streams}"] = statistics.median(added_s) / statistics.median(straight_s)
    finally:
        engine.shutdown()
    return figures


class _Bench:
    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        # The engine's own, reached into: a second one would share neither the process nor its cache with it.
        self._llm, self._thread = engine._llm._llm, engine._thread
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
        sampling = VllmSamplingParams(
            max_tokens=NUM_NEW_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": list(request.prompt_token_ids), "cache_salt": request.hash_root.hex()}
        async for _ in self._llm.generate(prompt, sampling, request.request_id):
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
