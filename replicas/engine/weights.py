"""A model's tensors under one set of names, whatever the file format: safetensors here, GGUF in gguf_weights.py.

The names are those of the transformers library (`model.layers.0.self_attn.q_proj.weight`), which safetensors files use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from replicas.engine.gguf_weights import GgufCheckpoint
from replicas.engine.models.config import ArchitectureConfig
from replicas.engine.quantize.formats import QuantizedTensor
from replicas.engine.quantize.packed import PackedMatrix, read_packed
from replicas.engine.quantize.parts import read_parts
from replicas.engine.quantize.scheme import TRIESERVE, Scheme, scheme_of
from replicas.errors import ConfigError
from replicas.model_source import ModelFiles, gguf_header, read_json


class Checkpoint(Protocol):
    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor on the CPU, in the number format of the file. Raises ConfigError if missing or of another shape."""

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor | None:
        """The same as the file keeps it; None where that is plain numbers, or a format that isn't one of formats.py's."""


class SafetensorsCheckpoint:
    """All *.safetensors of a directory. Each says which tensors it holds, so the index file of a sharded one isn't needed.

    `scheme` says how quantized matrices are kept, None that all numbers are plain. Those of a scheme become fp32.
    """

    def __init__(self, paths: list[Path], scheme: Scheme | None = None) -> None:
        self._scheme = scheme
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                opened: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: not a readable safetensors file ({error})") from error
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        found = self._read(name)
        if found is None:
            quantized = self._kept(name, shape)
            if quantized is None:
                raise ConfigError(f"the model's files have no tensor {name}")
            return quantized.dequantize()
        if tuple(found.shape) != shape:
            raise ConfigError(f"tensor {name} has the shape {tuple(found.shape)}, config.json says {shape}")
        return found

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor | None:
        kept = None if name in self._files else self._kept(name, shape)
        return kept.quantized() if isinstance(kept, PackedMatrix) else kept

    def _kept(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor | PackedMatrix | None:
        if self._scheme is None:
            return None
        if self._scheme.method == TRIESERVE:
            return read_parts(self._read, name, shape)
        return read_packed(self._read, name, shape, self._scheme)

    def _read(self, name: str) -> torch.Tensor | None:
        found: torch.Tensor | None = self._files[name].get_tensor(name) if name in self._files else None
        return found


def open_checkpoint(files: ModelFiles, architecture: ArchitectureConfig) -> Checkpoint:
    """Raises ConfigError if a file can't be read."""
    if files.kind == "gguf":
        return GgufCheckpoint(gguf_header(files.path), architecture)
    return SafetensorsCheckpoint(files.weight_files(), scheme_of(read_json(files.path / "config.json")))
