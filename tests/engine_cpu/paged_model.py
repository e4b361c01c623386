"""A model over a paged cache, without scheduler and sampler: feed it chunks of sequences, get logits of every row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from configs.schema import ModelConfig
from replicas.blocks import BLOCK_SIZE
from replicas.contract import SamplingParams
from replicas.engine.attention.kv_cache import KVCache
from replicas.engine.attention.paged import PagedAttention
from replicas.engine.batch import build_batch
from replicas.engine.models.llama import LlamaModel
from replicas.engine.models.model_weights import ModelWeights
from replicas.engine.native.library import load
from replicas.engine.native.model import NativeModel
from replicas.engine.step import SampleSpec, SequenceChunk, StepPlan
from replicas.engine.weights import open_checkpoint
from replicas.model_source import architecture, resolve

GREEDY = SampleSpec(SamplingParams(max_tokens=64, temperature=0), 0, 0, (), ())
CPU = torch.device("cpu")


def make_cache(config, num_blocks, device=CPU, dtype=torch.float32):
    return KVCache(
        num_layers=config.num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        device=device,
        dtype=dtype,
    )


def load_model(source: str | Path, device=CPU, dtype=torch.float32, quantization: str = "none") -> LlamaModel:
    model = ModelConfig(source=str(source))
    config = architecture(model)
    checkpoint = open_checkpoint(resolve(model), config)
    return LlamaModel(
        config,
        checkpoint,
        max_positions=config.max_context_len,
        device=device,
        dtype=dtype,
        quantization=quantization,
    )


def load_native(source: str | Path, dtype: str = "fp32", quantization: str = "none", num_threads: int = 2) -> NativeModel:
    """Skips the test where the kernels can't run: that they do where they could is tested elsewhere."""
    library = load()
    if library is None:
        pytest.skip("this CPU lacks the instructions")
    model = ModelConfig(source=str(source))
    config = architecture(model)
    weights = ModelWeights(config, open_checkpoint(resolve(model), config), quantization)
    return NativeModel(library, config, weights, max_positions=config.max_context_len, dtype=dtype, num_threads=num_threads)


def chunk(request_id, token_ids, start, block_table, sample=GREEDY):
    return SequenceChunk(request_id, token_ids, start, block_table, sample)


class PagedModel:
    """One sequence whose blocks lie scattered and backwards in the cache."""

    def __init__(self, model: LlamaModel, max_len: int) -> None:
        num_blocks = -(-max_len // BLOCK_SIZE)
        self.model = model
        self.cache = make_cache(model.architecture, 2 * num_blocks + 1, model.device, model.dtype)
        self.attention = PagedAttention(self.cache, model.architecture.num_heads)
        self.block_table = list(range(2 * num_blocks, 0, -2))
        self.length = 0

    @torch.inference_mode()
    def feed(self, token_ids: list[int]) -> torch.Tensor:
        """Logits [len(token_ids), vocab_size] of the next tokens of the sequence."""
        plan = StepPlan((chunk("only", token_ids, self.length, self.block_table),))
        batch = build_batch(plan, BLOCK_SIZE)
        rows = torch.tensor((batch.token_ids, batch.positions, batch.slots), device=self.model.device)
        hidden = self.model.forward(*rows, self.cache, self.attention.prepare(batch.spans))
        self.length += len(token_ids)
        return self.model.logits(hidden)

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        generated = [int(self.feed(token_ids)[-1].argmax())]
        while len(generated) < num_tokens:
            generated.append(int(self.feed(generated[-1:])[-1].argmax()))
        return generated
