"""Decode in fixed shapes is proven by the reference, and a graph of it by a tape: both without a GPU."""

from __future__ import annotations

import contextlib
import random
from unittest import mock

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_model import CPU, chunk, load_model, make_cache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from replicas.blocks import BLOCK_SIZE
from replicas.engine.attention.kv_cache import KVCache
from replicas.engine.attention.paged import PagedAttention
from replicas.engine.attention.reference import ReferenceAttention
from replicas.engine.attention.static import Bucket, Buckets, DecodeBuffers, StaticAttention
from replicas.engine.batch import Batch, Span, build_batch
from replicas.engine.cuda_graphs import CudaCapture, GraphedDecode, run_directly
from replicas.engine.step import StepPlan

NUM_BLOCKS = 160
PADDING_BLOCK = 7


# Attention


def make_case(contexts, *, num_heads=6, num_kv_heads=2, head_dim=16, dtype=torch.float32, seed=0):
    """(cache with random contents, batch of decode tokens, query); the tables have a block more than they need."""
    torch.manual_seed(seed)
    sizes = {"num_layers": 1, "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_kv_heads": num_kv_heads}
    cache = KVCache(**sizes, head_dim=head_dim, device=CPU, dtype=dtype)
    cache.write(
        0, torch.arange(NUM_BLOCKS * BLOCK_SIZE), torch.randn(NUM_BLOCKS * BLOCK_SIZE, 2 * num_kv_heads, head_dim).to(dtype)
    )
    free = random.Random(seed).sample([block for block in range(NUM_BLOCKS) if block != PADDING_BLOCK], NUM_BLOCKS - 1)
    tables = [[free.pop() for _ in range(-(-context // BLOCK_SIZE) + 1)] for context in contexts]
    chunks = [chunk(str(i), [1], context - 1, table) for i, (context, table) in enumerate(zip(contexts, tables, strict=True))]
    return cache, build_batch(StepPlan(tuple(chunks)), BLOCK_SIZE), torch.randn(len(contexts), num_heads, head_dim).to(dtype)


def attend_static(cache, batch, query, bucket=None):
    buckets = Buckets(16, 64)
    bucket = bucket or buckets.choose(batch.spans, BLOCK_SIZE)
    buffers = DecodeBuffers(cache, buckets, PADDING_BLOCK)
    buffers.fill(batch, bucket)
    inputs = buffers.views(bucket)
    padded = torch.cat((query, torch.randn(bucket.num_seqs - len(query), *query.shape[1:]).to(query.dtype)))
    attended = StaticAttention(cache).begin(inputs.block_tables, inputs.context_lens).attend(0, padded)
    assert attended.is_contiguous()
    return attended[: len(query)]


def assert_static_equals_reference(cache, batch, query, tolerance=1e-5, bucket=None):
    expected = ReferenceAttention(cache).prepare(batch.spans).attend(0, query)
    torch.testing.assert_close(attend_static(cache, batch, query, bucket), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257])
def test_a_decode_token_equals_the_reference_at_every_block_and_bucket_boundary(context):
    assert_static_equals_reference(*make_case([context]))
    assert_static_equals_reference(*make_case([context + 2, context, max(context - 4, 1)]))


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16])
def test_a_batch_of_any_size_equals_the_reference_in_its_bucket(num_seqs):
    assert_static_equals_reference(*make_case([3 + 9 * i for i in range(num_seqs)]))


def test_every_bucket_gives_the_same_for_a_batch_that_fits():
    case = make_case([33, 20])
    for bucket in Buckets(16, 64).all():
        if bucket.num_seqs >= 2:
            assert_static_equals_reference(*case, bucket=bucket)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 8), (8, 1, 32), (9, 3, 64), (2, 2, 128)])
def test_head_groups_of_every_shape_equal_the_reference(num_heads, num_kv_heads, head_dim):
    case = make_case([40, 50, 1], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    assert_static_equals_reference(*case)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_half_formats_stay_within_their_rounding_of_the_reference(dtype, tolerance):
    assert_static_equals_reference(*make_case([99, 120, 7], dtype=dtype), tolerance)


@settings(max_examples=60, deadline=None)
@given(contexts=st.lists(st.integers(1, 140), min_size=1, max_size=12), seed=st.integers(0, 3))
def test_any_decode_batch_equals_the_reference(contexts, seed):
    assert_static_equals_reference(*make_case(contexts, seed=seed))


def test_neither_padding_nor_the_unused_end_of_a_table_reads_what_others_wrote():
    cache, batch, query = make_case([100, 60, 17])
    expected = attend_static(cache, batch, query)
    mine = {block for span in batch.spans for block in span.block_table[: -(-span.context_len // BLOCK_SIZE)]}
    slots = [block * BLOCK_SIZE + offset for block in range(NUM_BLOCKS) if block not in mine for offset in range(BLOCK_SIZE)]
    cache.write(0, torch.tensor(slots), torch.full((len(slots), 4, 16), torch.nan))
    torch.testing.assert_close(attend_static(cache, batch, query), expected, atol=0, rtol=0)


# Buckets


def spans_of(contexts):
    return [Span(row, 1, context - 1, ()) for row, context in enumerate(sorted(contexts, reverse=True))]


@settings(max_examples=200, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 5000), min_size=1, max_size=80),
    max_seqs=st.integers(1, 70),
    max_blocks=st.integers(1, 300),
)
def test_a_chosen_bucket_holds_the_batch_is_worth_its_padding_and_is_one_of_all(contexts, max_seqs, max_blocks):
    buckets = Buckets(max_seqs, max_blocks)
    bucket = buckets.choose(spans_of(contexts), BLOCK_SIZE)
    blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    fits = len(contexts) <= max_seqs and max(blocks) <= max_blocks
    if bucket is None:
        return
    assert fits
    assert bucket in buckets.all()
    assert len(contexts) <= bucket.num_seqs <= max_seqs
    assert max(blocks) <= bucket.num_blocks <= max_blocks
    assert bucket.num_cells <= max(1024, 4 * sum(blocks))


@settings(max_examples=100, deadline=None)
@given(num_seqs=st.integers(1, 64), context=st.integers(1, 2048))
def test_a_batch_of_equal_contexts_always_has_a_bucket_until_attention_is_all_that_counts(num_seqs, context):
    bucket = Buckets(64, 128).choose(spans_of([context] * num_seqs), BLOCK_SIZE)
    assert bucket is not None
    assert bucket.num_seqs < 2 * num_seqs
    assert bucket.num_blocks == 8 or bucket.num_blocks * BLOCK_SIZE < 2 * (context + BLOCK_SIZE)


def test_buckets_are_powers_of_two_up_to_the_limits_and_few():
    assert Buckets(1, 1).all() == [Bucket(1, 1)]
    assert Buckets(6, 20).all() == [Bucket(s, b) for s, b in ((6, 20), (6, 16), (4, 20), (4, 16), (6, 8), (2, 20), (4, 8))] + [
        Bucket(s, b) for s, b in ((2, 16), (1, 20), (2, 8), (1, 16), (1, 8))
    ]
    assert len(Buckets(64, 256).all()) == 7 * 6 - 1  # 64 sequences of 256 blocks are too many
    assert all(bucket.num_cells <= 8192 for bucket in Buckets(64, 2048).all())


def test_prompts_and_what_exceeds_the_limits_have_no_bucket():
    buckets = Buckets(4, 10)
    assert buckets.choose([], BLOCK_SIZE) is None
    assert buckets.choose(spans_of([5] * 5), BLOCK_SIZE) is None
    assert buckets.choose(spans_of([161]), BLOCK_SIZE) is None
    assert buckets.choose([Span(0, 1, 30, ()), Span(1, 2, 0, ())], BLOCK_SIZE) is None
    assert buckets.choose(spans_of([160] * 4), BLOCK_SIZE) == Bucket(4, 10)
    # One long context among many short ones: grouped by length they cost a fraction of the bucket.
    assert Buckets(64, 2048).choose(spans_of([16384, *[10] * 7]), BLOCK_SIZE) is None


# Graphs


class Tape(TorchDispatchMode):
    """A CUDA graph in small: records each kernel with the tensors and numbers it was called with, and replays just those.

    A number that Python computed from the step, a tensor made anew each step, a result that a later kernel gets by another
    way than memory: all would be as of the recording. What asks the device for a number is refused, as in a capture.
    """

    REFUSED = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal", "lift_fresh", "unique")

    def __init__(self):
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.__name__.split(".")[0] not in self.REFUSED, function
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        assert not any(tensor.dtype == torch.bool for tensor in tensors) or not function.__name__.startswith("index"), function
        output = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, output))
        return output

    def replay(self):
        for function, args, kwargs, output in self._calls:
            given_storages = {
                t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
            }
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in given_storages:
                    assert old.shape == new.shape
                    old.copy_(new)


def record(function):
    """As CudaCapture: run, then record, then leave it to replay."""
    function()
    tape = Tape()
    with tape:
        function()
    return tape.replay


def test_the_tape_shows_what_a_graph_would_get_wrong():
    length, output = torch.tensor([3]), torch.zeros(1)
    follows = record(lambda: output.copy_(length * 2))
    baked = int(length)
    stale = record(lambda: output.copy_(torch.full((1,), baked * 2)))
    length.fill_(5)
    follows()
    assert output.item() == 10
    stale()
    assert output.item() == 6
    for asks_the_device in (lambda: int(length), lambda: torch.tensor([1]), lambda: length[length > 3]):
        with pytest.raises(AssertionError):
            record(asks_the_device)


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny_models.make(request.param, path)
    return load_model(path)


def forward(model, cache, batch: Batch):
    """The ordinary path, as the runner has it. None where nothing is sampled."""
    if batch.fresh_blocks:
        cache.zero_blocks(batch.fresh_blocks)
    rows = torch.tensor((batch.token_ids, batch.positions, batch.slots))
    attention = PagedAttention(cache, model.architecture.num_heads).prepare(batch.spans)
    hidden = model.forward(*rows, cache, attention)
    return model.logits(hidden[batch.sample_rows]) if batch.sample_rows else None


class Pair:
    """Computes each step both ways, each on a cache of its own whose last block is for padding."""

    def __init__(self, model, capture=record, max_seqs=8, max_model_len=256):
        self.model = model
        self.ordinary, self.cache = (make_cache(model.architecture, 65) for _ in range(2))
        limits = {"max_seqs": max_seqs, "max_model_len": max_model_len}
        self.graphed = GraphedDecode(model, self.cache, **limits, padding_block=64, capture=capture)
        self.num_graphed_steps = 0

    @torch.inference_mode()
    def step(self, *chunks):
        """The step's logits, in the order of the batch's rows."""
        batch = build_batch(StepPlan(chunks), BLOCK_SIZE)
        expected = forward(self.model, self.ordinary, batch)
        logits = self.graphed.run(batch)
        if logits is None:
            forward(self.model, self.cache, batch)
            return expected
        self.num_graphed_steps += 1
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4, equal_nan=True)
        return logits.clone()

    def assert_caches_are_equal(self):
        """But for the padding block."""
        torch.testing.assert_close(self.cache._data[:, :, :64], self.ordinary._data[:, :, :64], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("capture", [record, run_directly])
def test_sequences_that_come_grow_and_go_get_the_logits_of_the_ordinary_path(model, capture):
    pair = Pair(model, capture)
    rng = random.Random(0)
    free = rng.sample(range(64), 64)
    running = {}  # name -> (length, table)
    for step in range(70):
        if len(running) < 6 and rng.random() < 0.3:
            length = rng.choice([1, 3, 15, 16, 17, 100])
            table = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
            pair.step(chunk(f"s{step}", [(7 * i + step) % 150 for i in range(length)], 0, table))
            running[f"s{step}"] = (length, table)
        chosen = rng.sample(sorted(running), rng.randint(0, len(running)))
        chunks = []
        for name in chosen:
            length, table = running[name]
            if length == len(table) * BLOCK_SIZE:
                table.append(free.pop())
            chunks.append(chunk(name, [(5 * step + length) % 150], length, table))
            running[name] = (length + 1, table)
        pair.step(*chunks) if chunks else None
        if len(running) > 3 and rng.random() < 0.2:
            _, table = running.pop(rng.choice(sorted(running)))
            free.extend(table)
    assert pair.num_graphed_steps > 40
    assert 3 < pair.graphed.num_graphs <= pair.graphed.max_graphs == 8
    pair.assert_caches_are_equal()


def test_a_graph_is_recorded_once_for_its_bucket(model):
    recorded = []
    pair = Pair(model, lambda function: recorded.append(1) or record(function))
    for length in range(100):
        pair.step(chunk("a", [length], length, list(range(7))))
    assert (len(recorded), pair.graphed.num_graphs, pair.num_graphed_steps) == (1, 1, 100)


def test_only_rows_that_are_sampled_have_logits(model):
    pair = Pair(model)
    a, b, c = (chunk(name, [9], start, [block], None) for name, start, block in (("a", 8, 1), ("b", 5, 2), ("c", 3, 3)))
    sampled = chunk("c", [9], 3, [3])
    assert pair.step(a, b, sampled).shape == (1, tiny_models.VOCAB_SIZE)
    assert pair.num_graphed_steps == 1
    assert pair.step(a, b, c) is None
    pair.assert_caches_are_equal()


def test_what_is_not_a_decode_step_is_left_alone(model):
    pair = Pair(model, max_seqs=2)
    before = pair.cache._data.clone()
    decode = [chunk(str(block), [1], 16, [block, 50 + block]) for block in range(3)]
    for chunks in ([], decode, [decode[0], chunk("p", [1, 2], 0, [9])]):
        assert pair.graphed.run(build_batch(StepPlan(tuple(chunks)), BLOCK_SIZE)) is None
    assert pair.graphed.num_graphs == 0
    assert torch.equal(pair.cache._data, before)


def test_recording_everything_ahead_touches_the_padding_block_alone(model):
    pair = Pair(model)
    pair.cache._data.normal_()
    before = pair.cache._data.clone()
    pair.graphed.capture_all()
    assert pair.graphed.num_graphs == pair.graphed.max_graphs
    assert torch.equal(pair.cache._data[:, :, :64], before[:, :, :64])
    assert not torch.equal(pair.cache._data[:, :, 64], before[:, :, 64])


def test_non_finite_numbers_stay_with_their_sequence_and_poison_no_block(model):
    pair = Pair(model)
    embedding = model._embedding[4].clone()
    model._embedding[4] = torch.nan
    logits = pair.step(chunk("bad", [4], 3, [5]), chunk("a", [9], 2, [1]), chunk("b", [8], 1, [2]))
    assert logits.isnan().all(dim=1).tolist() == [True, False, False]
    model._embedding[4] = embedding
    # The next owner of the block begins it, so it is cleared.
    assert pair.step(chunk("heir", [9], 0, [5])).isfinite().all()


def test_a_closed_one_keeps_nothing_and_takes_nothing(model):
    pair = Pair(model)
    pair.step(chunk("a", [9], 2, [1]))
    pair.graphed.close()
    pair.step(chunk("a", [9], 3, [1]))
    assert (pair.graphed.num_graphs, pair.num_graphed_steps) == (0, 1)


def test_a_capture_is_warmed_up_beside_the_other_work_and_shares_its_pool(monkeypatch):
    """What can be said of CudaCapture without a device: the order of its calls. tests/gpu has the rest."""
    calls = mock.MagicMock()

    @contextlib.contextmanager
    def entered(name, *args, **kwargs):
        getattr(calls, name)(*args, **kwargs)
        yield
        getattr(calls, f"{name}_end")()

    for name in ("graph_pool_handle", "Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, getattr(calls, name))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered("stream", stream))
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: entered("graph", *args, **kwargs))
    capture = CudaCapture(torch.device("cuda"))
    for _ in range(2):
        calls.reset_mock()
        replay = capture(calls.function)
        side, current = calls.Stream.return_value, calls.current_stream.return_value
        expected = [mock.call.current_stream(side.device), mock.call.Stream().wait_stream(current), mock.call.stream(side)]
        expected += [mock.call.function(), mock.call.function(), mock.call.stream_end()]
        expected += [mock.call.current_stream().wait_stream(side), mock.call.CUDAGraph()]
        pool = calls.graph_pool_handle.return_value
        shared = {"pool": pool, "stream": side, "capture_error_mode": "thread_local"}
        expected += [mock.call.graph(calls.CUDAGraph.return_value, **shared), mock.call.function(), mock.call.graph_end()]
        assert calls.mock_calls == expected
        assert replay is calls.CUDAGraph.return_value.replay
