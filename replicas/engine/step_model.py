"""What a runner drives: a model over its KV cache, by whichever kernels, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from replicas.engine.batch import Batch
from replicas.engine.models.config import ArchitectureConfig


@dataclass(frozen=True, slots=True)
class StepLogits:
    """`logits` is [sampled rows, vocab_size]. `best`, if it is known already: the first of each row's largest, -1 where that
    isn't a finite number."""

    logits: Tensor
    best: Sequence[int] | None = None


class StepModel(Protocol):
    @property
    def architecture(self) -> ArchitectureConfig: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: Batch) -> StepLogits | None:
        """Computes all rows into the KV cache. None where the batch samples nothing. Its tensors live until the next call."""
