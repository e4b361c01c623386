"""Our engine beside llama.cpp, OpenVINO GenAI, vLLM's CPU build and transformers: one run, one machine, the same weights.

    python infra/bench/bench_engine.py [--only decode,prefill,long,quality,steps] [--engines NAME,...] [--rounds N]

    decode    tokens/s of 1, 4, 16 and 32 sequences with contexts of 128 tokens; all engines in turn, round after round
    prefill   tokens/s of a prompt of 1,024 tokens
    long      decode with contexts of 1,024 tokens
    quality   perplexity of our number formats on a named text, and how often a batch changes an answer
    steps     our engine's own time between steps, at 16 sequences

A ratio is ours over theirs in tokens/s, of equal precision: bf16 with bf16 or fp16, int8 with int8 or Q8_0, int4 with Q4_1 or
int4. `make bench-peers-setup` makes the peers' environments; an engine that is missing is left out and named. FULL=1 takes
more tokens and rounds. Run it with nothing else running. The last line of standard output is one JSON object; a plot goes to
runs/bench_engine.png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, installed or not

from driver import ALIKE, PEERS, Peer, PeerError
from engine_probe import FORMATS, TEXT_NAME, StepClock, differing_in_batch, load, named_text, quality, windows
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from roofline import (
    PREFILL_TOKENS,
    Machine,
    decode,
    least_prefill_seconds,
    least_seconds,
    measure_machine,
    weight_bytes,
)

from configs.schema import ModelConfig
from replicas.model_source import architecture, model_revision
from replicas.tokenizer import load_tokenizer

HERE = Path(__file__).resolve().parent
PARTS = ("decode", "prefill", "long", "quality", "steps")
OURS = "trieserve"
PRECISIONS = ("bf16", "int8", "int4")
SEQUENCES = (1, 4, 16, 32)
SHORT, LONG = 128, 1024
FULL = bool(os.environ.get("FULL"))
MOST_PREFILL_SECONDS = 60.0  # of one prompt: an engine that would take longer is left out, FULL=1 waits for it
MOST_POINT_SECONDS = 90.0  # of all prompts of a point: likewise, that engine there
FIRST_TOKENS = 16
NUM_TOKENS = {SHORT: 128 if FULL else 64, LONG: 64 if FULL else 24}
MODELS = Path.home() / ".cache/trieserve/bench" / model_revision(ModelConfig())
PLOT = HERE.parents[1] / "runs/bench_engine.png"

Engine = tuple[str, str]
"""A name and its precision."""
Point = tuple[int, int]
"""Context and sequences; 0 sequences: prefill."""
Samples = dict[Point, dict[Engine, list[float]]]
"""Tokens/s, a number for each round."""


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description="Compare engines; see the head of this file.")
    options.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default all")
    options.add_argument("--engines", default=",".join(PEERS), help=f"of {', '.join(PEERS)}; default all")
    options.add_argument("--rounds", type=int, default=5 if FULL else 3, help="of decode and prefill; long contexts take one")
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--models", type=Path, default=MODELS, help="folder that `make bench-peers-setup` filled")
    return options.parse_args()


def precision_like(engine: Engine) -> str | None:
    """Which of ours it is compared with."""
    return next((ours for ours in PRECISIONS if engine[1] in ALIKE[ours]), None)


def chosen_engines(names: Sequence[str]) -> Iterator[Engine]:
    for name in names:
        for precision in PEERS[name].precisions:
            if (name, precision) != ("llama_cpp", "fp16") and precision_like((name, precision)):
                yield name, precision


class Prompts:
    """Stretches of the named text, never the same twice, so that no cache helps."""

    def __init__(self) -> None:
        self._tokens = load_tokenizer(ModelConfig()).encode(named_text(), add_special_tokens=False)
        self._next = 0

    def take(self, count: int, length: int) -> list[list[int]]:
        taken = []
        for _ in range(count):
            if self._next + length > len(self._tokens):
                self._next = self._next % 7 + 1
            taken.append(self._tokens[self._next : self._next + length])
            self._next += length
        return taken


def measure(peer: Peer, point: Point, prompts: Prompts) -> float | None:
    """tokens/s; None where an engine took its prompts so far apart that its sequences never decoded together."""
    context, count = point
    if count == 0:
        return context / peer.prefill(prompts.take(1, context)[0])
    figures = peer.decode(prompts.take(count, context), NUM_TOKENS[context])
    return figures.tokens_per_s if figures.seconds > 0.0 else None


def compare(
    running: dict[Engine, Peer], points: Sequence[Point], rounds: int, progress: Progress, pace: dict[Engine, float]
) -> Samples:
    """`pace`: tokens/s of each engine's prompts, made better here where prompts are measured."""
    samples: Samples = {point: defaultdict(list) for point in points}
    prompts = Prompts()
    task = progress.add_task("engines in turn", total=len(points) * rounds * len(running))
    for _ in range(rounds):
        for point in points:
            for engine, peer in list(running.items()):
                progress.update(task, description=f"{engine[0]} {engine[1]}: {point[1] or 'prefill'} x {point[0]}", advance=1)
                if point[0] * point[1] / pace[engine] > MOST_POINT_SECONDS and not FULL:
                    continue
                try:
                    rate = measure(peer, point, prompts)
                    if rate is not None:
                        samples[point][engine].append(rate)
                    if rate is not None and point[1] == 0:
                        pace[engine] = rate
                except PeerError as error:
                    print(f"note: {error}", file=sys.stderr)
                    del running[engine]
    return samples


def expected_prefill_s(peer: Peer, first_s: float) -> float:
    """Of a whole prompt, from short ones. A second one where the first, which warms up, seems slow: torch emulates bf16 on CPUs
    without it, and takes minutes."""
    if first_s * PREFILL_TOKENS / FIRST_TOKENS > MOST_PREFILL_SECONDS:
        first_s = peer.prefill(Prompts().take(1, FIRST_TOKENS)[0])
    return first_s * PREFILL_TOKENS / FIRST_TOKENS


def ratios(samples: Samples, context: int) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for (of_context, count), by_engine in samples.items():
        if of_context != context and count:
            continue
        for engine, theirs in by_engine.items():
            ours = by_engine.get((OURS, precision_like(engine) or ""))
            if engine[0] != OURS and ours and theirs:
                ratio = statistics.median(ours) / statistics.median(theirs)
                found[engine[0]][str(precision_like(engine))][str(count) if count else "prefill"] = round(ratio, 3)
    return found


def shown(samples: Samples) -> dict[str, dict[str, list[float]]]:
    """Median, least and most tokens/s by point and engine."""
    return {
        f"{count or 'prefill'}x{context}": {
            " ".join(engine): [round(function(rates), 1) for function in (statistics.median, min, max)]
            for engine, rates in by_engine.items()
            if rates
        }
        for (context, count), by_engine in samples.items()
    }


def roofline_figures(machine: Machine, samples: Samples) -> dict[str, Any]:
    """Shares of the least possible time; the bandwidth is never less than what any engine's own rate implies."""
    shape = architecture(ModelConfig())
    for (_, count), by_engine in samples.items():
        for engine, rates in by_engine.items():
            like = precision_like(engine)
            if count == 1 and like and rates:
                machine = machine.at_least(weight_bytes(shape, like) * max(rates), " ".join(engine))
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    for (context, count), by_engine in samples.items():
        for engine, rates in by_engine.items():
            if engine[0] != OURS or not rates:
                continue
            if count:
                step = decode(count, context + NUM_TOKENS[context] // 2)
                best_rate = count / least_seconds(machine, shape, engine[1], "bf16", step)
            else:
                best_rate = context / least_prefill_seconds(machine, shape, engine[1], "bf16", context)
            shares[engine[1]][f"{count or 'prefill'}x{context}"] = round(statistics.median(rates) / best_rate, 3)
    return {
        "roofline_share": {precision: found.get(f"1x{SHORT}") for precision, found in shares.items()},
        "roofline_shares": shares,
        "bandwidth_gb_s": round(machine.bytes_per_s / 1e9, 2),
        "multiplies_g_s": {name: round(rate / 1e9, 1) for name, rate in machine.multiplies_per_s.items()},
        "whose_limits": machine.sources,
    }


def engines(chosen: argparse.Namespace, parts: Sequence[str], progress: Progress) -> dict[str, Any]:
    points = [(SHORT, count) for count in SEQUENCES] if "decode" in parts else []
    points += [(PREFILL_TOKENS, 0)] if "prefill" in parts else []
    long_points = [(LONG, count) for count in SEQUENCES] if "long" in parts else []
    machine = measure_machine(chosen.threads)
    figures: dict[str, Any] = {"left_out": [], "versions": {}, "options": {}, "start_s_of": {}}
    with ExitStack() as stack:
        running: dict[Engine, Peer] = {}
        pace: dict[Engine, float] = {}
        starting = progress.add_task("starting engines", total=None)
        for engine in chosen_engines(chosen.engines.split(",")):
            progress.update(starting, description=f"starting {engine[0]} {engine[1]}")
            try:
                peer = stack.enter_context(Peer(*engine, chosen.models, threads=chosen.threads))
                first_s = peer.prefill(Prompts().take(1, FIRST_TOKENS)[0])
                slow_s = expected_prefill_s(peer, first_s)
            except PeerError as error:
                print(f"note: {error}", file=sys.stderr)
                figures["left_out"].append(f"{' '.join(engine)}: {str(error).partition(';')[0]}")
                continue
            if slow_s > MOST_PREFILL_SECONDS and not FULL:
                figures["left_out"].append(f"{' '.join(engine)}: a prompt of {PREFILL_TOKENS} tokens would take {slow_s:.0f} s")
                continue
            running[engine] = peer
            pace[engine] = PREFILL_TOKENS / slow_s
            figures["versions"][engine[0]] = peer.version
            figures["options"][" ".join(engine)] = peer.options
            figures["start_s_of"][" ".join(engine)] = round(peer.load_s + first_s, 2)
        progress.remove_task(starting)
        samples = compare(running, points, chosen.rounds, progress, pace)
        samples |= compare(running, long_points, 1, progress, pace)
        figures["peak_rss_mib"] = {" ".join(engine): peer.memory() // 2**20 for engine, peer in running.items()}
    figures["start_s"] = figures["start_s_of"].get(f"{OURS} int4")
    figures["tokens_per_s"] = shown(samples)
    figures["ratio"] = ratios(samples, SHORT)
    figures["ratio_1024"] = ratios({point: found for point, found in samples.items() if point[1]}, LONG)
    figures |= roofline_figures(machine, samples)
    plot(figures)
    return figures


def plot(figures: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = list(figures["tokens_per_s"])
    if not points:
        return
    names = list(figures["tokens_per_s"][points[0]])
    canvas, axes = pyplot.subplots(1, len(points), figsize=(3.2 * len(points), 4.5), sharey=True)
    for point, axis in zip(points, axes if len(points) > 1 else [axes], strict=True):
        found = figures["tokens_per_s"][point]
        rates = [found.get(name, [0, 0, 0]) for name in names]
        errors = [[rate[0] - rate[1] for rate in rates], [rate[2] - rate[0] for rate in rates]]
        colours = ["tab:blue" if name.startswith(OURS) else "tab:gray" for name in names]
        axis.barh(names, [rate[0] for rate in rates], xerr=errors, color=colours)
        axis.set_title(point)
        axis.invert_yaxis()
        axis.set_xlabel("tokens/s")
    canvas.tight_layout()
    PLOT.parent.mkdir(exist_ok=True)
    canvas.savefig(PLOT, dpi=110)


def qualities(threads: int, progress: Progress) -> dict[str, Any]:
    texts = windows()
    task = progress.add_task("quality", total=(len(FORMATS) + 1) * len(texts))
    found, differing = {}, {}
    short = [tokens[: 16 + 3 * index] for index, tokens in enumerate(texts)]
    for name, precision, kv in [*((one, one, "auto") for one in FORMATS), ("bf16, KV int8", "bf16", "int8")]:
        model = load(precision, threads, kv)
        found[name] = quality(model, texts, lambda: progress.advance(task))
        if kv == "auto":
            differing[name] = differing_in_batch(model, short, 32)
    base = found["bf16"]
    return {
        "text": TEXT_NAME,
        "perplexity": {name: round(2.718281828459045**one.nats, 4) for name, one in found.items()},
        "perplexity_ratio": {name: round(2.718281828459045 ** (one.nats - base.nats), 5) for name, one in found.items()},
        "top1_agreement": {
            name: round(statistics.mean(a == b for a, b in zip(one.best, base.best, strict=True)), 4)
            for name, one in found.items()
        },
        f"answers_changed_by_batch_of_{len(short)}": differing,
    }


def main() -> int:
    chosen = arguments()
    parts = chosen.only.split(",")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    figures: dict[str, Any] = {"num_threads": chosen.threads}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        if "quality" in parts:
            figures |= qualities(chosen.threads, progress)
        if "steps" in parts:
            for precision in PRECISIONS:
                times = StepClock(precision, chosen.threads, 16).run(SHORT, 100)
                figures.setdefault("between_steps_share_of", {})[precision] = round(times["between"] / times["whole"], 4)
            figures["between_steps_share"] = max(figures["between_steps_share_of"].values())
        if {"decode", "prefill", "long"} & set(parts):
            figures |= engines(chosen, parts, progress)
    for name, value in figures.items():
        print(f"{name:28} {value}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
