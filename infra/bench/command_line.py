"""What the benchmarks that consist of parts have in common: their options, their progress bars and their last line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prompt_sets import load_prompts
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

NUM_DIGITS = 6

Figures = dict[str, Any]


def parser(description: str, parts: Sequence[str]) -> argparse.ArgumentParser:
    """With --only and --data."""

    def chosen(text: str) -> tuple[str, ...]:
        names = text.split(",")
        if not set(names) <= set(parts):
            raise argparse.ArgumentTypeError(f"must be of {', '.join(parts)}")
        return tuple(part for part in parts if part in names)

    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--only", type=chosen, default=tuple(parts), metavar="PART,...", help=f"of {', '.join(parts)}; default all"
    )
    made.add_argument(
        "--data", type=Path, help="folder with mt_bench.jsonl to ask; default TRIESERVE_DATA, else our own prompts"
    )
    return made


def shown(figures: Figures) -> Figures:
    """Rounded, and printed at once: a part that fails must not cost the figures of those before it."""
    rounded = {name: round(value, NUM_DIGITS) if isinstance(value, float) else value for name, value in figures.items()}
    for name, value in rounded.items():
        print(f"{name:40} {value}", flush=True)
    return rounded


def run(data: Path | None, measure: Callable[[Sequence[str], Progress], Figures]) -> int:
    """`measure` with the prompts of `data`; its figures become the last line of standard output."""
    folder = data or (Path(os.environ["TRIESERVE_DATA"]) if os.environ.get("TRIESERVE_DATA") else None)
    try:
        prompts = load_prompts(folder)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ["TQDM_DISABLE"] = "1"  # transformers' own bars would run through ours
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        figures = measure(prompts, progress)
    print(json.dumps(figures))
    return 0
