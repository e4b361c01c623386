"""What this machine can do at best, and the least time of a step of each shape on it.

    python infra/bench/bench_machine.py [--threads N] [--model SOURCE]

Memory bandwidth is the best read loop's of several, the rates are of multiply-adds from registers or of torch's products,
whichever is faster. Run it with nothing else running. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, installed or not

from rich.console import Console
from rich.table import Table
from roofline import PREFILL_TOKENS, decode, least_prefill_seconds, least_seconds, measure_machine

from configs.schema import EMBEDDED_MODEL, ModelConfig
from replicas.model_source import architecture

PRECISIONS = ("fp32", "bf16", "int8", "int4")
SEQUENCES = (1, 4, 16, 32)
CONTEXTS = (128, 1024)


def main() -> int:
    options = argparse.ArgumentParser(description="Measure the machine; see the head of this file.")
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--model", default=EMBEDDED_MODEL)
    chosen = options.parse_args()
    shape = architecture(ModelConfig(source=chosen.model))
    console = Console(stderr=True)
    with console.status("reading memory and multiplying"):
        machine = measure_machine(chosen.threads)
    least = {}
    table = Table(title=f"least milliseconds of a step ({chosen.threads} threads; KV cache in bf16)")
    table.add_column("weights")
    for context in CONTEXTS:
        for count in SEQUENCES:
            table.add_column(f"{count} x {context}", justify="right")
    table.add_column(f"prefill {PREFILL_TOKENS}", justify="right")
    for precision in PRECISIONS:
        kv = "fp32" if precision == "fp32" else "bf16"
        times = {
            f"{count}x{context}": least_seconds(machine, shape, precision, kv, decode(count, context)) * 1e3
            for context in CONTEXTS
            for count in SEQUENCES
        }
        times["prefill"] = least_prefill_seconds(machine, shape, precision, kv, PREFILL_TOKENS) * 1e3
        least[precision] = {name: round(value, 3) for name, value in times.items()}
        table.add_row(precision, *(f"{value:.2f}" for value in times.values()))
    figures = {
        "num_threads": chosen.threads,
        "bandwidth_gb_s": round(machine.bytes_per_s / 1e9, 2),
        "multiplies_g_s": {name: round(rate / 1e9, 1) for name, rate in machine.multiplies_per_s.items()},
        "whose": machine.sources,
        "least_ms": least,
    }
    print(f"bandwidth {figures['bandwidth_gb_s']} GB/s, multiply-adds {figures['multiplies_g_s']} G/s")
    Console().print(table)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
