"""What one replica does for its clients: reuse of prefixes, many streams at once, and streams beside a long prompt."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from prompt_sets import OWN_PROMPTS, filler
from rich.progress import Progress
from sse_client import Answer, Client

NUM_STREAMS = 16
NUM_STREAM_TOKENS = 128
NUM_PREFIXES = 5
NUM_PREFIX_TOKENS = 1000
NUM_SUFFIX_TOKENS = 16
NUM_GAP_STREAMS = 4
NUM_GAP_REPEATS = 3
NUM_LONG_TOKENS = 4000

# More than a stream can get while the long prompt is computed: it is cancelled long before.
_MAX_GAP_TOKENS = 1000
_NUM_STEADY_EVENTS = 4
_POLL_S = 0.005


async def prompt_of(client: Client, rng: random.Random, num_tokens: int) -> list[int]:
    """Token ids of filler text, exactly so many."""
    token_ids = await client.tokenize(filler(rng, 2 * num_tokens))
    assert len(token_ids) >= num_tokens, "a word has at least one token"
    return token_ids[:num_tokens]


async def prefix_reuse(client: Client, progress: Progress) -> dict[str, Any]:
    """Time to first token of a prompt whose first NUM_PREFIX_TOKENS tokens were seen before, against one seen never."""
    rng = random.Random(1)
    await client.complete(await prompt_of(client, rng, NUM_SUFFIX_TOKENS), max_tokens=4)  # the first request of all warms up
    cold_s: list[float] = []
    warm_s: list[float] = []
    for _ in progress.track(range(NUM_PREFIXES), description="serving: cold and warm prefixes"):
        prefix = await prompt_of(client, rng, NUM_PREFIX_TOKENS)
        for times_s in (cold_s, warm_s):
            prompt = prefix + await prompt_of(client, rng, NUM_SUFFIX_TOKENS)
            # Log-probabilities make an event of every token, of one without text as well.
            answer = (await client.complete(prompt, max_tokens=2, logprobs=0)).require_complete()
            times_s.append(answer.ttft_s)
    cold, warm = statistics.median(cold_s), statistics.median(warm_s)
    return {"prefix_ttft_ratio": warm / cold, "prefix_ttft_cold_s": cold, "prefix_ttft_warm_s": warm}


async def sequential_tokens_per_s(client: Client, prompts: Sequence[str], progress: Progress, what: str) -> float:
    """Output tokens a second, prompts included in the time, of one stream after another."""
    await client.complete("Warm up, please.", max_tokens=8)
    num_tokens, started_s = 0, time.perf_counter()
    for prompt in progress.track(prompts, description=f"{what}: one stream after another"):
        num_tokens += (await client.complete(prompt, max_tokens=NUM_STREAM_TOKENS)).require_complete().num_output_tokens
    return num_tokens / (time.perf_counter() - started_s)


async def concurrent_tokens_per_s(client: Client, prompts: Sequence[str], progress: Progress) -> float:
    task = progress.add_task(f"serving: {len(prompts)} streams at once", total=len(prompts))

    async def one(prompt: str) -> int:
        answer = await client.complete(prompt, max_tokens=NUM_STREAM_TOKENS)
        progress.advance(task)
        return answer.require_complete().num_output_tokens

    started_s = time.perf_counter()
    num_tokens = sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))
    return num_tokens / (time.perf_counter() - started_s)


def stream_prompts() -> tuple[Sequence[str], Sequence[str]]:
    """Two lots of NUM_STREAMS short prompts, all different."""
    short = sorted(OWN_PROMPTS, key=len)
    return short[0 : 2 * NUM_STREAMS : 2], short[1 : 2 * NUM_STREAMS : 2]


async def throughput(client: Client, progress: Progress) -> dict[str, Any]:
    first, second = stream_prompts()
    single = await sequential_tokens_per_s(client, first, progress, "serving")
    together = await concurrent_tokens_per_s(client, second, progress)
    return {
        "single_stream_tokens_per_s": single,
        "concurrent_tokens_per_s": together,
        "concurrency_speedup": together / single,
    }


async def gap_beside_long_prompts(client: Client, progress: Progress, what: str) -> float:
    """Median over NUM_GAP_REPEATS long prompts of the longest gap each makes in the streams beside it; seconds."""
    rng = random.Random(2)
    gaps_s = []
    for _ in progress.track(range(NUM_GAP_REPEATS), description=f"serving: long prompts {what}"):
        gaps_s.append(await _longest_gap_s(client, await prompt_of(client, rng, NUM_LONG_TOKENS)))
    return statistics.median(gaps_s)


async def _longest_gap_s(client: Client, long_prompt: list[int]) -> float:
    """Between two tokens of any of NUM_GAP_STREAMS streams, of gaps that overlap the time from sending `long_prompt` to its
    first token."""
    streams = [Answer() for _ in range(NUM_GAP_STREAMS)]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(client.complete(prompt, max_tokens=_MAX_GAP_TOKENS, logprobs=0, answer=answer))
            for prompt, answer in zip(OWN_PROMPTS, streams, strict=False)
        ]
        await _until(lambda: all(len(stream.event_times_s) >= _NUM_STEADY_EVENTS for stream in streams), streams)
        long = (await client.complete(long_prompt, max_tokens=1, logprobs=0)).require_complete()
        # Each stream's gap that was open at the first token must have closed.
        until_s = long.event_times_s[0]
        await _until(lambda: all(stream.event_times_s[-1] > until_s for stream in streams), streams)
        for task in tasks:
            task.cancel()
    return max(
        after - before
        for stream in streams
        for before, after in itertools.pairwise(stream.event_times_s)
        if after > long.sent_s and before < until_s
    )


async def _until(condition: Callable[[], bool], streams: Sequence[Answer]) -> None:
    """Raises RuntimeError if one of `streams` ends first."""
    while not condition():
        for stream in streams:
            if stream.ended_s:
                stream.require_complete()
                raise RuntimeError("a stream ended before it was measured")
        await asyncio.sleep(_POLL_S)
