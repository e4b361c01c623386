"""A weight matrix in few bits, as a file keeps it: row-major, nothing packed for a kernel.

format      a weight's value                                bits a weight      GGUF's name
int8        scale[row] * q,  q in -127..127                 8 + 32 / columns
int8_g32    scale[row, group of 32] * q                     8.5                Q8_0
int4        scale[row, group] * q + minimum[row, group]     5                  Q4_1;  q in 0..15
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # numbers of a row that share a scale
_HALF = GROUP // 2


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix [rows, columns]; rows are outputs.

    int8:     data int8 [rows, columns], scale fp32 [rows]
    int8_g32: data int8 [rows, columns], scale fp16 [rows, columns / 32]
    int4:     data uint8 [rows, columns / 2], scale and minimum fp16 [rows, columns / 32]; of a group's 16 bytes, byte j has
              element j in its low and element j + 16 in its high four bits
    """

    format: str
    data: Tensor
    scale: Tensor
    minimum: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def columns(self) -> int:
        return self.data.shape[1] * (2 if self.format == "int4" else 1)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.scale, self.minimum) if part is not None)

    def dequantize(self) -> Tensor:
        """fp32 [rows, columns]"""
        if self.format == "int8":
            return self.data.float().mul_(self.scale[:, None])
        if self.format == "int8_g32":
            groups = self.data.view(self.rows, -1, GROUP).float()
        else:
            packed = self.data.view(self.rows, -1, _HALF)
            groups = torch.cat((packed & 15, packed >> 4), dim=-1).float()
        groups.mul_(self.scale.float().unsqueeze(-1))
        if self.minimum is not None:
            groups.add_(self.minimum.float().unsqueeze(-1))
        return groups.flatten(1)

    def take_rows(self, index: Tensor) -> QuantizedTensor:
        minimum = None if self.minimum is None else self.minimum[index]
        return QuantizedTensor(self.format, self.data[index], self.scale[index], minimum)


def concatenate(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """The rows of all, which have the same format and columns."""
    assert len({(part.format, part.columns) for part in parts}) == 1, [(part.format, part.columns) for part in parts]
    minimums = [part.minimum for part in parts if part.minimum is not None]
    return QuantizedTensor(
        parts[0].format,
        torch.cat([part.data for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(minimums) if minimums else None,
    )


def quantize(weight: Tensor, format: str) -> QuantizedTensor:
    """From any float [rows, columns] to the nearest values of `format`, one of QUANTIZERS; columns divide by 32 (int8: any)."""
    return QUANTIZERS[format](weight.float())


def _to_int8(weight: Tensor) -> QuantizedTensor:
    scale = weight.abs().amax(dim=1) / 127
    return QuantizedTensor("int8", _rounded(weight, scale[:, None], -127, 127).to(torch.int8), scale)


def _to_int8_g32(weight: Tensor) -> QuantizedTensor:
    groups = weight.reshape(len(weight), -1, GROUP)
    scale = (groups.abs().amax(dim=-1) / 127).half()
    numbers = _rounded(groups, scale.float().unsqueeze(-1), -127, 127).to(torch.int8)
    return QuantizedTensor("int8_g32", numbers.flatten(1), scale)


def _to_int4(weight: Tensor) -> QuantizedTensor:
    groups = weight.reshape(len(weight), -1, GROUP)
    least, most = groups.amin(dim=-1), groups.amax(dim=-1)
    scale, minimum = ((most - least) / 15).half(), least.half()
    # By the rounded scale and minimum, which are what the values are made of later.
    above = groups - minimum.float().unsqueeze(-1)
    numbers = _rounded(above, scale.float().unsqueeze(-1), 0, 15).to(torch.uint8)
    return QuantizedTensor("int4", pack_int4(numbers), scale, minimum)


def pack_int4(groups: Tensor) -> Tensor:
    """uint8 [rows, groups, 32] of 0..15 -> int4's `data`"""
    return (groups[..., :_HALF] | groups[..., _HALF:] << 4).flatten(1)


def _rounded(values: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
    """values / scale, 0 where the scale is."""
    return torch.where(scale > 0, values / scale, 0.0).round().clamp(least, most)


QUANTIZERS: dict[str, Callable[[Tensor], QuantizedTensor]] = {
    "int8": _to_int8,
    "int8_g32": _to_int8_g32,
    "int4": _to_int4,
}
