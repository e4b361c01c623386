"""Decode attention of fixed shapes: everything that changes from step to step is a number in a buffer, never a shape.

That is what a CUDA graph needs. A step is rounded up to a bucket, and the rest of the bucket is padding:

    bucket (4 sequences, 8 blocks), 3 sequences of 2, 5 and 1 blocks of context

    token_ids       a  b  c  0
    slots           .  .  .  p         p: in a block reserved for padding, which nobody reads but padding
    context_lens   30 70  9  1
    block_tables   a0 a1 a0 a0 a0 a0 a0 a0        a sequence's own first block, masked: it reads of nobody else
                   b0 b1 b2 b3 b4 b0 b0 b0
                   c0 c0 c0 c0 c0 c0 c0 c0
                    p  p  p  p  p  p  p  p

Plain torch ops: it runs on any device, and is proven on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine.attention.kv_cache import KVCache
from replicas.engine.batch import Batch, Span

# The four limits are counted, not measured: from the bytes that a gather moves against a few microseconds a launch.
# Short contexts share one bucket: below this, a graph of its own saves less than a launch.
_MIN_BLOCKS = 8
# Blocks gathered a step, padding included. Where it is more, attention is what a step costs and launches are not; the
# serving path then pads less, because it groups by length.
_MAX_CELLS = 8192
# A bucket is taken if this share of it is used. Rounding both numbers up to powers of two leaves more than that, so only
# batches of very unequal contexts fall out, and those not below _FREE_CELLS, where padding costs less than launches do.
_MIN_FILL = 0.25
_FREE_CELLS = 1024


@dataclass(frozen=True, slots=True)
class Bucket:
    num_seqs: int
    num_blocks: int  # of each sequence's table

    @property
    def num_cells(self) -> int:
        return self.num_seqs * self.num_blocks


class Buckets:
    """Powers of two up to `max_seqs` sequences and `max_blocks` blocks, the last of each being the limit itself."""

    def __init__(self, max_seqs: int, max_blocks: int) -> None:
        assert max_seqs > 0, max_seqs
        assert max_blocks > 0, max_blocks
        self.max_seqs = max_seqs
        self.max_blocks = max_blocks

    def choose(self, spans: Sequence[Span], block_size: int) -> Bucket | None:
        """The bucket of a step; None where it isn't one of decode tokens alone, or none is worth its padding.

        The spans are in a Batch's order: longer ones last, then by falling context.
        """
        if not 0 < len(spans) <= self.max_seqs or spans[-1].num_rows > 1:
            return None
        lengths = [-(-span.context_len // block_size) for span in spans]
        if max(lengths) > self.max_blocks:
            return None
        bucket = Bucket(_round_up(len(spans), 1, self.max_seqs), _round_up(max(lengths), _MIN_BLOCKS, self.max_blocks))
        worth_it = bucket.num_cells <= max(_FREE_CELLS, sum(lengths) / _MIN_FILL)
        return bucket if worth_it and bucket.num_cells <= _MAX_CELLS else None

    def all(self) -> list[Bucket]:
        """Every bucket that `choose` can return, the largest first."""
        sizes = {_round_up(size, 1, self.max_seqs) for size in range(1, self.max_seqs + 1)}
        widths = {_round_up(width, _MIN_BLOCKS, self.max_blocks) for width in range(1, self.max_blocks + 1)}
        buckets = [Bucket(size, width) for size in sizes for width in widths]
        fitting = [bucket for bucket in buckets if bucket.num_cells <= _MAX_CELLS]
        return sorted(fitting, key=lambda bucket: (-bucket.num_cells, -bucket.num_seqs))


def _round_up(number: int, least: int, most: int) -> int:
    return min(max(least, 1 << (number - 1).bit_length()), most)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A bucket's view of the buffers, all int64: [num_seqs] each, block_tables [num_seqs, num_blocks]."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    context_lens: Tensor
    block_tables: Tensor


class DecodeBuffers:
    """One piece of device memory for the inputs of any bucket, so that a step's are one copy to the device.

    `padding_block` is a block of the cache that no sequence ever gets.
    """

    def __init__(self, cache: KVCache, buckets: Buckets, padding_block: int) -> None:
        assert 0 <= padding_block < cache.num_blocks, (padding_block, cache.num_blocks)
        self._padding_block = padding_block
        self._padding_slot = padding_block * cache.block_size
        self._block_size = cache.block_size
        size = max(4 * bucket.num_seqs + bucket.num_cells for bucket in buckets.all())
        self._data = torch.zeros(size, dtype=torch.int64, device=cache.device)

    def views(self, bucket: Bucket) -> DecodeInputs:
        """Always at the same addresses for the same bucket."""
        size = bucket.num_seqs
        token_ids, positions, slots, context_lens = self._data[: 4 * size].view(4, size).unbind()
        tables = self._data[4 * size : 4 * size + bucket.num_cells].view(size, bucket.num_blocks)
        return DecodeInputs(token_ids, positions, slots, context_lens, tables)

    def fill(self, batch: Batch | None, bucket: Bucket) -> None:
        """The batch, then padding; None: padding alone."""
        spans = batch.spans if batch is not None else []
        padding = bucket.num_seqs - len(spans)
        numbers = [*(batch.token_ids if batch is not None else ()), *[0] * padding]
        numbers += [*(batch.positions if batch is not None else ()), *[0] * padding]
        numbers += [*(batch.slots if batch is not None else ()), *[self._padding_slot] * padding]
        numbers += [*(span.context_len for span in spans), *[1] * padding]
        for span in spans:
            # What lies behind the context may be anybody's by now, so it is not copied.
            table = span.block_table[: -(-span.context_len // self._block_size)]
            numbers += table
            numbers += [table[0]] * (bucket.num_blocks - len(table))
        numbers += [self._padding_block] * (padding * bucket.num_blocks)
        assert len(numbers) == 4 * bucket.num_seqs + bucket.num_cells, (len(numbers), bucket)
        self._data[: len(numbers)].copy_(torch.tensor(numbers, dtype=torch.int64))


class StaticAttention:
    """Not an AttentionBackend: those take Python's spans, this takes tensors. What it gives for a step is a StepAttention."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        kv_heads = cache.num_kv_heads
        self._head_rows = torch.arange(2 * kv_heads, device=cache.device).view(2, 1, kv_heads, 1) * cache.num_blocks

    def begin(self, block_tables: Tensor, context_lens: Tensor) -> StaticStep:
        """What the layers of a step share. block_tables: [num_seqs, num_blocks], context_lens: [num_seqs], int64.

        As KVCache.gather_index, but from a tensor: no number passes through the host.
        """
        cache = self._cache
        index = (self._head_rows + block_tables.unsqueeze(1)).flatten()
        positions = torch.arange(block_tables.shape[1] * cache.block_size, device=cache.device)
        unseen = positions >= context_lens.unsqueeze(1)
        mask = torch.zeros(unseen.shape, device=cache.device, dtype=cache.dtype).masked_fill_(unseen, -torch.inf)
        by_head = mask.unsqueeze(1).expand(-1, cache.num_kv_heads, -1)
        return StaticStep(cache, index, by_head.reshape(-1, 1, mask.shape[1]))


class StaticStep:
    """`mask` is [num_seqs * num_kv_heads, 1, num_blocks * block_size]: 0 for what a row sees, else -inf."""

    def __init__(self, cache: KVCache, gather_index: Tensor, mask: Tensor) -> None:
        self._cache = cache
        self._gather_index = gather_index
        self._mask = mask

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """As StepAttention.attend, for one row a sequence."""
        num_rows, num_heads, head_dim = query.shape
        kv_heads = self._cache.num_kv_heads
        shape = (num_rows * kv_heads, num_heads // kv_heads, head_dim)
        keys, values = self._cache.gather(layer, self._gather_index).view(2, shape[0], -1, head_dim)
        scores = torch.baddbmm(self._mask, query.reshape(shape), keys.transpose(1, 2), alpha=head_dim**-0.5)
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(query.shape)
