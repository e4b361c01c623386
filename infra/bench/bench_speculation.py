"""What speculation gains: the same requests with and without draft tokens, in turn, in one engine each.

    python infra/bench/bench_speculation.py [--sequences 1,4,16] [--tokens 96] [--rounds 3] [--precision int4] [--threads N]

Two kinds of prompts: some ask for a passage again, which is where drafts from earlier text pay, others for something new, where
they don't and must cost nothing. Answers are greedy, and must be equal. The last line of standard output is one JSON object:
`speedup` {kind: {sequences: ratio of tokens/s}}, `acceptance_length` (tokens a step with drafts), `equal`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, installed or not

from engine_probe import FORMATS, named_text
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from configs.schema import AppConfig, EngineConfig, ModelConfig, ReplicasConfig, SpeculationConfig
from replicas.blocks import chain_root
from replicas.build import build_engine
from replicas.chat_template import ChatMessage
from replicas.contract import Engine, GenerationRequest, SamplingParams, StepOutput
from replicas.tokenizer import load_tokenizer

_ROOT = chain_root(b"of the benchmark")
_PASSAGE_CHARS = 600
_TOPICS = ("a lighthouse", "the history of paper", "a lost dog", "how bread rises", "a train at night", "the sea in winter")


def prompts(kind: str, count: int) -> list[str]:
    if kind == "new":
        return [f"Write a short story about {_TOPICS[i % len(_TOPICS)]}, part {i // len(_TOPICS) + 1}." for i in range(count)]
    text = named_text()
    passages = [text[i * 20_000 : i * 20_000 + _PASSAGE_CHARS] for i in range(count)]
    return [f"Repeat the following text exactly:\n\n{passage}" for passage in passages]


class Load:
    """One engine, and all tokens of its requests by request."""

    def __init__(self, options: argparse.Namespace, method: str) -> None:
        dtype, quantization = FORMATS[options.precision]
        self._engine: Engine = build_engine(
            AppConfig(
                model=ModelConfig(dtype=dtype),
                engine=EngineConfig(
                    device="cpu",
                    quantization=quantization,
                    kv_cache_bytes=768 * 2**20,
                    num_threads=options.threads,
                    prefix_caching=False,
                    speculation=SpeculationConfig(method=method),
                ),
                replicas=ReplicasConfig(num_cpus=options.threads),
            )
        )
        self._changed = threading.Condition()
        self._tokens: dict[str, list[int]] = {}
        self._times: list[float] = []
        self._unfinished: set[str] = set()
        self._engine.start(self._take)

    def _take(self, output: StepOutput) -> None:
        with self._changed:
            for delta in output.deltas:
                self._tokens[delta.request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    self._unfinished.discard(delta.request_id)
            if all(self._tokens.values()):
                self._times.append(time.perf_counter())
            self._changed.notify()

    def run(self, token_ids: list[list[int]], num_tokens: int) -> tuple[float, list[list[int]]]:
        """(tokens/s since every sequence had its first token, answers)"""
        with self._changed:
            names = [f"r{i}" for i in range(len(token_ids))]
            self._tokens = {name: [] for name in names}
            self._times, self._unfinished = [], set(names)
            for name, prompt in zip(names, token_ids, strict=True):
                sampling = SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)
                self._engine.submit(GenerationRequest(name, tuple(prompt), sampling, _ROOT))
            self._changed.wait_for(lambda: not self._unfinished)
            seconds = self._times[-1] - self._times[0]
            return (num_tokens - 1) * len(names) / seconds, [self._tokens[name] for name in names]

    def drafts(self) -> tuple[int, int]:
        stats = self._engine.stats()
        return stats.drafts_total, stats.accepted_tokens_total

    def close(self) -> None:
        self._engine.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure speculation; see the head of this file.")
    parser.add_argument("--sequences", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="int4", choices=sorted(FORMATS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    counts = [int(count) for count in options.sequences.split(",")]
    tokenizer = load_tokenizer(ModelConfig())
    loads = {method: Load(options, method) for method in ("", "ngram")}
    speedup: dict[str, dict[str, float]] = {}
    length: dict[str, dict[str, float]] = {}
    equal = True
    table = Table("prompts", "sequences", "tokens/s without", "with", "speed-up", "tokens a draft step")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("in turn", total=2 * len(counts) * options.rounds * 2)
        for kind in ("again", "new"):
            for count in counts:
                asked = [tokenizer.render_chat([ChatMessage("user", text)]) for text in prompts(kind, count)]
                rates: dict[str, list[float]] = {method: [] for method in loads}
                before = loads["ngram"].drafts()
                for _ in range(options.rounds):
                    answers = {}
                    for method, load in loads.items():
                        rate, answers[method] = load.run(asked, options.tokens)
                        rates[method].append(rate)
                        progress.advance(task)
                    equal &= answers[""] == answers["ngram"]
                drafts, accepted = (after - was for after, was in zip(loads["ngram"].drafts(), before, strict=True))
                plain, with_drafts = (statistics.median(rates[method]) for method in loads)
                speedup.setdefault(kind, {})[str(count)] = round(with_drafts / plain, 3)
                per_step = round(1 + accepted / max(drafts, 1), 2)
                length.setdefault(kind, {})[str(count)] = per_step
                shown = (
                    f"{plain:.0f}",
                    f"{with_drafts:.0f}",
                    f"{with_drafts / plain:.2f}",
                    f"{per_step:.2f}",
                )
                table.add_row(kind, str(count), *shown)
    for load in loads.values():
        load.close()
    Console().print(table)
    print(json.dumps({"precision": options.precision, "speedup": speedup, "acceptance_length": length, "equal": equal}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
