"""The embedded model in every peer's format: prepare_models.py [--out FOLDER]; prints the folder that driver.Peer is given.

All are made of the one GGUF that we serve, so that peers differ in how they compute and not in what. What is there already is
kept. Run by the project's interpreter; llama.cpp and OpenVINO convert in environments of their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from driver import PEERS, ROOT
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from configs.schema import ModelConfig
from replicas.engine.export import model_directory
from replicas.model_source import model_revision, resolve

DEFAULT_OUT = Path("~/.cache/trieserve/bench")

_QUANTIZE = Path(__file__).with_name("llama_cpp_quantize.py")
_LOG_TAIL_CHARS = 3000
# Groups of 32 with scale and minimum are what GGUF's Q4_1 has; the default of 128 doesn't divide this model's width.
_OPENVINO_OPTIONS = {"fp16": (), "int8": (), "int4": ("--group-size", "32")}


class PrepareError(Exception):
    """A model can't be written."""


def prepare(out: Path, progress: Progress) -> Path:
    """Fills the folder of the model's revision below `out`. Raises PrepareError."""
    model = ModelConfig()
    folder = out.expanduser() / model_revision(model)
    folder.mkdir(parents=True, exist_ok=True)
    targets = _targets(resolve(model).path, partial(model_directory, model, torch.bfloat16, folder))
    task = progress.add_task("models of the peers", total=len(targets))
    for name, write in targets.items():
        progress.update(task, description=f"writing {name}")
        target = folder / name
        if not target.exists():
            scratch = target.with_name(f"{name}.partial")
            _remove(scratch)
            write(scratch)
            _remove(target)  # a link to what is no more
            scratch.rename(target)
        progress.advance(task)
    progress.update(task, description="models of the peers")
    return folder


def _targets(gguf: Path, safetensors: Callable[[], Path]) -> dict[str, Callable[[Path], None]]:
    def linked(scratch: Path) -> None:
        scratch.symlink_to(safetensors().name)

    targets: dict[str, Callable[[Path], None]] = {
        "safetensors-bf16": linked,
        "q4_1.gguf": lambda scratch: scratch.symlink_to(gguf),
    }
    for precision in ("q8_0", "bf16", "fp16"):
        targets[f"{precision}.gguf"] = partial(_quantize, gguf, precision)
    for precision, options in _OPENVINO_OPTIONS.items():
        targets[f"openvino-{precision}"] = partial(_export_openvino, safetensors, precision, options)
    return targets


def _quantize(gguf: Path, precision: str, scratch: Path) -> None:
    _run("llama_cpp", "python", [str(_QUANTIZE), str(gguf), str(scratch), precision])


def _export_openvino(safetensors: Callable[[], Path], precision: str, options: Sequence[str], scratch: Path) -> None:
    arguments = ["export", "openvino", "--model", str(safetensors()), "--task", "text-generation-with-past"]
    _run("openvino", "optimum-cli", [*arguments, "--weight-format", precision, *options, str(scratch)])


def _run(peer: str, program: str, arguments: Sequence[str]) -> None:
    """A program of the peer's environment, which finds no hub."""
    path = (ROOT / PEERS[peer].interpreter).with_name(program)
    if not path.exists():
        raise PrepareError(f"{peer}: there is no {path.relative_to(ROOT)}; run `make bench-peers-setup`")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run([path, *arguments], env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        tail = (done.stdout + done.stderr)[-_LOG_TAIL_CHARS:]
        raise PrepareError(f"{peer}: {program} ended with {done.returncode}; the end of what it said:\n{tail}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the embedded model in every peer's format.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"cache folder; default {DEFAULT_OUT}")
    out = parser.parse_args().out
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            print(prepare(out, progress))
    except PrepareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
