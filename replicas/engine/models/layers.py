"""What a decoder layer is made of: linear maps, RMS norm, rotary positions. Rows are tokens.

Numbers round where transformers rounds: norms compute in fp32, cosines and sines are cast to the model's format once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from replicas.engine.models.config import RopeConfig
from replicas.engine.quantize.formats import QuantizedTensor

Linear = Callable[[Tensor], Tensor]
"""[rows, in] -> [rows, out]"""

# oneDNN lays out a packed weight for about this many rows; the layout serves any other number as well.
_PACKED_FOR_ROWS = 16


def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x @ weight.T + bias, by the fastest means for the weight's device and format.

    bf16 on a CPU: oneDNN, with the weight packed once at load. All linears of the embedded model took (2 threads, ms)

        rows      1    4   16   32  512
        plain    18   20   27   37  275
        packed   13   11   17   27  272
    """
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and packs_bf16():
        return packed_linear(weight, bias)
    return plain_linear(weight, bias)


@cache
def packs_bf16() -> bool:
    """Whether oneDNN can pack bf16 weights on this CPU. Without AVX-512 (or AVX-NE-CONVERT) it raises."""
    return bool(torch._C._has_mkldnn) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def quantized_linear(weight: QuantizedTensor, bias: Tensor | None = None) -> Linear:
    """The plain twin of quantized products: the weight becomes numbers again in each call. Slow, and right on any device."""

    def apply(x: Tensor) -> Tensor:
        return functional.linear(x, weight.dequantize().to(x.device, x.dtype), bias)

    return apply


def plain_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    return lambda x: functional.linear(x, weight, bias)


def packed_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The packed copy replaces the weight, so the caller should keep no reference to it."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    apply = torch.ops.mkldnn._linear_pointwise.default

    def packed_apply(x: Tensor) -> Tensor:
        result: Tensor = apply(x, packed, bias, "none", [], "")
        return result

    return packed_apply


class RmsNorm:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension; the weight may have more dimensions, e.g. one row a head.

    CUDA has a fused kernel; on a CPU that function is a longer chain of ops: 300 us and more against 165 us at 512 rows of 576.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._eps_tensor = torch.tensor(eps, dtype=torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return functional.rms_norm(x, x.shape[-1:], None, self._eps) * self._weight
        exact = x.to(torch.float32, copy=True)  # to be scaled in place: a second large buffer a call costs page faults
        norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_tensor, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return exact.mul_(scale).to(x.dtype).mul_(self._weight)


def rotary_angles(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, Tensor]:
    """(cos, sin) of all positions below `max_positions`, fp32 [max_positions, head_dim / 2] on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


class RotaryTable:
    """cos and sin of all positions below `max_positions`, each row as wide as a head: [max_positions, head_dim].

    A head's halves (a, b) become (a cos - b sin, b cos + a sin) = x * cos + roll(x) * signed_sin, where roll swaps the
    halves and the first half of signed_sin carries the minus.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        cos, sin = rotary_angles(rope, head_dim, max_positions)
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self._signed_sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, signed_sin) for `rotate_`, each [rows, 1, head_dim]."""
        return self._cos[positions].unsqueeze(1), self._signed_sin[positions].unsqueeze(1)


def rotate_(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Rotate heads [rows, num_heads, head_dim] in place; they may be a view into a fused projection."""
    rolled = heads.roll(heads.shape[-1] // 2, -1)
    torch.addcmul(heads * cos, rolled, signed_sin, out=heads)
