"""Linear maps with weights and activations in fp8 (e4m3), for devices that multiply it: half of bf16's bytes, twice its rate.

Each output channel of a weight and each row (token) of an activation has a scale of its own, its largest magnitude over 448.
One scale for a whole activation would let one outlier round everybody else's numbers away.

    out[m, n] = scale_x[m] * scale_w[n] * sum_k x8[m, k] * w8[n, k] + bias[n]       sums in fp32, rounded to bf16 once
"""

from __future__ import annotations

import torch
from torch import Tensor

from replicas.engine.models.layers import Linear, linear

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
# The least scale: a row of zeros stays zeros, and no quotient overflows.
_LEAST_SCALE = 1e-12
# Both sizes of a weight must be multiples of this for the device's kernels.
_ALIGNMENT = 16
_MIN_CAPABILITY = (8, 9)


def supports_fp8(device: torch.device) -> bool:
    """Whether the device multiplies fp8 itself: NVIDIA from Ada and Hopper on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY


def fp8_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x @ weight.T + bias, all in bf16: torch's kernels with a scale for each row give nothing else.

    The weight is copied, so the caller should keep no reference to it.

    A weight whose sizes are not multiples of 16 stays as it is.
    """
    assert weight.dtype == torch.bfloat16, weight.dtype
    if any(size % _ALIGNMENT for size in weight.shape):
        return linear(weight, bias)
    quantized, scales = quantize_rows(weight)
    columns, column_scales = quantized.t(), scales.t()

    def apply(x: Tensor) -> Tensor:
        rows, row_scales = quantize_rows(x)
        result: Tensor = torch._scaled_mm(
            rows, columns, scale_a=row_scales, scale_b=column_scales, bias=bias, out_dtype=torch.bfloat16
        )
        return result

    return apply


def plain_fp8_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The twin: the same rounding, but the products are those of fp32 matrices."""
    quantized, scales = quantize_rows(weight)

    def apply(x: Tensor) -> Tensor:
        rows, row_scales = quantize_rows(x)
        product = (rows.float() @ quantized.float().t()) * row_scales * scales.t()
        return (product if bias is None else product + bias.float()).to(x.dtype)

    return apply


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(fp8 [rows, columns], scales fp32 [rows, 1]) of x [rows, columns]. A row that isn't finite becomes NaN, alone."""
    exact = x.float()
    scales = exact.abs().amax(dim=-1, keepdim=True).div_(_LARGEST).clamp_(min=_LEAST_SCALE)
    # Rounding may take the largest number a little above what fp8 holds, and the cast doesn't saturate everywhere.
    return (exact / scales).clamp_(-_LARGEST, _LARGEST).to(FP8), scales
