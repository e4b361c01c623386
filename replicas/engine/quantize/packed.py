"""Matrices of four bits as the tools AWQ and GPTQ pack them, eight numbers in an int32.

    value[out, in] = scale[group, out] * (q[in, out] - zero[group, out])

        qweight               the eight numbers of a word             qzeros                  order from the lowest bits on
gptq    [in / 8, out]         eight inputs of one output              [groups, out / 8]       as they are
awq     [in, out / 8]         eight outputs of one input              [groups, out / 8]       0 2 4 6 1 3 5 7, both

Our int4 is the same but for rounding: its minimum, -scale * zero, is a number of 16 bits. Where the zero is no power of two,
that moves a value by at most 1/128 of a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine.quantize.formats import GROUP, QuantizedTensor, pack_int4
from replicas.engine.quantize.scheme import WHOLE_ROW, Scheme, unsupported
from replicas.errors import ConfigError

Read = Callable[[str], Tensor | None]
"""A tensor of the checkpoint by its name, None if there is none."""

_PER_WORD = 8
_MOST_ZERO = 16
# Where element i of a word of AWQ stands, counted from its lowest bits.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """`numbers` uint8 [out, in], 0..15; `scale` and `zero` [out, groups], in the file's format and uint8."""

    numbers: Tensor
    scale: Tensor
    zero: Tensor

    def dequantize(self) -> Tensor:
        """fp32 [out, in], without the rounding of `quantized`."""
        groups = self.numbers.view(*self.scale.shape, -1).float()
        return groups.sub_(self.zero.float().unsqueeze(-1)).mul_(self.scale.float().unsqueeze(-1)).flatten(1)

    def quantized(self) -> QuantizedTensor:
        rows, columns = self.numbers.shape
        repeats = columns // self.scale.shape[1] // GROUP
        scale, minimum = self.scale.half(), (self.scale.float() * self.zero.float()).neg_().half()
        scale, minimum = (part.repeat_interleave(repeats, dim=1).contiguous() for part in (scale, minimum))
        return QuantizedTensor("int4", pack_int4(self.numbers.view(rows, -1, GROUP)), scale, minimum)


def read_packed(read: Read, name: str, shape: tuple[int, ...], scheme: Scheme) -> PackedMatrix | None:
    """`name` as the scheme packs it; None if the file doesn't. Raises ConfigError if it doesn't fit `shape` [out, in]."""
    module = name.removesuffix(".weight")
    words = read(f"{module}.qweight")
    if words is None or len(shape) != 2:
        return None
    rows, columns = shape
    size = columns if scheme.group_size == WHOLE_ROW else scheme.group_size
    if columns % size or columns % GROUP:
        raise unsupported(f"{module}: {columns} inputs in groups of {size}", f"only whole groups, of multiples of {GROUP}")
    if rows % _PER_WORD:
        raise unsupported(f"{module}: {rows} outputs", f"only multiples of {_PER_WORD}")
    num_groups = columns // size
    packed_shape = (columns // _PER_WORD, rows) if scheme.method == "gptq" else (columns, rows // _PER_WORD)
    _check(f"{module}.qweight", words, packed_shape)
    zeros = _found(read, f"{module}.qzeros", (num_groups, rows // _PER_WORD))
    scale = _found(read, f"{module}.scales", (num_groups, rows))
    if not bool((scale.float() * _MOST_ZERO).half().isfinite().all()):
        raise ConfigError(f"tensor {module}.scales has numbers too large for 16 bits, or that are none")
    _check_order(read, module, columns, size, scheme)
    if scheme.method == "gptq":
        numbers, zero = _nibbles(words.t()), _nibbles(zeros).t()
    else:
        numbers, zero = (_reordered(_nibbles(part)).t() for part in (words, zeros))
    # A stored 15 stands for 16, as in the kernels that the files are made for: the sum doesn't wrap.
    return PackedMatrix(numbers.contiguous(), scale.t().contiguous(), zero.contiguous() + scheme.zero_offset)


def _found(read: Read, name: str, shape: tuple[int, int]) -> Tensor:
    found = read(name)
    if found is None:
        raise ConfigError(f"the model's files have no tensor {name}")
    _check(name, found, shape)
    return found


def _check(name: str, found: Tensor, shape: tuple[int, int]) -> None:
    if tuple(found.shape) != shape:
        raise ConfigError(f"tensor {name} has the shape {tuple(found.shape)}, config.json says {shape}")


def _check_order(read: Read, module: str, columns: int, size: int, scheme: Scheme) -> None:
    """Inputs sorted by their activations (desc_act) lie in groups that our format can't say."""
    order = read(f"{module}.g_idx") if scheme.method == "gptq" else None
    if order is None and not scheme.reorders:
        return
    if order is None or not torch.equal(order.long(), torch.arange(columns) // size):
        raise unsupported(f"desc_act, in {module}.g_idx", "only inputs in the order of their groups")


def _nibbles(words: Tensor) -> Tensor:
    """int32 [rows, words] -> uint8 [rows, 8 * words], from the lowest bits on"""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _reordered(numbers: Tensor) -> Tensor:
    return numbers.view(len(numbers), -1, _PER_WORD)[..., list(_AWQ_PLACES)].flatten(1)
