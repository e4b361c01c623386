"""A GGUF file's tensors under the names of the transformers library, as numbers or as the file keeps them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from replicas.engine.models.config import ArchitectureConfig
from replicas.engine.quantize.formats import GROUP, QuantizedTensor
from replicas.errors import ConfigError
from replicas.gguf_file import GgufFile

_MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


class GgufCheckpoint:
    """See replicas.engine.weights.Checkpoint; tensors come as fp32."""

    def __init__(self, file: GgufFile, architecture: ArchitectureConfig) -> None:
        self._file = file
        heads = {"attn_q": architecture.num_heads, "attn_k": architecture.num_kv_heads}
        self._interleaved_heads = heads if architecture.family.gguf_interleaved else {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        gguf_name = self._found(name, shape)
        tensor = torch.from_numpy(self._file.read(gguf_name))
        num_heads = self._interleaved_heads.get(gguf_name.split(".")[-2])
        return tensor if num_heads is None else undo_interleaving(tensor, num_heads)

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor | None:
        gguf_name = self._found(name, shape)
        unpack = _UNPACKERS.get(self._file.tensors[gguf_name].kind)
        if unpack is None or len(shape) != 2:
            return None
        raw = torch.from_numpy(np.array(self._file.read_raw(gguf_name)))
        tensor = unpack(raw.view(shape[0], shape[1] // GROUP, -1))
        num_heads = self._interleaved_heads.get(gguf_name.split(".")[-2])
        if num_heads is None:
            return tensor
        return tensor.take_rows(undo_interleaving(torch.arange(shape[0]), num_heads))

    def _found(self, name: str, shape: tuple[int, ...]) -> str:
        gguf_name = gguf_tensor_name(name)
        if gguf_name not in self._file.tensors:
            raise ConfigError(f"{self._file.path}: there is no tensor {gguf_name}")
        if self._file.tensors[gguf_name].shape != shape:
            found = self._file.tensors[gguf_name].shape
            raise ConfigError(f"{self._file.path}: tensor {gguf_name} has the shape {found}, the metadata say {shape}")
        return gguf_name


def _q4_1(blocks: torch.Tensor) -> QuantizedTensor:
    """20 bytes a block: fp16 scale, fp16 minimum, 32 numbers of 4 bits"""
    halves = blocks[..., :4].contiguous().view(torch.float16)
    return QuantizedTensor("int4", _numbers(blocks[..., 4:]), halves[..., 0].contiguous(), halves[..., 1].contiguous())


def _q4_0(blocks: torch.Tensor) -> QuantizedTensor:
    """18 bytes: fp16 scale, 32 numbers of 4 bits that count from -8"""
    scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    return QuantizedTensor("int4", _numbers(blocks[..., 2:]), scale, scale * -8)


def _q8_0(blocks: torch.Tensor) -> QuantizedTensor:
    """34 bytes: fp16 scale, 32 numbers of 8 bits"""
    scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    return QuantizedTensor("int8_g32", _numbers(blocks[..., 2:]).view(torch.int8), scale)


def _numbers(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.flatten(1).contiguous()  # of a matrix that is one block wide, flatten alone makes a view with gaps


_UNPACKERS: dict[GGMLQuantizationType, Callable[[torch.Tensor], QuantizedTensor]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q8_0: _q8_0,
}


def gguf_tensor_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`"""
    if matched := _LAYER_NAME.fullmatch(name):
        layer, part, kind = matched.groups()
        return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return _MODEL_NAMES[name]


def undo_interleaving(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from pairs (0, half, 1, half+1, ...) back to halves (0, 1, ..., half, half+1, ...).

    llama.cpp rotates adjacent pairs, transformers the two halves of a head, so llama's converter reorders q and k.
    """
    num_rows, *rest = tensor.shape
    halves = tensor.view(num_heads, num_rows // num_heads // 2, 2, *rest).transpose(1, 2)
    return halves.reshape(tensor.shape)
