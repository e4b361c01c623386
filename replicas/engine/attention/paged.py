"""The serving path: decode tokens in groups, prompt chunks in tiles, both over gathered copies of the blocks they read.

Grouped-query attention copies no keys: the query heads that share a key head become rows of one matrix product.

    decode    rows of similar context -> one batch of products [group, context] with the padding masked
    chunk     query tiles of _TILE_QUERIES tokens, each against the context up to its own end

The copies of a layer are freed before the next. A decode group's hold at most _MAX_GROUP_BLOCKS blocks (or one
sequence), a chunk's one sequence; no score matrix of a chunk is ever held whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from replicas.engine.attention.kv_cache import KVCache
from replicas.engine.batch import Span

_TILE_QUERIES = 128
_MAX_GROUP_BLOCKS = 8192
# A group's shortest table is at least this share of its longest: padding costs at most as much again.
_MIN_FILL = 0.5
# Keys (context times key heads) from which a lone decode row is a group as well: see PagedStep._attend_group.
_MIN_LONE_KEYS = 1024


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Spans of one row each. `mask` is [spans * num_kv_heads, 1, padded context]: 0 for what a row sees, else -inf."""

    rows: slice
    gather_index: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries of one span against its first `context_len` tokens. `mask` is None for one query: it sees all of them."""

    rows: slice
    context_len: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    gather_index: Tensor
    tiles: tuple[_Tile, ...]


class PagedAttention:
    """`num_heads` are query heads."""

    def __init__(self, cache: KVCache, num_heads: int) -> None:
        self._cache = cache
        self._num_heads = num_heads
        self._causal_mask = torch.empty(0, 0, device=cache.device, dtype=cache.dtype)

    def prepare(self, spans: Sequence[Span]) -> PagedStep:
        block_size = self._cache.block_size
        num_decodes = next((index for index, span in enumerate(spans) if span.num_rows > 1), len(spans))
        groups, chunks = [], []
        for members in group_by_length(spans[:num_decodes], block_size):
            if len(members) > 1 or members[0].context_len * self._cache.num_kv_heads >= _MIN_LONE_KEYS:
                groups.append(self._decode_group(members))
            else:
                chunks.append(self._chunk(members[0]))
        chunks.extend(self._chunk(span) for span in spans[num_decodes:])
        return PagedStep(self._cache, tuple(groups), tuple(chunks))

    def _decode_group(self, spans: Sequence[Span]) -> _DecodeGroup:
        cache = self._cache
        num_blocks = -(-max(span.context_len for span in spans) // cache.block_size)
        # Padding repeats the sequence's own first block: whatever it reads there, it reads of nobody else.
        tables = [[*(table := span.block_table[:num_blocks]), *[table[0]] * (num_blocks - len(table))] for span in spans]
        context_lens = torch.tensor([span.context_len for span in spans], device=cache.device)
        padding = torch.arange(num_blocks * cache.block_size, device=cache.device) >= context_lens.unsqueeze(1)
        mask = torch.zeros(padding.shape, device=cache.device, dtype=cache.dtype).masked_fill_(padding, -torch.inf)
        mask = mask.repeat_interleave(cache.num_kv_heads, dim=0).unsqueeze(1)
        return _DecodeGroup(slice(spans[0].first_row, spans[-1].end_row), cache.gather_index(tables), mask)

    def _chunk(self, span: Span) -> _Chunk:
        num_blocks = -(-span.context_len // self._cache.block_size)
        tiles = []
        for first in range(0, span.num_rows, _TILE_QUERIES):
            num_queries = min(_TILE_QUERIES, span.num_rows - first)
            rows = slice(span.first_row + first, span.first_row + first + num_queries)
            context_len = span.start + first + num_queries
            mask = self._tile_mask(num_queries, context_len) if num_queries > 1 else None
            tiles.append(_Tile(rows, context_len, mask))
        return _Chunk(self._cache.gather_index([span.block_table[:num_blocks]]), tuple(tiles))

    def _tile_mask(self, num_queries: int, context_len: int) -> Tensor:
        """[num_queries * group, context_len], where row (t, g) sees all but the last num_queries - 1 - t columns.

        All tiles' masks are the lower right corner of one matrix, which grows with the longest context seen:

            0 0 0 0 0 0 0 . . .
            0 0 0 0 0 0 0 0 . .     . is -inf
            0 0 0 0 0 0 0 0 0 .
            0 0 0 0 0 0 0 0 0 0
        """
        group = self._num_heads // self._cache.num_kv_heads
        if self._causal_mask.shape[1] < context_len:
            width = max(2 * _TILE_QUERIES, 1 << (context_len - 1).bit_length())
            corner = torch.full((_TILE_QUERIES, _TILE_QUERIES), -torch.inf, device=self._cache.device).triu_(1)
            mask = torch.zeros(_TILE_QUERIES * group, width, device=self._cache.device, dtype=self._cache.dtype)
            mask[:, width - _TILE_QUERIES :] = corner.repeat_interleave(group, dim=0)
            self._causal_mask = mask
        num_rows, width = self._causal_mask.shape
        return self._causal_mask[num_rows - num_queries * group :, width - context_len :]


class PagedStep:
    def __init__(self, cache: KVCache, groups: tuple[_DecodeGroup, ...], chunks: tuple[_Chunk, ...]) -> None:
        self._cache = cache
        self._groups = groups
        self._chunks = chunks

    def attend(self, layer: int, query: Tensor) -> Tensor:
        output = torch.empty(query.shape, device=query.device, dtype=query.dtype)
        for group in self._groups:
            self._attend_group(layer, group, query[group.rows], output[group.rows])
        for chunk in self._chunks:
            context = self._cache.gather(layer, chunk.gather_index)
            keys, values = context.view(2, 1, self._cache.num_kv_heads, -1, self._cache.head_dim)
            for tile in chunk.tiles:
                seen = slice(0, tile.context_len)
                _attend_tile(query[tile.rows], keys[:, :, seen], values[:, :, seen], tile.mask, output[tile.rows])
        return output

    def _attend_group(self, layer: int, group: _DecodeGroup, query: Tensor, output: Tensor) -> None:
        """Three products: fused attention costs less to call, but more per key. On a CPU (1 thread, bf16, 3 key heads, us):

        rows * context     1 * 128    1 * 512    1 * 4096    4 * 128    16 * 128    16 * 1024
        fused                   28         76         595         92         361         3250
        products                64         66         225         82         156         1157
        """
        num_rows, num_heads, head_dim = query.shape
        shape = (num_rows * self._cache.num_kv_heads, num_heads // self._cache.num_kv_heads, head_dim)
        keys, values = self._cache.gather(layer, group.gather_index).view(2, shape[0], -1, head_dim)
        scores = torch.baddbmm(group.mask, query.reshape(shape), keys.transpose(1, 2), alpha=head_dim**-0.5)
        torch.bmm(torch.softmax(scores, dim=-1), values, out=output.view(shape))


def _attend_tile(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, output: Tensor) -> None:
    """query, output: [queries, num_heads, head_dim]; keys, values: [1, num_kv_heads, context, head_dim]."""
    num_queries, _, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    folded = query.reshape(num_queries, num_kv_heads, -1, head_dim).transpose(0, 1).reshape(1, num_kv_heads, -1, head_dim)
    attended = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    output.view(num_queries, num_kv_heads, -1, head_dim).copy_(
        attended.view(num_kv_heads, num_queries, -1, head_dim).transpose(0, 1)
    )


def group_by_length(spans: Sequence[Span], block_size: int) -> list[Sequence[Span]]:
    """Cut spans, ordered by falling context, into runs of similar length and bounded size."""
    groups: list[Sequence[Span]] = []
    first = 0
    for index in range(1, len(spans) + 1):
        longest = -(-spans[first].context_len // block_size)
        if index < len(spans):
            blocks = -(-spans[index].context_len // block_size)
            if blocks >= _MIN_FILL * longest and (index + 1 - first) * longest <= _MAX_GROUP_BLOCKS:
                continue
        groups.append(spans[first:index])
        first = index
    return groups
