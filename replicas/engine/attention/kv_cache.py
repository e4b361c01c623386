"""The paged KV cache, and the interface of the attention paths that read it.

Layout: [num_layers, 2 (k, v), num_kv_heads, num_blocks, block_size, head_dim]. Heads come before blocks so that gathering a
batch's blocks head by head gives contiguous [context, head_dim] matrices: the products of 16 sequences at 1000 tokens then
took 0.9 ms a layer instead of 2.7 ms with heads inside the block (2 threads, bf16).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from replicas.engine.batch import Span


class KVCache:
    """Memory for `num_blocks` blocks of all layers. A slot is block * block_size + offset."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.device = device
        self.dtype = dtype
        shape = (num_layers, 2 * num_kv_heads, num_blocks, block_size, head_dim)
        self._data = torch.zeros(shape, device=device, dtype=dtype)
        self._by_slot: list[Tensor] = [layer.view(2 * num_kv_heads, -1, head_dim) for layer in self._data]
        self._by_block: list[Tensor] = [layer.view(-1, block_size * head_dim) for layer in self._data]
        self._head_rows = torch.arange(2 * num_kv_heads, device=device).view(2, 1, num_kv_heads, 1) * num_blocks

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Store keys and values [rows, 2 * num_kv_heads, head_dim] (all keys, then all values) at slots [rows]."""
        self._by_slot[layer].index_copy_(1, slots, keys_values.transpose(0, 1))

    def gather_index(self, block_tables: Sequence[Sequence[int]]) -> Tensor:
        """What `gather` needs for sequences whose tables are equally long; the same for all layers of a step."""
        tables = torch.tensor(block_tables, dtype=torch.int64, device=self.device)
        index: Tensor = (self._head_rows + tables.unsqueeze(1)).flatten()
        return index

    def gather(self, layer: int, index: Tensor) -> Tensor:
        """A copy: [2 (k, v), sequences, num_kv_heads, blocks, block_size, head_dim], as [-1, block_size * head_dim]."""
        return self._by_block[layer].index_select(0, index)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Clear these blocks in all layers.

        The unused end of a sequence's last block is read and masked out, and 0 * NaN is NaN: without this, a sequence
        whose numbers overflowed would poison whoever gets its blocks next.
        """
        self._data.index_fill_(2, torch.tensor(blocks, dtype=torch.int64, device=self.device), 0)


class StepAttention(Protocol):
    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Causal attention of all rows of a step, whose keys and values are in the cache already.

        query: [rows, num_heads, head_dim], maybe a view. Returns [rows, num_heads, head_dim], contiguous. Query head h
        reads key head h // (num_heads / num_kv_heads); scores are scaled by head_dim ** -0.5.
        """


class AttentionBackend(Protocol):
    def prepare(self, spans: Sequence[Span]) -> StepAttention:
        """What a step needs once, before its layers. The spans cover the step's rows in order, without gaps."""
