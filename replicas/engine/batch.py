"""Lays out a StepPlan as flat rows for the model. Pure, no torch.

    chunks of the plan:   A: prompt tokens 32..36     B: one decode token     C: one decode token, longer context
    rows of the batch:    | C | B | A A A A |         decode tokens first, longest context first

That order lets attention take decode tokens of similar context as one slice of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.engine.step import SampleSpec, SequenceChunk, StepPlan


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [first_row, first_row + num_rows) are a sequence's tokens at positions start, start + 1, ..."""

    first_row: int
    num_rows: int
    start: int
    block_table: Sequence[int]  # at least the blocks of the context

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_rows

    @property
    def context_len(self) -> int:
        """Tokens that the last row sees, itself included."""
        return self.start + self.num_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """`sample_rows[i]` is the row whose logits `sample_specs[i]` draws from, for the plan's chunk `sample_chunks[i]`.
    Those of a chunk with draft tokens follow each other.

    `fresh_blocks` are blocks that this step begins to fill and leaves partly empty.
    """

    block_size: int
    token_ids: list[int]
    spans: list[Span]
    sample_rows: list[int]
    sample_specs: list[SampleSpec]
    sample_chunks: list[int]
    fresh_blocks: list[int]

    @property
    def positions(self) -> list[int]:
        return [position for span in self.spans for position in range(span.start, span.context_len)]

    @property
    def slots(self) -> list[int]:
        """Where the rows' keys and values go."""
        size = self.block_size
        return [
            span.block_table[position // size] * size + position % size
            for span in self.spans
            for position in range(span.start, span.context_len)
        ]


def build_batch(plan: StepPlan, block_size: int) -> Batch:
    batch = Batch(block_size, [], [], [], [], [], [])
    for index in sorted(range(len(plan.chunks)), key=lambda index: _row_order(plan.chunks[index])):
        chunk = plan.chunks[index]
        num_rows = len(chunk.token_ids)
        end = chunk.start + num_rows
        table = chunk.block_table
        assert num_rows > 0, chunk
        assert len(table) * block_size >= end, (chunk.request_id, len(table), end)
        span = Span(len(batch.token_ids), num_rows, chunk.start, table)
        batch.spans.append(span)
        batch.token_ids.extend(chunk.token_ids)
        last_block_start = (end - 1) // block_size * block_size
        if last_block_start >= chunk.start and end % block_size:
            batch.fresh_blocks.append(table[last_block_start // block_size])
        if chunk.sample is not None:
            num_samples = 1 + len(chunk.draft_samples)
            batch.sample_rows.extend(range(span.end_row - num_samples, span.end_row))
            batch.sample_specs.extend((chunk.sample, *chunk.draft_samples))
            batch.sample_chunks.extend([index] * num_samples)
    return batch


def _row_order(chunk: SequenceChunk) -> tuple[bool, int]:
    return len(chunk.token_ids) > 1, -chunk.start
