"""Computes one StepPlan on a device: lay out, forward, sample. And how to get a Runner: `load_runner`."""

from __future__ import annotations

import logging
import time

import torch

from configs.schema import EngineConfig, ModelConfig
from replicas.blocks import BLOCK_SIZE
from replicas.contract import EngineInfo
from replicas.engine.attention.kv_cache import AttentionBackend, KVCache
from replicas.engine.attention.paged import PagedAttention
from replicas.engine.attention.reference import ReferenceAttention
from replicas.engine.batch import Batch, build_batch
from replicas.engine.capacity import plan_capacity
from replicas.engine.device import choose_device, choose_dtype, kv_cache_budget_bytes
from replicas.engine.models.llama import LlamaModel
from replicas.engine.sampler import Sampler
from replicas.engine.step import ChunkResult, StepPlan, StepResult
from replicas.engine.weights import open_checkpoint
from replicas.errors import ConfigError
from replicas.model_source import architecture, eos_token_ids, model_revision, resolve

logger = logging.getLogger(__name__)


class Runner:
    """Owns the model and the KV cache of one device. Stateless between steps but for the cache. One thread at a time."""

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        attention: AttentionBackend,
        *,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        model_name: str,
        model_revision: str,
    ) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
        self.num_blocks = cache.num_blocks
        self.block_size = cache.block_size
        self.vocab_size = model.architecture.vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.model_name = model_name
        self.model_revision = model_revision
        self._sampler = Sampler(self.vocab_size, model.device)

    def info(self, engine: EngineConfig) -> EngineInfo:
        """What an engine with this runner and these limits promises."""
        return EngineInfo(
            model_name=self.model_name,
            model_revision=self.model_revision,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            eos_token_ids=self.eos_token_ids,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_num_seqs=engine.max_num_seqs,
        )

    def run(self, plan: StepPlan) -> StepResult:
        """A row whose logits are not finite, or that can't be sampled, gets an `error`; the others are not touched by it.

        Token ids and block tables must be valid: the engine checks what clients send.
        """
        started_s = time.perf_counter()
        results = [ChunkResult(chunk.request_id) for chunk in plan.chunks]
        batch = build_batch(plan, self._cache.block_size)
        with torch.inference_mode():
            logits = self._forward(batch)
            outcomes = self._sampler.sample(logits, batch.sample_specs) if logits is not None else []
        for index, outcome in zip(batch.sample_chunks, outcomes, strict=True):
            request_id = plan.chunks[index].request_id
            results[index] = ChunkResult(request_id, outcome.token_id, outcome.logprob, outcome.error)
        return StepResult(tuple(results), time.perf_counter() - started_s)

    def _forward(self, batch: Batch) -> torch.Tensor | None:
        """Logits [len(batch.sample_rows), vocab_size], None where no row is sampled; the cache is written either way."""
        if not batch.spans:
            return None
        if batch.fresh_blocks:
            self._cache.zero_blocks(batch.fresh_blocks)
        rows = torch.tensor((batch.token_ids, batch.positions, batch.slots), dtype=torch.int64).to(self._model.device)
        token_ids, positions, slots = rows.unbind()
        hidden = self._model.forward(token_ids, positions, slots, self._cache, self._attention.prepare(batch.spans))
        if not batch.sample_rows:
            return None
        if len(batch.sample_rows) < len(batch.token_ids):
            hidden = hidden[torch.tensor(batch.sample_rows, device=self._model.device)]
        return self._model.logits(hidden)


def load_runner(model: ModelConfig, engine: EngineConfig, *, num_cpus: float, replicas_on_node: int) -> Runner:
    """Load the weights and allocate the KV cache. `num_cpus` is the replica's share of the node, in cores.

    Raises ConfigError if the model isn't one we compute, CapacityError if it doesn't fit.
    """
    started_s = time.perf_counter()
    torch.set_num_threads(engine.num_threads or max(1, int(num_cpus)))
    device = choose_device(engine.device)
    dtype = choose_dtype(model.dtype, device)
    files, config = resolve(model), architecture(model)
    # Positions beyond the context can't be planned, so the rotary table is as long as that.
    checkpoint = open_checkpoint(files, config)
    loaded = LlamaModel(config, checkpoint, max_positions=config.max_context_len, device=device, dtype=dtype)
    capacity = plan_capacity(
        kv_bytes=engine.kv_cache_bytes or kv_cache_budget_bytes(device, engine.gpu_memory_share, replicas_on_node),
        bytes_per_token=config.kv_bytes_per_token(dtype.itemsize),
        block_size=BLOCK_SIZE,
        max_model_len=model.max_model_len,
        max_context_len=config.max_context_len,
    )
    cache = KVCache(
        num_layers=config.num_layers,
        num_blocks=capacity.num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        device=device,
        dtype=dtype,
    )
    runner = Runner(
        loaded,
        cache,
        _attention(engine.attention, cache, config.num_heads),
        max_model_len=capacity.max_model_len,
        eos_token_ids=eos_token_ids(model),
        model_name=model.served_name,
        model_revision=model_revision(model),
    )
    logger.info(
        "loaded %s on %s as %s in %.1f s: %d KV blocks of %d tokens, max_model_len %d",
        model.source,
        device,
        dtype,
        time.perf_counter() - started_s,
        capacity.num_blocks,
        BLOCK_SIZE,
        capacity.max_model_len,
    )
    return runner


def _attention(name: str, cache: KVCache, num_heads: int) -> AttentionBackend:
    match name:
        case "auto":
            return PagedAttention(cache, num_heads)
        case "reference":
            return ReferenceAttention(cache)
    raise ConfigError(f"engine.attention={name!r} is unknown")
