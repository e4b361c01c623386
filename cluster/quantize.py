"""`python -m cluster quantize`: write a model in few bits once, so that a replica needn't quantize it at every start."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from configs.schema import ModelConfig

_MIB = 2**20


def run(*, model: str, format: str, output: str) -> None:
    """Raises ConfigError if the model can't be read, or `output` can't be written or isn't empty."""
    from replicas.engine.quantize.checkpoint import quantize_model  # torch, which no other command here needs

    directory = Path(output).expanduser()
    console = Console(soft_wrap=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"quantizing to {format}", total=1.0)
        done = quantize_model(
            ModelConfig(source=model), format, directory, lambda share: progress.update(task, completed=share)
        )
    before, after = done.bytes_before / _MIB, done.bytes_after / _MIB
    kept = f", {done.num_kept} of {done.num_matrices} matrices as they were" if done.num_kept else ""
    console.print(f"{model}: {before:.1f} MiB", markup=False, highlight=False)
    console.print(f"{directory}: {after:.1f} MiB ({after / before:.0%}), {format}{kept}", markup=False, highlight=False)
    console.print(f"serve it with model.source={directory.resolve()}", markup=False, highlight=False)
