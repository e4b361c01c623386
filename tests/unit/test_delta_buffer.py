"""Merging deltas loses nothing and keeps their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.contract import Delta, FinishReason, TokenLogprob
from replicas.delta_buffer import DeltaBuffer, merge, split


def _deltas(chunks: list[list[int]], with_logprobs: bool) -> list[Delta]:
    """A whole sequence: facts of the beginning on the first delta, of the end on the last."""
    last = len(chunks) - 1
    return [
        Delta(
            "r",
            tuple(ids),
            FinishReason.STOP if i == last else None,
            tuple(TokenLogprob(token, -0.5) for token in ids) if with_logprobs else None,
            stop_token_id=7 if i == last else None,
            num_cached_tokens=48 if i == 0 else None,
            queue_s=0.25 if i == 0 else None,
        )
        for i, ids in enumerate(chunks)
    ]


chunks_of_tokens = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=12)


@given(chunks_of_tokens, st.booleans())
def test_a_merged_sequence_says_what_its_deltas_said(chunks, with_logprobs):
    whole = merge(_deltas(chunks, with_logprobs))
    ids = tuple(token for chunk in chunks for token in chunk)
    assert whole == _deltas([list(ids)], with_logprobs)[0]


@given(chunks_of_tokens, st.booleans(), st.data())
def test_a_split_delta_merges_to_itself(chunks, with_logprobs, data):
    whole = merge(_deltas(chunks, with_logprobs))
    if whole.token_ids:
        cut = data.draw(st.integers(0, len(whole.token_ids) - 1))
        head, tail = split(whole, cut)
        assert len(head.token_ids) == cut
        assert head.finish_reason is None
        assert merge([head, tail]) == whole


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20), chunks_of_tokens, st.booleans())
def test_whatever_the_reader_takes_at_a_time_it_gets_the_sequence(limits, chunks, with_logprobs):
    buffer, taken = DeltaBuffer(), []
    for delta in _deltas(chunks, with_logprobs):
        buffer.add(delta)
    while buffer:
        limit = limits[len(taken) % len(limits)]
        taken.append(buffer.take(limit))
        assert len(taken[-1].token_ids) <= limit
    assert merge(taken) == merge(_deltas(chunks, with_logprobs))
    assert buffer.num_tokens == 0


def test_a_delta_that_did_not_wait_is_passed_on_as_it_is():
    buffer, delta = DeltaBuffer(), Delta("r", (1,))
    buffer.add(delta)
    assert buffer.take() is delta


def test_a_delta_after_the_last_is_our_own_bug():
    with pytest.raises(AssertionError):
        merge([Delta("r", (1,), FinishReason.STOP), Delta("r", (2,))])


def test_what_waits_long_costs_little_more_than_its_tokens():
    buffer = DeltaBuffer()
    for token in range(10_000):
        buffer.add(Delta("r", (token,)))
        assert len(buffer._deltas) <= 256
    assert buffer.take().token_ids == tuple(range(10_000))
