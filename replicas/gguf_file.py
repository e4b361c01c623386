"""Reading a GGUF file's header: its metadata and where its tensors lie. No torch.

    magic "GGUF" | version | number of tensors | number of keys | key, type, value ... | name, shape, type, offset ... | data

Why not gguf.GGUFReader: it builds numpy views for each of the ~100 000 strings of a vocabulary, which takes 2 s for the
embedded model (here: 0.1 s), and the ingress needs the metadata too. Source of the format: ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from replicas.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # 1 had 32-bit lengths and is long gone
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 8

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is in numpy's order (rows first; GGUF stores it reversed); `offset` counts bytes from the file's start."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def read_raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of the tensor `name`, mapped: its shape, the last dimension in bytes. KeyError if there is none."""
        tensor = self.tensors[name]
        block_elements, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        *rows, width = tensor.shape
        raw_shape = (*rows, width // block_elements * block_bytes)
        try:
            return np.memmap(self.path, mode="r", dtype=np.uint8, offset=tensor.offset, shape=raw_shape)
        except ValueError as error:
            raise ConfigError(f"{self.path}: tensor {name} lies beyond the file's end: a partial download?") from error

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor `name`, dequantized, in its numpy shape. KeyError if the file has none of that name."""
        tensor, raw = self.tensors[name], self.read_raw(name)
        if tensor.kind == GGMLQuantizationType.F32:
            return np.array(raw).view(np.float32)
        try:
            return np.asarray(dequantize(raw, tensor.kind), dtype=np.float32)
        except NotImplementedError as error:
            raise ConfigError(f"{self.path}: tensor {name} has the unsupported format {tensor.kind.name}") from error


class _Cursor:
    """Reads values off a buffer. Whatever runs past its end raises struct.error or IndexError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def scalar(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def string(self) -> str:
        length = self.scalar(_U64)
        start, end = self.position, self.position + length
        if end > len(self.data):
            raise IndexError("a string runs past the end")
        self.position = end
        return self.data[start:end].decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element_kind, length = self.scalar(_U32), self.scalar(_U64)
            if element_kind in _SCALARS:
                return self._scalars(_SCALARS[element_kind], length)
            return [self.value(element_kind) for _ in range(length)]
        return self.scalar(_SCALARS[kind])

    def _scalars(self, layout: struct.Struct, length: int) -> list[Any]:
        many = struct.Struct(f"<{length}{layout.format[-1]}")
        values = many.unpack_from(self.data, self.position)
        self.position += many.size
        return list(values)


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of `path`. Raises ConfigError if it can't be read or isn't a (whole) GGUF file we know."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, _Cursor(data))
    except (OSError, struct.error, IndexError, KeyError, ValueError, MemoryError) as error:
        raise ConfigError(f"{path}: not a readable GGUF file ({error})") from error


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.data[:4] != _MAGIC:
        raise ConfigError(f"{path}: not a GGUF file")
    cursor.position = 4
    version = cursor.scalar(_U32)
    if version not in _VERSIONS:
        raise ConfigError(f"{path}: GGUF version {version}; supported are little-endian files of version 2 and 3")
    num_tensors, num_keys = cursor.scalar(_U64), cursor.scalar(_U64)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key, kind = cursor.string(), cursor.scalar(_U32)
        metadata[key] = cursor.value(kind)
    if metadata.get("split.count", 1) > 1:
        raise ConfigError(f"{path}: one part of a split GGUF file; merge the parts into one file first")
    headers: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
    for _ in range(num_tensors):
        name, num_dims = cursor.string(), cursor.scalar(_U32)
        if num_dims > _MAX_DIMS:
            raise IndexError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(cursor.scalar(_U64) for _ in range(num_dims))[::-1]
        headers[name] = shape, GGMLQuantizationType(cursor.scalar(_U32)), cursor.scalar(_U64)
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {name: GgufTensor(shape, kind, data_start + offset) for name, (shape, kind, offset) in headers.items()}
    return GgufFile(path, metadata, tensors)
