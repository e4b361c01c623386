"""What a routing decision costs: CPU time of hashing, matching and deciding, and the memory of the index.

    python infra/bench/bench_router.py

CPU time of this process, least of 20 rounds (the least is what the code costs; the rest is the machine). `calibration_us` is
the same measure of a fixed loop: compare figures of two machines by their ratio to it. The last line is one JSON object.
State: each of 64 replicas holds 15 000 blocks and has 4 requests under way; of the 750 blocks of the prompt (12 000 tokens) 8
replicas hold different parts; telemetry came from a quarter of the replicas since the last decision. `decide_us` is a
decision then, `decide_shared_us` one where all prompts begin with the same 20 blocks, which all replicas hold;
`decide_all_reported_us` and `decide_none_reported_us` are the latter with telemetry from all or none in between.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, installed or not

from replicas.blocks import BLOCK_SIZE, chain_root, hash_blocks
from replicas.contract import EngineStats, KVEvents, StepTimeCoefficients
from router.core import Router
from router.fleet import ReplicaFacts
from router.policy import Question, Tuning
from router.trie import BYTES_PER_ENTRY, BlockTrie

NUM_REPLICAS = 64
NUM_BLOCKS_EACH = 15_000
NUM_PROMPT_BLOCKS = 750
NUM_SHARED_BLOCKS = 20
NUM_LEASES_EACH = 4
NUM_ROUNDS = 20
ROOT = chain_root(b"bench")
FACTS = ReplicaFacts(max_num_batched_tokens=2048, max_num_seqs=64)
STEP_TIME = StepTimeCoefficients(base_s=0.008, per_token_s=0.00002, per_context_s=1e-8, per_sequence_s=0.0001, num_samples=9)
NAMES = [f"replica{i:02}" for i in range(NUM_REPLICAS)]


def least_us(work: Callable[[], object], num_calls: int, before: Callable[[], object] | None = None) -> float:
    """CPU microseconds of one call of `work`, least of all rounds; `before` each call, not counted."""
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        total = 0
        for _ in range(num_calls):
            if before is not None:
                before()
            started = time.thread_time_ns()
            work()
            total += time.thread_time_ns() - started
        best = min(best, total / num_calls / 1000)
    return best


def calibration() -> int:
    total = 0
    for i in range(10_000):
        total += i * i & 0xFF
    return total


def filler(name: str, length: int) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(length))


def prompt(tail: int, num_shared_blocks: int) -> tuple[bytes, ...]:
    """All prompts share their first blocks; those with the same `tail` all of them."""
    num_own_tokens = (NUM_PROMPT_BLOCKS - num_shared_blocks) * BLOCK_SIZE
    return hash_blocks(ROOT, [7] * (num_shared_blocks * BLOCK_SIZE) + [1000 + tail] * num_own_tokens)


def busy_router(num_shared_blocks: int) -> Router:
    asked = prompt(0, num_shared_blocks)
    router = Router(Tuning(), trie_max_bytes=2**30, stale_after_s=5.0, lease_s=120.0)
    for i, name in enumerate(NAMES):
        depth = 90 * (i // 8 + 1) if i % 8 == 0 else num_shared_blocks
        router.join(name, FACTS)
        router.snapshot(name, 0, asked[:depth] + filler(name, NUM_BLOCKS_EACH - depth))
    report(router, NAMES, 0.0)
    for i in range(NUM_REPLICAS * NUM_LEASES_EACH):
        other = Question(NUM_PROMPT_BLOCKS * BLOCK_SIZE, prompt(i + 1, num_shared_blocks))
        router.commit(router.route(other, NAMES, 1.0), other, 1.0, replica=NAMES[i % NUM_REPLICAS])
    return router


def report(router: Router, names: Sequence[str], now: float) -> None:
    for i, name in enumerate(names):
        router.report(name, EngineStats(num_running=8, num_pending_tokens=100 * i, step_time=STEP_TIME), now)


def decision_costs() -> dict[str, float]:
    def decide(router: Router, hashes: tuple[bytes, ...], num_reporting: int) -> float:
        question = Question(NUM_PROMPT_BLOCKS * BLOCK_SIZE, hashes)
        reporting = NAMES[:num_reporting]
        return least_us(lambda: router.route(question, NAMES, 2.0), 50, lambda: report(router, reporting, 2.0))

    def send() -> None:
        question = Question(NUM_PROMPT_BLOCKS * BLOCK_SIZE, asked)
        router.commit(router.route(question, NAMES, 2.0), question, 2.0).release()

    router = busy_router(0)
    asked = prompt(0, 0)
    figures = {
        "decide_us": decide(router, asked, NUM_REPLICAS // 4),
        "decide_cold_us": decide(router, filler("cold", NUM_PROMPT_BLOCKS), NUM_REPLICAS // 4),
        "decide_commit_release_us": least_us(send, 50),
        "match_us": least_us(lambda: router.trie.match(asked), 50),
        "match_linear_us": least_us(lambda: router.trie.match_linear(asked), 5),
        "report_us": least_us(lambda: report(router, NAMES, 2.0), 10) / NUM_REPLICAS,
    }
    router = busy_router(NUM_SHARED_BLOCKS)
    asked = prompt(0, NUM_SHARED_BLOCKS)
    return figures | {
        "decide_shared_us": decide(router, asked, NUM_REPLICAS // 4),
        "decide_all_reported_us": decide(router, asked, NUM_REPLICAS),
        "decide_none_reported_us": decide(router, asked, 0),
    }


def event_cost_us_per_block() -> float:
    """Storing and removing a step's 128 blocks, per block and change."""
    trie = BlockTrie(2**30)
    trie.replace("a", filler("a", NUM_BLOCKS_EACH))
    names = filler("event", 128)

    def step() -> None:
        trie.apply("a", KVEvents(1, stored=names))
        trie.apply("a", KVEvents(2, removed=names))

    return least_us(step, 20) / (2 * len(names))


def hash_cost_us_per_block() -> float:
    token_ids = tuple(range(1000, 1000 + NUM_PROMPT_BLOCKS * BLOCK_SIZE))
    return least_us(lambda: hash_blocks(ROOT, token_ids), 5) / NUM_PROMPT_BLOCKS


def trie_mb_per_million_blocks() -> float:
    """MB (10**6 bytes) per million (replica, block) pairs, names included; each pair's name is an object of its own, as off
    the wire. The blocks arrive in events of 64, one round for all replicas after the other."""
    tracemalloc.start()
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    trie = BlockTrie(10**9)
    rounds = 200_000 // (16 * 64)
    for step in range(1, rounds + 1):
        for name in NAMES[:16]:
            trie.apply(name, KVEvents(step, stored=filler(f"{name}/{step}", 64)))
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / trie.num_entries


def main() -> None:
    figures = {
        "calibration_us": least_us(calibration, 5),
        "hash_us_per_block": hash_cost_us_per_block(),
        **decision_costs(),
        "event_us_per_block": event_cost_us_per_block(),
        "trie_mb_per_million_blocks": trie_mb_per_million_blocks(),
        "trie_mb_per_million_blocks_bound": BYTES_PER_ENTRY,
        "num_replicas": NUM_REPLICAS,
        "num_prompt_blocks": NUM_PROMPT_BLOCKS,
    }
    for name, value in figures.items():
        print(f"{name:35} {value:10.3f}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
