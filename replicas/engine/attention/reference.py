"""Attention in the plainest terms that still fit in memory: one sequence, one head group, one tile of keys at a time.

The online softmax keeps, for each query row, the largest score so far, the sum of exponentials relative to it, and the
weighted sum of values; a new tile rescales the last two when it raises the first (Milakov & Gimelshein, 2018). Everything
is fp32, so it also shows what rounding costs the fast path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replicas.engine.attention.kv_cache import KVCache
from replicas.engine.batch import Span

_TILE_BLOCKS = 4


class ReferenceAttention:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def prepare(self, spans: Sequence[Span]) -> ReferenceStep:
        return ReferenceStep(self._cache, spans)


class ReferenceStep:
    def __init__(self, cache: KVCache, spans: Sequence[Span]) -> None:
        self._cache = cache
        self._spans = spans

    def attend(self, layer: int, query: Tensor) -> Tensor:
        outputs = [self._attend_span(layer, query[span.first_row : span.end_row], span) for span in self._spans]
        return torch.cat(outputs).to(query.dtype)

    def _attend_span(self, layer: int, query: Tensor, span: Span) -> Tensor:
        cache = self._cache
        num_rows, num_heads, head_dim = query.shape
        grouped = query.float().view(num_rows, cache.num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [kv, group, rows, dim]
        positions = torch.arange(span.start, span.context_len, device=query.device)
        best = torch.full((*grouped.shape[:3], 1), -torch.inf, device=query.device)
        total = torch.zeros_like(best)
        weighted = torch.zeros_like(grouped)
        num_blocks = -(-span.context_len // cache.block_size)
        for first_block in range(0, num_blocks, _TILE_BLOCKS):
            blocks = span.block_table[first_block : min(first_block + _TILE_BLOCKS, num_blocks)]
            first_position = first_block * cache.block_size
            num_keys = min(len(blocks) * cache.block_size, span.context_len - first_position)
            tile = cache.gather(layer, cache.gather_index([blocks])).view(2, cache.num_kv_heads, 1, -1, head_dim)
            keys, values = tile[:, :, :, :num_keys].float()
            scores = grouped @ keys.transpose(-1, -2) * head_dim**-0.5
            key_positions = torch.arange(first_position, first_position + num_keys, device=query.device)
            scores = scores.masked_fill(key_positions > positions.unsqueeze(1), -torch.inf)
            new_best = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
            exponentials = torch.exp(scores - new_best)
            rescale = torch.exp(best - new_best)
            total = total * rescale + exponentials.sum(dim=-1, keepdim=True)
            weighted = weighted * rescale + exponentials @ values
            best = new_best
        return (weighted / total).permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)
