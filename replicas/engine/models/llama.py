"""The decoder of all families in models/config.py, over a paged KV cache. For inference only: call in inference_mode.

A step's tokens are one flat list of rows, whatever sequences they belong to; only attention knows about sequences.

    embed -> layers -> norm -> head
    layer: norm -> qkv -> rotate q, k -> write k, v -> attend -> output -> add, norm -> gate, up -> silu * -> down -> add
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from replicas.engine.attention.kv_cache import KVCache, StepAttention
from replicas.engine.models.config import ArchitectureConfig
from replicas.engine.models.fp8 import fp8_linear
from replicas.engine.models.layers import Linear, RmsNorm, RotaryTable, linear, quantized_linear, rotate_
from replicas.engine.models.model_weights import LayerWeights, Matrix, ModelWeights
from replicas.engine.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class _Layer:
    """`qkv` puts query, key and value heads in one row, `gate_up` gate and up: one matrix product instead of several.

    `qk_norm`, where the family has it, norms each head of query and key with a weight [num_heads + num_kv_heads, head_dim].
    """

    attention_norm: RmsNorm
    qkv: Linear
    qk_norm: RmsNorm | None
    output: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Loads every weight in the constructor. Raises ConfigError if the checkpoint doesn't fit the architecture.

    `quantization` is one of model_weights.py's, whose quantized matrices are computed by their plain twin, or fp8 (bf16 models
    on a device that has it: fp8.py). `max_positions` bounds the positions that `forward` may get.
    """

    def __init__(
        self,
        architecture: ArchitectureConfig,
        checkpoint: Checkpoint,
        *,
        max_positions: int,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str = "none",
    ) -> None:
        self.architecture = architecture
        self.device = device
        self.dtype = dtype
        # fp8 is made of numbers on the device, and only for layers: a tied head is the embedding.
        self._plain_linear = fp8_linear if quantization == "fp8" else linear
        weights = ModelWeights(architecture, checkpoint, "none" if quantization == "fp8" else quantization)
        embedding, head = weights.embedding(), weights.head()
        self._embedding = _numbers(embedding).to(device, dtype)
        self._layers = [self._layer(weights.layer(index)) for index in range(architecture.num_layers)]
        self._norm = self._rms_norm(weights.norm())
        if head is None and isinstance(embedding, Tensor):
            self._head = linear(self._embedding)
        else:
            self._head = self._linear(embedding if head is None else head)
        self._rotary = RotaryTable(architecture.rope, architecture.head_dim, max_positions, device=device, dtype=dtype)

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, cache: KVCache, attention: StepAttention) -> Tensor:
        """Hidden states [rows, hidden_size] of a step's rows; their keys and values go to `slots` of the cache.

        token_ids, positions, slots: int64 [rows].
        """
        config = self.architecture
        num_rotated = config.num_heads + config.num_kv_heads
        num_rows = token_ids.shape[0]
        heads_shape = (num_rows, num_rotated + config.num_kv_heads, config.head_dim)
        cos, sin = self._rotary.at(positions)
        hidden = functional.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(layer.attention_norm(hidden)).view(heads_shape)
            rotated = heads[:, :num_rotated]
            if layer.qk_norm is not None:
                rotated.copy_(layer.qk_norm(rotated))
            rotate_(rotated, cos, sin)
            cache.write(index, slots, heads[:, config.num_heads :])
            attended = attention.attend(index, heads[:, : config.num_heads])
            hidden = layer.output(attended.view(num_rows, -1)).add_(hidden)
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = layer.down(functional.silu(gate).mul_(up)).add_(hidden)
        return hidden

    def _layer(self, weights: LayerWeights) -> _Layer:
        return _Layer(
            attention_norm=self._rms_norm(weights.attention_norm),
            qkv=self._linear(weights.qkv, weights.qkv_bias),
            qk_norm=None if weights.qk_norm is None else self._rms_norm(weights.qk_norm),
            output=self._linear(weights.output),
            mlp_norm=self._rms_norm(weights.mlp_norm),
            gate_up=self._linear(weights.gate_up),
            down=self._linear(weights.down),
        )

    def _rms_norm(self, weight: Tensor) -> RmsNorm:
        return RmsNorm(weight.to(self.device, self.dtype), self.architecture.rms_norm_eps)

    def _linear(self, matrix: Matrix, bias: Tensor | None = None) -> Linear:
        bias = None if bias is None else bias.to(self.device, self.dtype)
        if isinstance(matrix, Tensor):
            return self._plain_linear(matrix.to(self.device, self.dtype), bias)
        return quantized_linear(matrix, bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]; give it only the rows that are sampled, the head is the largest matrix."""
        return self._head(self._norm(hidden))


def _numbers(matrix: Matrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.dequantize()
