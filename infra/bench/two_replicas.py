"""What the router makes of a fleet: how much of what could be cached is, how evenly the load lies, what a crash costs."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import statistics
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import psutil
from prompt_sets import OWN_PROMPTS, filler
from rich.progress import Progress
from serving_app import ServingApp
from sse_client import Answer, Client

from replicas.blocks import BLOCK_SIZE, chain_root, hash_blocks

NUM_REPLICAS = 2
NUM_TENANTS = 8
NUM_SYSTEM_TOKENS = 600
NUM_FLEET_REQUESTS = 200
NUM_FLEET_IN_FLIGHT = 8
NUM_FLEET_TOKENS = 16
NUM_QUESTION_WORDS = 12

NUM_KILL_REQUESTS = 100
NUM_KILL_IN_FLIGHT = 4
NUM_KILL_TOKENS = 8
MIN_STREAMS_EACH = 2  # on every replica before one is killed
MAX_KILL_STREAMS = 16
NUM_KILL_STREAM_TOKENS = 400

_ENGINE_PROCESS = ("ServeReplica", "engine")  # in the title that Ray gives the process
_POLL_S = 0.01

Messages = list[dict[str, str]]


async def in_order(
    num_in_flight: int, requests: Sequence[Messages], ask: Callable[[Messages], Awaitable[Answer]]
) -> list[Answer]:
    """Send `requests` one after the other, at most so many under way; the answers in the same order."""
    waiting: Iterator[tuple[int, Messages]] = iter(enumerate(requests))
    answers: dict[int, Answer] = {}

    async def worker() -> None:
        for index, messages in waiting:
            answers[index] = await ask(messages)

    await asyncio.gather(*(worker() for _ in range(num_in_flight)))
    return [answer for _, answer in sorted(answers.items())]


# ---- caches and load ----


async def cache_and_load(client: Client, progress: Progress, block_size: int = BLOCK_SIZE) -> dict[str, Any]:
    """`block_size` is the engines'."""
    requests = await _tenants_requests(client, random.Random(3))
    task = progress.add_task(f"fleet: {NUM_TENANTS} tenants, {NUM_FLEET_IN_FLIGHT} requests in flight", total=len(requests))

    async def ask(messages: Messages) -> Answer:
        answer = await client.chat(messages, max_tokens=NUM_FLEET_TOKENS)
        progress.advance(task)
        return answer.require_complete()

    prompts = [await client.tokenize(messages) for messages in requests]
    answers = await in_order(NUM_FLEET_IN_FLIGHT, requests, ask)
    if [len(prompt) for prompt in prompts] != [answer.num_prompt_tokens for answer in answers]:
        raise RuntimeError("/tokenize counts other prompt tokens than the answers' usage")
    num_cached = [answer.num_cached_tokens for answer in answers]
    # A request that Serve routed without our policy has no such header: no match was foretold, so none was exact.
    matched = [answer.headers.get("x-trieserve-matched-tokens") for answer in answers]
    load = Counter[str]()
    for answer in answers:
        load[answer.headers["x-trieserve-replica"]] += answer.num_prompt_tokens + answer.num_output_tokens
    percentiles = statistics.quantiles((answer.ttft_s for answer in answers), n=100, method="inclusive")
    return {
        "cache_share_of_bound": sum(num_cached) / cacheable_tokens(prompts, block_size),
        "load_max_over_mean": max(load.values()) * NUM_REPLICAS / load.total(),
        "match_exact_share": sum(a == str(b) for a, b in zip(matched, num_cached, strict=True)) / len(answers),
        **{f"fleet_ttft_p{percent}_s": percentiles[percent - 1] for percent in (50, 90, 99)},
    }


async def _tenants_requests(client: Client, rng: random.Random) -> list[Messages]:
    """Every tenant's question after its system prompt of about NUM_SYSTEM_TOKENS tokens, in a random order."""
    system_prompts = []
    for tenant in range(NUM_TENANTS):
        words = f"You work for tenant {tenant}. {filler(rng, NUM_SYSTEM_TOKENS)}".split(" ")
        # A little more than a token a word.
        share = NUM_SYSTEM_TOKENS / len(await client.tokenize(" ".join(words)))
        system_prompts.append(" ".join(words[: round(len(words) * share)]))
    requests = [
        [
            {"role": "system", "content": system_prompts[index % NUM_TENANTS]},
            {"role": "user", "content": f"{filler(rng, NUM_QUESTION_WORDS)}?"},
        ]
        for index in range(NUM_FLEET_REQUESTS)
    ]
    rng.shuffle(requests)
    return requests


def cacheable_tokens(prompts: Sequence[Sequence[int]], block_size: int) -> int:
    """Prompt tokens that one cache without limits would serve: in whole blocks, of what earlier prompts began with. A prompt's
    last token is always computed, because its logits are needed."""
    root, seen, num_tokens = chain_root(b"bench"), set[bytes](), 0
    for prompt in prompts:
        known = itertools.takewhile(seen.__contains__, hash_blocks(root, prompt[:-1], block_size))
        num_tokens += sum(block_size for _ in known)
        seen.update(hash_blocks(root, prompt, block_size))
    return num_tokens


# ---- a crash ----


async def kill_one(client: Client, app: ServingApp, progress: Progress) -> dict[str, Any]:
    """Kill a replica under its streams, then go on asking."""
    streams: list[Answer] = []
    async with asyncio.TaskGroup() as group:
        await _start_streams(client, streams, group)
        victim = engine_processes(app)[0]
        victim.send_signal(signal.SIGKILL)
        task = progress.add_task(f"kill: after a replica was killed, {NUM_KILL_IN_FLIGHT} in flight", total=NUM_KILL_REQUESTS)

        async def ask(messages: Messages) -> Answer:
            answer = await client.chat(messages, max_tokens=NUM_KILL_TOKENS)
            progress.advance(task)
            return answer

        questions = itertools.islice(itertools.cycle(OWN_PROMPTS), NUM_KILL_REQUESTS)
        requests = [[{"role": "user", "content": question}] for question in questions]
        answers = await in_order(NUM_KILL_IN_FLIGHT, requests, ask)
    for answer in answers:
        if not answer.complete:
            progress.console.log(f"failed after the kill: status {answer.status}, {answer.error}")
    return {"failed_after_kill": sum(not answer.complete for answer in answers), **_fate_of_streams(streams)}


def engine_processes(app: ServingApp) -> list[psutil.Process]:
    """Those of `app`'s replicas, among its own descendants only. Raises RuntimeError if they aren't NUM_REPLICAS."""
    descendants = psutil.Process(app.pid).children(recursive=True)
    found = [process for process in descendants if all(part in " ".join(process.cmdline()) for part in _ENGINE_PROCESS)]
    if len(found) != NUM_REPLICAS:
        raise RuntimeError(f"found {len(found)} replica processes instead of {NUM_REPLICAS}: {found}")
    return found


async def _start_streams(client: Client, streams: list[Answer], group: asyncio.TaskGroup) -> None:
    """Until each replica is in the midst of MIN_STREAMS_EACH answers, so that any of them may be killed.

    Not chats: the template's own beginning is a prefix that they share, and the router would bring them together.
    """
    for prompt in OWN_PROMPTS[:MAX_KILL_STREAMS]:
        answer = Answer()
        streams.append(answer)
        group.create_task(client.complete(prompt, max_tokens=NUM_KILL_STREAM_TOKENS, answer=answer))
        while len(answer.event_times_s) < 2:
            if answer.ended_s:
                answer.require_complete()
            await asyncio.sleep(_POLL_S)
        num_streams = Counter(stream.headers["x-trieserve-replica"] for stream in streams if not stream.ended_s)
        if len(num_streams) == NUM_REPLICAS and min(num_streams.values()) >= MIN_STREAMS_EACH:
            return
    raise RuntimeError(f"{MAX_KILL_STREAMS} streams didn't reach every replica twice: {num_streams}")


def _fate_of_streams(streams: Sequence[Answer]) -> dict[str, Any]:
    """The killed replica is the one whose streams broke: which process has which name, no header says."""
    by_replica = defaultdict(list)
    for stream in streams:
        by_replica[stream.headers["x-trieserve-replica"]].append(stream)
    [killed, *others] = sorted(by_replica.values(), key=lambda own: sum(stream.complete for stream in own) / len(own))
    return {
        "killed_streams": len(killed),
        "killed_streams_clean_ends": sum(not _ended_with_error(stream) for stream in killed),
        "other_streams_broken": sum(not stream.complete for own in others for stream in own),
    }


def _ended_with_error(stream: Answer) -> bool:
    """As a client can tell it from a complete answer: an error event, then [DONE], and no finish_reason."""
    return stream.error is not None and stream.done and stream.finish_reason is None
