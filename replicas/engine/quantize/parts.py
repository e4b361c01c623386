"""A quantized matrix as tensors of a safetensors file of our own: `name.data`, `name.scale`, and int4's `name.minimum`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from replicas.engine.quantize.formats import GROUP, QuantizedTensor
from replicas.errors import ConfigError

_DATA, _SCALE, _MINIMUM = ".data", ".scale", ".minimum"


def parts_of(name: str, matrix: QuantizedTensor) -> dict[str, Tensor]:
    """The file's tensors, by their names."""
    parts = {_DATA: matrix.data, _SCALE: matrix.scale, _MINIMUM: matrix.minimum}
    return {name + suffix: part.contiguous() for suffix, part in parts.items() if part is not None}


def read_parts(read: Callable[[str], Tensor | None], name: str, shape: tuple[int, ...]) -> QuantizedTensor | None:
    """What `parts_of` gave, bit for bit; None if there is no such matrix. Raises ConfigError if it isn't of `shape`.

    The format shows in the number formats: a matrix needs no note of it, and files may mix them.
    """
    data, scale, minimum = (read(name + suffix) for suffix in (_DATA, _SCALE, _MINIMUM))
    if data is None:
        return None
    if scale is None or (data.dtype == torch.uint8) != (minimum is not None):
        raise ConfigError(f"the model's files have no whole {name}: {_SCALE} or {_MINIMUM} is missing, or one too many")
    format = "int4" if minimum is not None else "int8" if scale.dim() == 1 else "int8_g32"
    matrix = QuantizedTensor(format, data, scale, minimum)
    rows, columns = shape if len(shape) == 2 else (0, 0)
    by_group = (rows, columns // GROUP)
    expected = {
        _DATA: ((rows, columns // 2), torch.uint8) if format == "int4" else ((rows, columns), torch.int8),
        _SCALE: ((rows,), torch.float32) if format == "int8" else (by_group, torch.float16),
        _MINIMUM: (by_group, torch.float16),
    }
    for suffix, part in ((_DATA, data), (_SCALE, scale), (_MINIMUM, minimum)):
        if part is not None and (tuple(part.shape), part.dtype) != expected[suffix]:
            raise ConfigError(f"tensor {name}{suffix} is {part.dtype} {tuple(part.shape)}, config.json says {expected[suffix]}")
    return matrix
