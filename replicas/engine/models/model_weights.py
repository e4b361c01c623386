"""A checkpoint's tensors as a decoder wants them: those that share an input side by side, quantized where that is asked for.

    quantization   layers                                    embedding and head
    none           numbers                                   numbers
    file           as the file keeps them, if quantized      likewise
    int8           int8 (per row)                            int8
    int4           int4 (groups of 32, with a minimum)       int8_g32

A quantized file is never quantized anew where it has the format that is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replicas.engine.models.config import ArchitectureConfig
from replicas.engine.quantize.formats import QuantizedTensor, concatenate, quantize
from replicas.engine.weights import Checkpoint

Matrix = Tensor | QuantizedTensor
"""[outputs, inputs]"""

_HEAD_FORMATS = {"int8": "int8", "int4": "int8_g32"}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """`qkv` has the rows of query, key and value, `gate_up` those of gate, then of up. Biases and norms are plain.

    `qk_norm`, where the family has it: [num_heads + num_kv_heads, head_dim].
    """

    attention_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


class ModelWeights:
    """Reads what it is asked for, when it is asked. Raises ConfigError if a tensor is missing or has another shape."""

    def __init__(self, architecture: ArchitectureConfig, checkpoint: Checkpoint, quantization: str = "none") -> None:
        self._architecture = architecture
        self._checkpoint = checkpoint
        self._quantization = quantization

    def embedding(self) -> Matrix:
        return self._vocabulary("model.embed_tokens.weight")

    def head(self) -> Matrix | None:
        """None where it is the embedding."""
        return None if self._architecture.tied_embeddings else self._vocabulary("lm_head.weight")

    def norm(self) -> Tensor:
        return self._vector("model.norm.weight", self._architecture.hidden_size)

    def layer(self, index: int) -> LayerWeights:
        config = self._architecture
        hidden, mlp = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        prefix = f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        qkv = {f"{attention}.q_proj": q_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
        bias = [self._vector(f"{name}.bias", size) for name, size in qkv.items()] if config.family.qkv_bias else None
        return LayerWeights(
            attention_norm=self._vector(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._fused(qkv, hidden),
            qkv_bias=None if bias is None else torch.cat(bias),
            qk_norm=self._qk_norm(attention) if config.family.qk_norm else None,
            output=self._fused({f"{attention}.o_proj": hidden}, q_size),
            mlp_norm=self._vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._fused({f"{prefix}.mlp.gate_proj": mlp, f"{prefix}.mlp.up_proj": mlp}, hidden),
            down=self._fused({f"{prefix}.mlp.down_proj": hidden}, mlp),
        )

    def _vector(self, name: str, size: int) -> Tensor:
        return self._checkpoint.tensor(name, (size,))

    def _vocabulary(self, name: str) -> Matrix:
        shape = (self._architecture.vocab_size, self._architecture.hidden_size)
        return self._matrix(name, shape, _HEAD_FORMATS.get(self._quantization, self._quantization))

    def _fused(self, parts: Mapping[str, int], num_inputs: int) -> Matrix:
        """One matrix whose outputs are those of `parts` (name -> outputs) side by side."""
        matrices = [self._matrix(f"{name}.weight", (rows, num_inputs), self._quantization) for name, rows in parts.items()]
        quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedTensor)]
        if len(quantized) == len(matrices) and len({matrix.format for matrix in quantized}) == 1:
            return concatenate(quantized)
        return torch.cat([_numbers(matrix) for matrix in matrices])

    def _matrix(self, name: str, shape: tuple[int, int], wanted: str) -> Matrix:
        if wanted == "none":
            return self._checkpoint.tensor(name, shape)
        found = self._checkpoint.quantized(name, shape)
        if found is not None and wanted in ("file", found.format):
            return found
        numbers = self._checkpoint.tensor(name, shape)
        return numbers if wanted == "file" else quantize(numbers, wanted)

    def _qk_norm(self, attention: str) -> Tensor:
        config = self._architecture
        query = self._vector(f"{attention}.q_norm.weight", config.head_dim)
        key = self._vector(f"{attention}.k_norm.weight", config.head_dim)
        return torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))


def _numbers(matrix: Matrix) -> Tensor:
    return matrix.dequantize() if isinstance(matrix, QuantizedTensor) else matrix
