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
from replicas.engine.models.layers import Linear, RmsNorm, RotaryTable, linear, rotate_
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

    `max_positions` bounds the positions that `forward` may get.
    """

    def __init__(
        self,
        architecture: ArchitectureConfig,
        checkpoint: Checkpoint,
        *,
        max_positions: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.architecture = architecture
        self.device = device
        self.dtype = dtype
        loader = _Loader(architecture, checkpoint, device, dtype)
        hidden = architecture.hidden_size
        vocabulary = (architecture.vocab_size, hidden)
        self._embedding = loader.tensor("model.embed_tokens.weight", vocabulary)
        self._layers = [loader.layer(index) for index in range(architecture.num_layers)]
        self._norm = loader.norm("model.norm.weight")
        tied = architecture.tied_embeddings
        self._head = linear(self._embedding if tied else loader.tensor("lm_head.weight", vocabulary))
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

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]; give it only the rows that are sampled, the head is the largest matrix."""
        return self._head(self._norm(hidden))


class _Loader:
    """Reads a checkpoint's tensors into a model's device and format, fusing those that share an input."""

    def __init__(
        self, architecture: ArchitectureConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._architecture = architecture
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._checkpoint.tensor(name, shape).to(self._device, self._dtype)

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.tensor(name, (self._architecture.hidden_size,)), self._architecture.rms_norm_eps)

    def layer(self, index: int) -> _Layer:
        config = self._architecture
        hidden, mlp = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        gate_up = {f"{prefix}.mlp.gate_proj": mlp, f"{prefix}.mlp.up_proj": mlp}
        return _Layer(
            attention_norm=self.norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._fused(qkv, hidden, with_bias=config.family.qkv_bias),
            qk_norm=self._qk_norm(attention) if config.family.qk_norm else None,
            output=self._fused({f"{attention}.o_proj": hidden}, q_size),
            mlp_norm=self.norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._fused(gate_up, hidden),
            down=self._fused({f"{prefix}.mlp.down_proj": hidden}, mlp),
        )

    def _fused(self, parts: dict[str, int], input_size: int, *, with_bias: bool = False) -> Linear:
        """One linear map whose output is those of `parts` (name -> output size) side by side."""
        weight = torch.cat([self.tensor(f"{name}.weight", (size, input_size)) for name, size in parts.items()])
        bias = torch.cat([self.tensor(f"{name}.bias", (size,)) for name, size in parts.items()]) if with_bias else None
        return linear(weight, bias)

    def _qk_norm(self, attention: str) -> RmsNorm:
        config = self._architecture
        query = self.tensor(f"{attention}.q_norm.weight", (config.head_dim,))
        key = self.tensor(f"{attention}.k_norm.weight", (config.head_dim,))
        weight = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
        return RmsNorm(weight, config.rms_norm_eps)
