"""A model quantized once, into a directory that loads without being quantized again.

format   layers   embedding and head   kept bit for bit where the source has it
int8     int8     int8                 int8
int4     int4     int8_g32             int4, int8_g32

Norms and biases stay numbers. The directory is one in the Hugging Face layout, whose config.json says what its matrices are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from configs.schema import ModelConfig
from replicas.engine.export import describe_gguf, tensor_shapes, whole_directory, write_description
from replicas.engine.quantize.formats import GROUP, QuantizedTensor, concatenate, quantize
from replicas.engine.quantize.parts import parts_of
from replicas.engine.quantize.scheme import declare
from replicas.engine.weights import Checkpoint, open_checkpoint
from replicas.errors import ConfigError
from replicas.model_source import ModelFiles, architecture, read_json, resolve

_SHARD_BYTES = 2**31  # what is held before it is written
_NUMBERS_AT_ONCE = 2**24  # of a matrix: quantizing takes several times as many in fp32
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")

# What a directory has beside its weights that is still true of the quantized model.
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
_NOT_COPIED = ("config.json", "quantize_config.json", "quant_config.json", "*.index.json")


@dataclass(frozen=True, slots=True)
class _Format:
    layers: str
    vocabulary: str
    kept: tuple[str, ...]

    def of(self, name: str) -> str:
        return self.vocabulary if name in _VOCABULARY else self.layers


_FORMATS = {
    "int8": _Format("int8", "int8", kept=("int8",)),
    "int4": _Format("int4", "int8_g32", kept=("int4", "int8_g32")),
}


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was done: the sizes of all weight files, and how many of the matrices are the source's own."""

    bytes_before: int
    bytes_after: int
    num_matrices: int
    num_kept: int


def quantize_model(
    model: ModelConfig, format: str, output: Path, on_progress: Callable[[float], None] = lambda share: None
) -> Quantized:
    """Write `model` in `format`, int8 or int4, as the directory `output`, all of it or nothing.

    `on_progress` hears the share of the weights that is done, 0 to 1. Raises ConfigError if the model can't be read or
    written so, or if there is something at `output`.
    """
    files, chosen = resolve(model), _FORMATS[format]
    refuse_existing(output)
    shapes = tensor_shapes(architecture(model))
    _check_columns(shapes, chosen, format)
    # Before the weights: what can't be described needn't be quantized.
    description = describe_gguf(model, torch.float32) if files.kind == "gguf" else {}
    config = description.get("config.json") or dict(read_json(files.path / "config.json"))
    description["config.json"] = declare(config, format)
    checkpoint = open_checkpoint(files, architecture(model))
    try:
        with whole_directory(output) as folder:
            if files.kind == "safetensors":
                _copy(files, folder)
            write_description(description, folder)
            return _write_weights(checkpoint, shapes, chosen, files, folder, on_progress)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{output}: can't be written ({error})") from error


def refuse_existing(output: Path) -> None:
    """Raises ConfigError if `output` is there and isn't an empty directory."""
    try:
        empty = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    except OSError as error:
        raise ConfigError(f"{output}: {error}") from error
    if not empty:
        raise ConfigError(f"{output} exists and isn't an empty directory: nothing is overwritten")


def _write_weights(
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    chosen: _Format,
    files: ModelFiles,
    folder: Path,
    on_progress: Callable[[float], None],
) -> Quantized:
    shards = _Shards(folder)
    num_all, num_done, num_matrices, num_kept = sum(map(prod, shapes.values())), 0, 0, 0
    for name, shape in shapes.items():
        if len(shape) != 2:
            shards.add({name: checkpoint.tensor(name, shape).contiguous()})
        else:
            matrix = checkpoint.quantized(name, shape)
            num_matrices += 1
            if matrix is not None and matrix.format in chosen.kept:
                num_kept += 1
            else:
                matrix = _quantized(name, checkpoint.tensor(name, shape), chosen.of(name))
            shards.add(parts_of(name, matrix))
        num_done += prod(shape)
        on_progress(num_done / num_all)
    shards.flush()
    bytes_before = sum(file.stat().st_size for file in files.weight_files())
    return Quantized(bytes_before, shards.bytes_written, num_matrices, num_kept)


class _Shards:
    """Files of about _SHARD_BYTES in a folder with a config.json: what is written needn't fit into memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, Tensor] = {}
        self._num_bytes = 0
        self._num_files = 0
        self.bytes_written = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors.update(tensors)
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._num_bytes >= _SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._tensors:
            self._num_files += 1
            path = self._folder / f"model-{self._num_files:05}.safetensors"
            save_file(self._tensors, path, metadata={"format": "pt"})
            # The library makes files that nobody else may read, whatever the umask. The description stands there already.
            shutil.copymode(self._folder / "config.json", path)
            self.bytes_written += path.stat().st_size
            self._tensors, self._num_bytes = {}, 0


def _quantized(name: str, weight: Tensor, format: str) -> QuantizedTensor:
    """In pieces, since no row's numbers depend on another row."""
    step = max(1, _NUMBERS_AT_ONCE // weight.shape[1])
    matrix = concatenate([quantize(weight[start : start + step], format) for start in range(0, len(weight), step)])
    # Neither NaN nor infinity has a nearest value, and either shows in a scale, as numbers beyond 16 bits do in theirs.
    if not all(bool(part.isfinite().all()) for part in (matrix.scale, matrix.minimum) if part is not None):
        raise ConfigError(f"tensor {name} has numbers that {format} can't say: infinite, not a number, or too large")
    return matrix


def _check_columns(shapes: Mapping[str, tuple[int, ...]], chosen: _Format, format: str) -> None:
    for name, shape in shapes.items():
        if len(shape) == 2 and chosen.of(name) != "int8" and shape[1] % GROUP:
            raise ConfigError(f"tensor {name} has {shape[1]} columns; {format} needs a multiple of {GROUP}, int8 doesn't")


def _copy(files: ModelFiles, folder: Path) -> None:
    found = {path for pattern in _COPIED for path in files.path.glob(pattern) if path.is_file()}
    for path in sorted(found):
        if not any(path.match(pattern) for pattern in _NOT_COPIED):
            shutil.copyfile(path, folder / path.name)
