"""LlamaModel as a StepModel: what serves on GPUs, and on CPUs that the native kernels don't know."""

from __future__ import annotations

import torch

from replicas.engine.attention.kv_cache import AttentionBackend, KVCache
from replicas.engine.batch import Batch
from replicas.engine.cuda_graphs import GraphedDecode
from replicas.engine.models.config import ArchitectureConfig
from replicas.engine.models.llama import LlamaModel
from replicas.engine.step_model import StepLogits


class TorchModel:
    """`graphed`, where there is one, computes the decode steps that it can."""

    def __init__(
        self, model: LlamaModel, cache: KVCache, attention: AttentionBackend, graphed: GraphedDecode | None = None
    ) -> None:
        self._model = model
        self._graphed = graphed
        self._cache = cache
        self._attention = attention

    @property
    def architecture(self) -> ArchitectureConfig:
        return self._model.architecture

    @property
    def device(self) -> torch.device:
        return self._model.device

    def forward(self, batch: Batch) -> StepLogits | None:
        if not batch.spans:
            return None
        if self._graphed is not None and (logits := self._graphed.run(batch)) is not None:
            return StepLogits(logits)
        device = self._model.device
        with torch.inference_mode():
            if batch.fresh_blocks:
                self._cache.zero_blocks(batch.fresh_blocks)
            rows = torch.tensor((batch.token_ids, batch.positions, batch.slots), dtype=torch.int64).to(device)
            token_ids, positions, slots = rows.unbind()
            hidden = self._model.forward(token_ids, positions, slots, self._cache, self._attention.prepare(batch.spans))
            if not batch.sample_rows:
                return None
            if len(batch.sample_rows) < len(batch.token_ids):
                hidden = hidden[torch.tensor(batch.sample_rows, device=device)]
            return StepLogits(self._model.logits(hidden))
