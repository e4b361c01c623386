"""vLLM behind our interface, on a CPU: how exactly its cache is known, what it answers, what the interface costs.

    make bench-vllm [ARGS="--only fleet,parity,ttft --block-size 32 --data DIR"]

    fleet      two vLLM replicas, 8 tenants with prefixes of 600 tokens, 200 requests over HTTP: predicted matched tokens beside
               vLLM's own count, cached tokens against what one endless cache would give; then other prompts push all that out
               of both caches, and the same again (*_after_evictions); then on replicas that can't hold their tenants' prefixes,
               so that requests evict what later ones would have used (*_evicting)
    parity     greedy answers of vLLM, our engine and transformers in fp32 and bf16, how sure the model was where they part, and
               how far each one's log-probabilities are from fp32's
    ttft       time to first token through our interface against calling the same AsyncLLM directly, at 1 and at 16 streams

Progress goes to standard error; the last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, installed or not

from command_line import Figures, parser, run, shown
from prompt_sets import filler
from rich.progress import Progress
from serving_app import ROOT, serving_app
from sse_client import Answer, Client
from two_replicas import cache_and_load, in_order

from configs.load import load

PARTS = ("fleet", "parity", "ttft")
CONFIG = ROOT / "configs" / "vllm-cpu.yaml"
DEFAULT_BLOCK_SIZE = 32
BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2  # of the embedded model's KV cache in bf16
# Of each replica: enough for half of the tenants' prefixes and all answers, and soon overwritten.
CACHE_TOKENS = 8192
# Of each replica, which gets four of the eight tenants: three prefixes, and no less than one sequence may need (max_model_len).
SMALL_CACHE_TOKENS = 2048
NUM_FOREIGN_PROMPTS = 36
NUM_FOREIGN_WORDS = 900
NUM_FOREIGN_IN_FLIGHT = 4


def arguments() -> argparse.Namespace:
    options = parser("Measure vLLM replicas; see the head of this file.", PARTS)
    options.add_argument("--block-size", type=int, default=DEFAULT_BLOCK_SIZE, help="of the KV cache; a multiple of 32")
    return options.parse_args()


async def fleet(block_size: int, progress: Progress) -> Figures:
    figures: Figures = {"block_size": block_size}
    async with two_replicas_of_vllm(block_size, CACHE_TOKENS, progress) as client:
        figures |= shown(await cache_and_load(client, progress, block_size))
        await evict(client, progress)
        figures |= shown(named("after_evictions", await cache_and_load(client, progress, block_size)))
    async with two_replicas_of_vllm(block_size, SMALL_CACHE_TOKENS, progress) as client:
        figures |= shown(named("evicting", await cache_and_load(client, progress, block_size)))
    return figures


@asynccontextmanager
async def two_replicas_of_vllm(block_size: int, num_cache_tokens: int, progress: Progress) -> AsyncIterator[Client]:
    cache_bytes = (num_cache_tokens + block_size) * BYTES_PER_TOKEN  # vLLM keeps a block for itself
    options = ("model.dtype=bf16", f"engine.kv_cache_bytes={cache_bytes}", f"engine.vllm.block_size={block_size}")
    task = progress.add_task("starting two vLLM replicas", total=None)
    with serving_app(*options, "ingress.expose_routing=true", config=CONFIG) as app:
        progress.remove_task(task)
        async with Client(app.url, load(CONFIG).model.served_name) as client:
            yield client


def named(suffix: str, figures: Figures) -> Figures:
    return {f"{name}_{suffix}": value for name, value in figures.items()}


async def evict(client: Client, progress: Progress) -> None:
    """Send more tokens than both caches hold, which nobody will ask for again."""
    rng = random.Random(9)
    task = progress.add_task("fleet: other prompts fill the caches", total=NUM_FOREIGN_PROMPTS)

    async def ask(messages: list[dict[str, str]]) -> Answer:
        answer = await client.complete(messages[0]["content"], max_tokens=1)
        progress.advance(task)
        return answer.require_complete()

    prompts = [filler(rng, NUM_FOREIGN_WORDS) for _ in range(NUM_FOREIGN_PROMPTS)]
    await in_order(NUM_FOREIGN_IN_FLIGHT, [[{"content": prompt}] for prompt in prompts], ask)


def measure(chosen: Sequence[str], prompts: Sequence[str], block_size: int, progress: Progress) -> Figures:
    figures: Figures = {"num_cpus": os.cpu_count()}
    if "fleet" in chosen:
        figures |= asyncio.run(fleet(block_size, progress))
    if "parity" in chosen:
        import vllm_parity  # late: transformers takes seconds to import

        figures |= shown(vllm_parity.measure(prompts, progress))
    if "ttft" in chosen:
        import vllm_ttft

        figures |= shown(vllm_ttft.measure(progress))
    return figures


def main() -> int:
    options = arguments()
    return run(options.data, lambda prompts, progress: measure(options.only, prompts, options.block_size, progress))


if __name__ == "__main__":
    # vLLM's core is spawned, and would run this file again.
    sys.exit(main())
