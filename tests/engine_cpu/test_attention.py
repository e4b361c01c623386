"""The serving path of attention is proven by the reference, and the reference by the textbook formula."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.blocks import BLOCK_SIZE
from replicas.engine.attention import paged
from replicas.engine.attention.kv_cache import KVCache
from replicas.engine.attention.paged import PagedAttention, group_by_length
from replicas.engine.attention.reference import ReferenceAttention
from replicas.engine.batch import Span

NUM_BLOCKS = 160


def make_case(chunks, *, num_heads=6, num_kv_heads=2, head_dim=16, dtype=torch.float32, seed=0):
    """(cache with random contents, spans, query) for chunks (start, num_rows), decode tokens first as in a Batch."""
    torch.manual_seed(seed)
    cache = KVCache(
        num_layers=1,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    every_slot = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    cache.write(0, every_slot, torch.randn(len(every_slot), 2 * num_kv_heads, head_dim).to(dtype))
    free = random.Random(seed).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    spans, first_row = [], 0
    for start, num_rows in sorted(chunks, key=lambda chunk: (chunk[1] > 1, -chunk[0])):
        num_blocks = -(-(start + num_rows) // BLOCK_SIZE)
        spans.append(Span(first_row, num_rows, start, [free.pop() for _ in range(num_blocks)]))
        first_row += num_rows
    return cache, spans, torch.randn(first_row, num_heads, head_dim).to(dtype)


def attend(attention, spans, query):
    return attention.prepare(spans).attend(0, query)


def assert_paged_equals_reference(cache, spans, query, tolerance=1e-5):
    expected = attend(ReferenceAttention(cache), spans, query)
    actual = attend(PagedAttention(cache, query.shape[1]), spans, query)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_reference_equals_the_textbook_formula():
    cache, [span], query = make_case([(37, 41)])
    blocks = cache.gather(0, cache.gather_index([span.block_table])).view(2, 2, -1, 16)
    keys, values = blocks[:, :, : span.context_len].repeat_interleave(3, dim=1)
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) / 16**0.5
    unseen = torch.arange(78) > torch.arange(37, 78).unsqueeze(1)
    expected = torch.softmax(scores.masked_fill(unseen, -torch.inf), dim=-1) @ values
    torch.testing.assert_close(attend(ReferenceAttention(cache), [span], query), expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200])
def test_a_decode_token_equals_the_reference_at_every_block_boundary(context):
    assert_paged_equals_reference(*make_case([(context - 1, 1)]))
    assert_paged_equals_reference(*make_case([(context - 1, 1), (context + 2, 1), (max(context - 4, 0), 1)]))


@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 130])
@pytest.mark.parametrize("num_rows", [2, 15, 16, 17, 127, 128, 129, 300])
def test_a_chunk_equals_the_reference_at_every_block_and_tile_boundary(start, num_rows):
    assert_paged_equals_reference(*make_case([(start, num_rows)]))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 8), (8, 1, 32), (9, 3, 64), (2, 2, 128)])
def test_head_groups_of_every_shape_equal_the_reference(num_heads, num_kv_heads, head_dim):
    case = make_case([(40, 1), (50, 1), (0, 20), (33, 7)], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    assert_paged_equals_reference(*case)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_half_formats_stay_within_their_rounding_of_the_reference(dtype, tolerance):
    assert_paged_equals_reference(*make_case([(99, 1), (120, 1), (0, 40), (17, 150)], dtype=dtype), tolerance)


chunks = st.lists(st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 140))), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(chunks=chunks, seed=st.integers(0, 3))
def test_any_mixed_batch_equals_the_reference(chunks, seed):
    assert_paged_equals_reference(*make_case(chunks, seed=seed))


@settings(max_examples=20, deadline=None)
@given(chunks=chunks)
def test_one_backend_serves_steps_of_any_length_one_after_the_other(chunks):
    cache, spans, query = make_case(chunks)
    attention = PagedAttention(cache, query.shape[1])
    for span in spans:
        alone = Span(0, span.num_rows, span.start, span.block_table)
        rows = query[span.first_row : span.end_row]
        expected = attend(ReferenceAttention(cache), [alone], rows)
        torch.testing.assert_close(attend(attention, [alone], rows), expected, atol=1e-5, rtol=1e-5)


def test_padding_of_a_group_reads_nothing_of_other_sequences():
    cache, spans, query = make_case([(100, 1), (60, 1), (90, 1)])
    expected = attend(PagedAttention(cache, 6), spans, query)
    mine = {block for span in spans for block in span.block_table}
    others = [block for block in range(NUM_BLOCKS) if block not in mine]
    slots = torch.tensor([block * BLOCK_SIZE + offset for block in others for offset in range(BLOCK_SIZE)])
    cache.write(0, slots, torch.full((len(slots), 4, 16), torch.nan))
    torch.testing.assert_close(attend(PagedAttention(cache, 6), spans, query), expected, atol=0, rtol=0)


def test_decode_tokens_are_grouped_so_that_padding_at_most_doubles_the_work():
    spans = [Span(row, 1, start, ()) for row, start in enumerate([1599, 1000, 799, 500, 399, 10, 9, 0])]
    groups = group_by_length(spans, BLOCK_SIZE)
    assert [[span.start for span in group] for group in groups] == [[1599, 1000, 799], [500, 399], [10, 9, 0]]
    assert group_by_length([], BLOCK_SIZE) == []


def test_a_group_holds_no_more_blocks_than_its_bound(monkeypatch):
    monkeypatch.setattr(paged, "_MAX_GROUP_BLOCKS", 8)
    spans = [Span(row, 1, 60, ()) for row in range(5)]
    assert [len(group) for group in group_by_length(spans, BLOCK_SIZE)] == [2, 2, 1]
