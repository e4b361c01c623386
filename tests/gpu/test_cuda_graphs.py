"""On a CUDA device: graphs of decode steps give the logits of the ordinary path, are few, and give their memory back."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine_cpu"))  # tiny_models, paged_model

import tiny_models
from paged_model import chunk, load_model, make_cache

from replicas.blocks import BLOCK_SIZE
from replicas.engine.attention.paged import PagedAttention
from replicas.engine.batch import build_batch
from replicas.engine.cuda_graphs import GraphedDecode
from replicas.engine.models.fp8 import fp8_linear, plain_fp8_linear, supports_fp8
from replicas.engine.step import StepPlan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
NUM_BLOCKS = 65  # the last one is for padding


def forward(model, cache, batch):
    if batch.fresh_blocks:
        cache.zero_blocks(batch.fresh_blocks)
    rows = torch.tensor((batch.token_ids, batch.positions, batch.slots), device=CUDA)
    hidden = model.forward(*rows, cache, PagedAttention(cache, model.architecture.num_heads).prepare(batch.spans))
    return model.logits(hidden)


def graphed_decode(model, cache):
    return GraphedDecode(model, cache, max_seqs=8, max_model_len=256, padding_block=NUM_BLOCKS - 1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
@torch.inference_mode()
def test_graphed_logits_equal_ungraphed_ones_and_graphs_are_few(tmp_path, name, dtype, tolerance):
    tiny_models.make(name, tmp_path, initializer_range=0.05)
    model = load_model(tmp_path, CUDA, dtype)
    ordinary, cache = (make_cache(model.architecture, NUM_BLOCKS, CUDA, dtype) for _ in range(2))
    graphed = graphed_decode(model, cache)
    rng = random.Random(0)
    tables = [rng.sample(range(7 * i, 7 * i + 7), 7) for i in range(8)]
    lengths = [0, 1, 14, 15, 16, 31, 40, 60]
    for step in range(48):  # contexts cross blocks, batches come in every size and order
        chosen = rng.sample(range(8), 1 + step % 8)
        chunks = [chunk(str(i), [(5 * step + i) % tiny_models.VOCAB_SIZE], lengths[i], tables[i]) for i in chosen]
        batch = build_batch(StepPlan(tuple(chunks)), BLOCK_SIZE)
        expected = forward(model, ordinary, batch).float()
        logits = graphed.run(batch)
        assert logits is not None
        assert (logits.float() - expected).norm() < tolerance * expected.norm()
        for i in chosen:
            lengths[i] += 1
    assert graphed.num_graphs == 4 <= graphed.max_graphs
    graphed.close()


@torch.inference_mode()
def test_every_bucket_can_be_captured_ahead_and_the_memory_comes_back(tmp_path):
    tiny_models.make("llama", tmp_path)
    model = load_model(tmp_path, CUDA)
    cache = make_cache(model.architecture, NUM_BLOCKS, CUDA)
    batch = build_batch(StepPlan((chunk("a", [5], 3, [1]),)), BLOCK_SIZE)
    forward(model, cache, batch)  # the device's workspaces, which stay

    def capture_and_close():
        graphed = graphed_decode(model, cache)
        graphed.capture_all()
        assert graphed.num_graphs == graphed.max_graphs
        assert graphed.run(batch) is not None
        assert graphed.num_graphs == graphed.max_graphs
        graphed.close()
        assert graphed.run(batch) is None

    def reserved_bytes():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # each stream that ever multiplied keeps one
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    capture_and_close()  # what a first capture leaves behind for good
    before = reserved_bytes()
    for _ in range(3):
        capture_and_close()
    assert reserved_bytes() <= before


@pytest.mark.parametrize("num_rows", [1, 3, 16, 200])
@pytest.mark.parametrize("with_bias", [False, True])
def test_fp8_on_the_device_equals_its_plain_twin(num_rows, with_bias):
    if not supports_fp8(CUDA):
        pytest.skip("this device doesn't multiply fp8")
    torch.manual_seed(0)
    x = torch.randn(num_rows, 576, device=CUDA).bfloat16()
    weight = torch.randn(320, 576, device=CUDA).bfloat16() * 0.05
    bias = torch.randn(320, device=CUDA).bfloat16() if with_bias else None
    expected = plain_fp8_linear(weight, bias)(x).float()
    assert (fp8_linear(weight, bias)(x).float() - expected).norm() < 0.01 * expected.norm()
