"""Where each microsecond of a decode step goes, in an engine that really runs.

    python infra/bench/profile_step.py [--precision int4] [--sequences 16] [--context 128] [--threads N]

The model's part is divided by the kernels' own clock (waiting for the other threads included); "between" is all that is not
in the model. The last line of standard output is one JSON object, in microseconds a step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from a checkout, installed or not

from engine_probe import FORMATS, StepClock
from rich.console import Console
from rich.table import Table
from roofline import decode, least_seconds, measure_machine

from configs.schema import ModelConfig
from replicas.model_source import architecture

NUM_STEPS = 200


def main() -> int:
    options = argparse.ArgumentParser(description="Profile a step; see the head of this file.")
    options.add_argument("--precision", choices=FORMATS, default="int4")
    options.add_argument("--sequences", type=int, default=16)
    options.add_argument("--context", type=int, default=128)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    chosen = options.parse_args()
    console = Console(stderr=True)
    with console.status("measuring the machine"):
        machine = measure_machine(chosen.threads)
    with console.status("stepping"):
        parts = StepClock(chosen.precision, chosen.threads, chosen.sequences).run(chosen.context, NUM_STEPS)
    step = decode(chosen.sequences, chosen.context + NUM_STEPS // 2)
    kv = "fp32" if chosen.precision == "fp32" else "bf16"
    parts["least possible"] = least_seconds(machine, architecture(ModelConfig()), chosen.precision, kv, step)
    table = Table("part", "us a step", "share", title=f"{chosen.precision}, {chosen.sequences} x {chosen.context} tokens")
    for name, seconds in parts.items():
        table.add_row(name, f"{seconds * 1e6:.0f}", f"{seconds / parts['whole']:.1%}")
    Console().print(table)
    print(json.dumps({name: round(seconds * 1e6, 1) for name, seconds in parts.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
