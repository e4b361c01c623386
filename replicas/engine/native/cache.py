"""The KV cache of the native kernels. Layout: csrc/attention.h."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

from replicas.blocks import BLOCK_SIZE
from replicas.engine.native.library import FORMATS, Cache, Library

_ITEM_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
_SCALE_BYTES = 4


def bytes_per_block(format: str, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Keys and values of a block over all layers, with their scales for int8."""
    num_sides = 2 * num_layers * num_kv_heads
    scales = num_sides * _SCALE_BYTES if format == "int8" else 0
    return num_sides * BLOCK_SIZE * head_dim * _ITEM_BYTES[format] + scales


class NativeKVCache:
    """`format` is fp32, bf16 or int8. Pages of memory are taken as blocks are first written."""

    def __init__(
        self, library: Library, *, format: str, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int
    ) -> None:
        self.format = format
        self.num_blocks = num_blocks
        self.block_size = BLOCK_SIZE
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._library = library
        num_sides = num_layers * num_blocks * num_kv_heads * 2
        num_bytes = num_sides * BLOCK_SIZE * head_dim * _ITEM_BYTES[format]
        # Not torch.zeros, which would write all of it: a quarter of a machine's memory takes seconds.
        self._numbers = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._scales = torch.zeros(num_sides if format == "int8" else 1)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._numbers))
        library.calls.ts_large_pages(address, num_bytes)
        self.handle = Cache(FORMATS[format], num_layers, num_blocks, num_kv_heads, head_dim, address, self._scales.data_ptr())

    def read(self, layer: int, block: int, head: int, offset: int) -> tuple[Tensor, Tensor]:
        """(key, value) of one token, fp32 [head_dim] each. For tests."""
        key, value = np.empty((2, self.head_dim), dtype=np.float32)
        self._library.calls.ts_read_token(self.handle, layer, block, head, offset, key.ctypes.data, value.ctypes.data)
        return torch.from_numpy(key), torch.from_numpy(value)
