"""What the way of tokens from engine to client costs: our token socket behind HAProxy, against Ray Serve's streaming calls.

    python infra/bench/bench_datapath.py

Two replicas of the fake engine, two ingresses, 32 streams of /v1/completions, each token an event of its own on every path:

    (no prefix)     engine -> token socket -> ingress -> HAProxy          ingress.data_path=socket ingress.haproxy=true
    no_haproxy_     engine -> token socket -> ingress -> Serve's proxy    ingress.data_path=socket ingress.haproxy=false
    classic_        engine -> Serve's stream -> ingress -> Serve's proxy, a message for each token, as Serve's calls are
                    commonly used (classic_app.py): the baseline of speedup_over_classic and steady_cpu_ratio
    merged_         the same with our fallback's own cure: the tokens that wait for Serve are merged into one message
                    (ingress.data_path=classic ingress.haproxy=false); speedup_over_merged_classic

tokens_per_s               all streams together, the engines as fast as they can: the engines' own CPU time is in it
burst_ttft_p*_ms           to the first event in these bursts, all streams asked for at once
burst_cpu_us_per_token     CPU time of all processes of the server in these bursts, engines included
client_cpu_share           of one CPU, what the client used of it in these bursts
added_ttft_*_ms            to the first event of a one-token answer, one request at a time, the engine's step taking no time
steady_cpu_us_per_token    CPU time of all processes of the server, less what they use idle, at 50 tokens/s on each stream

Before anything is measured, one stream of each path is compared event by event: they must say the same. Ratios are of figures
taken in one run on this machine, with nothing else running. Progress goes to standard error; the last line of standard
output is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, installed or not

from process_cpu import CpuMeter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from serving_app import CONFIG, ServingApp, serving_app
from stream_load import Load, burst, events_of, one_by_one, window

from configs.load import load

MODEL = load(CONFIG).model.served_name
NUM_STREAMS = 32
NUM_BURSTS = 3
NUM_WARM_UP_TOKENS = 50
NUM_COMPARED_TOKENS = 64
NUM_STEADY_TOKENS = 5000  # more than the window is long
NUM_SINGLE_REQUESTS = 200
STEP_S = 0.02
IDLE_S = 8.0
SETTLE_S = 2.0
WINDOW_S = 15.0

COMMON = (
    "engine.kind=fake",
    "engine.fake_per_token_s=0",
    "engine.fake_per_sequence_s=0",
    "engine.max_num_seqs=64",
    "engine.max_num_batched_tokens=512",
    f"engine.kv_cache_bytes={4 * 2**30}",
    "replicas.num=2",
    "ingress.num=2",
)


@dataclass(frozen=True, slots=True)
class DataPath:
    """`num_burst_tokens`, for each stream, are as many as take the path some seconds."""

    name: str
    prefix: str  # of its figures
    overrides: tuple[str, ...]
    num_burst_tokens: int
    up: tuple[str, ...] = ("-m", "cluster", "up")


OURS = DataPath("socket, HAProxy", "", ("ingress.data_path=socket", "ingress.haproxy=true"), 2000)
NO_HAPROXY = DataPath("socket, no HAProxy", "no_haproxy_", ("ingress.data_path=socket", "ingress.haproxy=false"), 2000)
MERGED = DataPath("classic, merged", "merged_", ("ingress.data_path=classic", "ingress.haproxy=false"), 500)
CLASSIC = DataPath("classic", "classic_", MERGED.overrides, 200, (str(Path(__file__).parent / "classic_app.py"),))
BURST_PATHS = (OURS, CLASSIC, NO_HAPROXY, MERGED)
STEADY_PATHS = (OURS, CLASSIC)
NUM_STEPS = 4 * len(BURST_PATHS) + 3 * len(STEADY_PATHS)  # of Bench, for the progress bar

Figures = dict[str, float]
Events = list[dict[str, Any]]


class Bench:
    """`client` is the process that all requests come from."""

    def __init__(self, client: ProcessPoolExecutor, progress: Progress) -> None:
        self._client = client
        self._progress = progress
        self._task = progress.add_task("", total=NUM_STEPS)

    def bursts(self, path: DataPath) -> tuple[Figures, Events]:
        """And the events of one stream, the same each time."""
        with self._app(path, step_s=0.0) as app:
            with self._step(path, "one stream, to compare"):
                events = self._client.submit(events_of, Load(app.url, MODEL, 1, NUM_COMPARED_TOKENS)).result()
            with self._step(path, f"bursts of {NUM_STREAMS} streams"):
                streams, meter = Load(app.url, MODEL, NUM_STREAMS, path.num_burst_tokens), CpuMeter(app.pid)
                cpu_s = meter.read_s()
                bursts = [self._client.submit(burst, streams).result() for _ in range(NUM_BURSTS)]
                cpu_s = meter.read_s() - cpu_s
            with self._step(path, f"{NUM_SINGLE_REQUESTS} requests, one by one"):
                singles = self._client.submit(one_by_one, Load(app.url, MODEL, 1, 1), NUM_SINGLE_REQUESTS).result()
        figures = {
            "tokens_per_s": statistics.median(each.num_tokens / each.wall_s for each in bursts),
            "burst_cpu_us_per_token": cpu_s / sum(each.num_tokens for each in bursts) * 1e6,
            "client_cpu_share": statistics.median(each.client_cpu_s / each.wall_s for each in bursts),
            "added_ttft_ms": statistics.median(singles) * 1e3,
            **_percentiles_ms("added_ttft", singles),
            **_percentiles_ms("burst_ttft", [time_s for each in bursts for time_s in each.ttft_s]),
        }
        return _prefixed(path, figures), [_without_identity(event) for event in events]

    def steady(self, path: DataPath) -> Figures:
        with self._app(path, step_s=STEP_S) as app:
            with self._step(path, "idle"):
                meter = CpuMeter(app.pid)
                started_s, cpu_s = time.perf_counter(), meter.read_s()
                time.sleep(IDLE_S)
                idle_share = (meter.read_s() - cpu_s) / (time.perf_counter() - started_s)
            with self._step(path, f"{NUM_STREAMS} streams, a token each {STEP_S * 1e3:.0f} ms"):
                streams = Load(app.url, MODEL, NUM_STREAMS, NUM_STEADY_TOKENS)
                seen = self._client.submit(window, streams, app.pid, SETTLE_S, WINDOW_S).result()
        figures = {
            "steady_cpu_us_per_token": (seen.server_cpu_s - idle_share * seen.wall_s) / seen.num_events * 1e6,
            "steady_tokens_per_s": seen.num_events / seen.wall_s,
            "idle_cpu_share": idle_share,
        }
        return _prefixed(path, figures)

    @contextmanager
    def _app(self, path: DataPath, *, step_s: float) -> Iterator[ServingApp]:
        with ExitStack() as stack:
            with self._step(path, "starting"):
                overrides = (*COMMON, f"engine.fake_base_s={step_s}", *path.overrides)
                app = stack.enter_context(serving_app(*overrides, up=path.up))
                self._client.submit(burst, Load(app.url, MODEL, NUM_STREAMS, NUM_WARM_UP_TOKENS)).result()
            yield app
            self._progress.update(self._task, description=f"{path.name}: stopping")

    @contextmanager
    def _step(self, path: DataPath, what: str) -> Iterator[None]:
        self._progress.update(self._task, description=f"{path.name}: {what}")
        yield
        self._progress.advance(self._task)


def _prefixed(path: DataPath, figures: Figures) -> Figures:
    return {f"{path.prefix}{name}": value for name, value in figures.items()}


def _percentiles_ms(name: str, times_s: Sequence[float]) -> Figures:
    cuts = statistics.quantiles(times_s, n=100, method="inclusive")
    return {f"{name}_p{percent}_ms": cuts[percent - 1] * 1e3 for percent in (50, 90, 99)}


def _without_identity(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in ("id", "created")}


def events_per_token(events: Events) -> float:
    """Raises RuntimeError if the stream's usage isn't that of NUM_COMPARED_TOKENS tokens."""
    if events[-1]["usage"]["completion_tokens"] != NUM_COMPARED_TOKENS:
        raise RuntimeError(f"{NUM_COMPARED_TOKENS} tokens were asked for: {events[-1]}")
    return sum(any(choice["text"] for choice in event["choices"]) for event in events) / NUM_COMPARED_TOKENS


def measure(bench: Bench) -> Figures:
    figures, events = bench.bursts(BURST_PATHS[0])
    for path in BURST_PATHS[1:]:
        its_figures, its_events = bench.bursts(path)
        if its_events != events:
            raise RuntimeError(f"{path.name} answers {its_events}, {BURST_PATHS[0].name} {events}")
        figures |= its_figures
    for path in STEADY_PATHS:
        figures |= bench.steady(path)
    return {
        "speedup_over_classic": figures["tokens_per_s"] / figures["classic_tokens_per_s"],
        "speedup_over_merged_classic": figures["tokens_per_s"] / figures["merged_tokens_per_s"],
        "steady_cpu_ratio": figures["steady_cpu_us_per_token"] / figures["classic_steady_cpu_us_per_token"],
        "events_per_token": events_per_token(events),
        **figures,
    }


def main() -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as client,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        figures = measure(Bench(client, progress))
    rounded = {"num_cpus": os.cpu_count(), **{name: round(value, 4) for name, value in figures.items()}}
    for name, value in rounded.items():
        print(f"{name:40} {value}")
    print(json.dumps(rounded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
