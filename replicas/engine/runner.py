"""Computes one StepPlan on a device: lay out, forward, sample. And how to get a Runner: `load_runner`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from configs.schema import EngineConfig, ModelConfig
from replicas.blocks import BLOCK_SIZE
from replicas.contract import EngineInfo
from replicas.engine.batch import build_batch
from replicas.engine.capacity import Capacity
from replicas.engine.load_model import load_model
from replicas.engine.sampler import SampleOutcome, Sampler
from replicas.engine.speculate.verify import standing
from replicas.engine.step import ChunkResult, DrawnToken, SequenceChunk, StepPlan, StepResult
from replicas.engine.step_model import StepModel
from replicas.model_source import eos_token_ids, model_revision

logger = logging.getLogger(__name__)


class Runner:
    """Owns the model and the KV cache of one device. Stateless between steps but for the cache. One thread at a time."""

    def __init__(
        self,
        model: StepModel,
        capacity: Capacity,
        *,
        eos_token_ids: tuple[int, ...],
        model_name: str,
        model_revision: str,
    ) -> None:
        self._model = model
        self.num_blocks = capacity.num_blocks
        self.block_size = BLOCK_SIZE
        self.vocab_size = model.architecture.vocab_size
        self.max_model_len = capacity.max_model_len
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
        batch = build_batch(plan, self.block_size)
        computed = self._model.forward(batch)
        outcomes = []
        if computed is not None:
            with torch.inference_mode():
                outcomes = self._sampler.sample(computed.logits, batch.sample_specs, computed.best)
        first = 0
        while first < len(outcomes):
            index = batch.sample_chunks[first]
            end = first + 1 + len(plan.chunks[index].draft_samples)
            results[index] = _result(plan.chunks[index], outcomes[first:end])
            first = end
        return StepResult(tuple(results), time.perf_counter() - started_s)


def _result(chunk: SequenceChunk, outcomes: Sequence[SampleOutcome]) -> ChunkResult:
    first, *others = standing(chunk.draft_token_ids, outcomes)
    further = tuple(DrawnToken(one.token_id, one.logprob) for one in others if one.token_id is not None)
    return ChunkResult(chunk.request_id, first.token_id, first.logprob, first.error, further)


def load_runner(model: ModelConfig, engine: EngineConfig, *, num_cpus: float, replicas_on_node: int) -> Runner:
    """Load the weights and allocate the KV cache. `num_cpus` is the replica's share of the node, in cores.

    Raises ConfigError if the model isn't one we compute, CapacityError if it doesn't fit.
    """
    started_s = time.perf_counter()
    num_threads = engine.num_threads or max(1, int(num_cpus))
    torch.set_num_threads(num_threads)
    loaded = load_model(model, engine, num_threads=num_threads, replicas_on_node=replicas_on_node)
    runner = Runner(
        loaded.model,
        loaded.capacity,
        eos_token_ids=eos_token_ids(model),
        model_name=model.served_name,
        model_revision=model_revision(model),
    )
    logger.info(
        "loaded %s in %.1f s (%s): %d KV blocks of %d tokens, max_model_len %d",
        model.source,
        time.perf_counter() - started_s,
        loaded.description,
        runner.num_blocks,
        BLOCK_SIZE,
        runner.max_model_len,
    )
    return runner
