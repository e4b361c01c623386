"""Matrices in the layout of the kernels (csrc/linear.h), in memory of large pages."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replicas.engine.models.model_weights import Matrix
from replicas.engine.native.library import FORMATS, Library, Linear
from replicas.engine.quantize.formats import QuantizedTensor

_STRIP = 64
_ALIGNMENT = 64
_PIECE_BYTES = 64 * 2**20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SCALED_BY_GROUP = ("int8_g32", "int4")


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What `linear.data` is to be made of, row-major: addresses for csrc/linear.h's `pack`, 0 where there is nothing."""

    numbers: int
    scale: int
    minimum: int
    kept: tuple[object, ...]  # alive until it is packed


class Packer:
    """`dtype` (fp32 or bf16) is the format of plain matrices; quantized ones keep theirs. Keep it as long as its matrices."""

    def __init__(self, library: Library, dtype: str) -> None:
        self._library = library
        self._dtype = dtype
        self._pieces: list[mmap.mmap] = []
        self._free: tuple[int, int] = (0, 0)  # address, bytes
        self._kept: list[Tensor] = []
        self.num_bytes = 0  # of all packed matrices

    def place(self, matrix: Matrix, bias: Tensor | None = None) -> tuple[Linear, Unpacked]:
        """A matrix whose memory is there and yet to be filled."""
        quantized = matrix if isinstance(matrix, QuantizedTensor) else None
        rows, columns = matrix.shape if isinstance(matrix, Tensor) else (matrix.rows, matrix.columns)
        format = self._dtype if quantized is None else quantized.format
        linear = Linear(FORMATS[format], rows, columns)
        num_bytes = self._library.calls.ts_linear_bytes(linear)
        linear.data = self._take(num_bytes)
        self.num_bytes += num_bytes
        if bias is not None:
            linear.bias = self._padded(bias)
        if quantized is None:
            assert isinstance(matrix, Tensor)
            numbers = matrix.to(_DTYPES[self._dtype]).contiguous()
            return linear, Unpacked(numbers.data_ptr(), 0, 0, (numbers,))
        if format not in _SCALED_BY_GROUP:
            linear.scale = self._padded(quantized.scale)
        parts = [quantized.data.contiguous(), quantized.scale.contiguous()]
        if quantized.minimum is not None:
            parts.append(quantized.minimum.contiguous())
        by_group = [part.data_ptr() for part in parts[1:]] if format in _SCALED_BY_GROUP else []
        scale, minimum, *_ = [*by_group, 0, 0]
        return linear, Unpacked(parts[0].data_ptr(), scale, minimum, tuple(parts))

    def pack(self, matrix: Matrix, bias: Tensor | None = None) -> Linear:
        """On this thread alone; a model packs on all of its threads."""
        linear, unpacked = self.place(matrix, bias)
        self._library.calls.ts_pack(linear, unpacked.numbers, unpacked.scale, unpacked.minimum)
        return linear

    def _take(self, num_bytes: int) -> int:
        rounded = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        address, left = self._free
        if rounded > left:
            size = max(rounded, _PIECE_BYTES)
            piece = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._pieces.append(piece)
            address, left = ctypes.addressof(ctypes.c_char.from_buffer(piece)), size
            self._library.calls.ts_large_pages(address, size)
        self._free = (address + rounded, left - rounded)
        return address

    def _padded(self, values: Tensor) -> int:
        padded = torch.zeros(-(-len(values) // _STRIP) * _STRIP)
        padded[: len(values)] = values
        self._kept.append(padded)
        return padded.data_ptr()


def multiply(library: Library, linear: Linear, inputs: Tensor, variant: int = 0) -> Tensor:
    """inputs [rows, linear.columns] fp32 -> [rows, linear.rows] fp32, on this thread alone. For tests and measurements."""
    width = -(-linear.rows // _STRIP) * _STRIP
    outputs = torch.empty(len(inputs), width)
    library.calls.ts_multiply(linear, variant, inputs.contiguous().data_ptr(), len(inputs), outputs.data_ptr())
    return outputs[:, : linear.rows]


def unpacked_row(library: Library, linear: Linear, row: int) -> Tensor:
    """Row `row` of a packed matrix, fp32 [columns]."""
    numbers = np.empty(linear.columns, dtype=np.float32)
    library.calls.ts_unpack_row(linear, row, numbers.ctypes.data)
    return torch.from_numpy(numbers)
