"""What a model is, read from config.json or a GGUF's metadata: one frozen description, one table of families. No torch.

All families are the same decoder (RMS norm, rotary positions, grouped-query attention, SwiGLU) and differ in the traits
of `Family`. Whatever a file asks for beyond them is a ConfigError that names it: a model that loads computes right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicas.engine.quantize.scheme import scheme_of
from replicas.errors import ConfigError
from replicas.gguf_file import GgufFile


@dataclass(frozen=True, slots=True)
class Family:
    """`hf_name` is config.json's `architectures[0]`, `gguf_name` the GGUF's `general.architecture` (None: see llama).

    `gguf_interleaved` says that the GGUF converter reordered the rows of q and k, from a head's two halves to adjacent
    pairs. `default_window` is the sliding window of a config.json that doesn't mention one.
    """

    hf_name: str
    gguf_name: str | None
    qkv_bias: bool = False
    qk_norm: bool = False
    gguf_interleaved: bool = False
    default_window: int | None = None


FAMILIES = (
    Family("LlamaForCausalLM", "llama", gguf_interleaved=True),  # SmolLM2 too; Mistral's GGUFs call themselves llama
    Family("MistralForCausalLM", None, default_window=4096),
    Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True),
    Family("Qwen3ForCausalLM", "qwen3", qk_norm=True),
)
_BY_HF_NAME = {family.hf_name: family for family in FAMILIES}
_BY_GGUF_NAME = {family.gguf_name: family for family in FAMILIES if family.gguf_name is not None}

# Fields of config.json that change the computation, with the only value we compute.
_REQUIRED_VALUES: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: frequency i of head_dim/2 is theta**(-2i/head_dim), divided by divisors[i] where there are any."""

    theta: float
    divisors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ArchitectureConfig:
    """One decoder. `max_context_len` is what the model was trained for, cut to its sliding window where it has one:
    up to there a window changes nothing, and beyond it we would have to compute it."""

    family: Family
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_context_len: int
    tied_embeddings: bool
    sliding_window: int | None = None

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token takes over all layers; `itemsize` is of one number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


def from_hf_config(config: Mapping[str, Any]) -> ArchitectureConfig:
    """From the JSON of a config.json, of transformers 4 or 5. Raises ConfigError for what we don't compute."""
    family = _family(_BY_HF_NAME, (config.get("architectures") or ["(none)"])[0])
    for key, supported in _REQUIRED_VALUES.items():
        if config.get(key, supported) not in (supported, None):
            raise ConfigError(f"config.json: {key}={config[key]!r} is not supported, only {supported!r}")
    scheme_of(config)  # which refuses what weights.py couldn't read
    try:
        num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden_size // num_heads
        window = config.get("sliding_window", family.default_window) if _slides(family, config) else None
        return _checked(
            ArchitectureConfig(
                family=family,
                vocab_size=config["vocab_size"],
                hidden_size=hidden_size,
                num_layers=config["num_hidden_layers"],
                num_heads=num_heads,
                num_kv_heads=config.get("num_key_value_heads") or num_heads,
                head_dim=head_dim,
                intermediate_size=config["intermediate_size"],
                rms_norm_eps=config.get("rms_norm_eps", 1e-6),
                rope=_hf_rope(config, head_dim),
                max_context_len=min(config["max_position_embeddings"], window or math.inf),
                tied_embeddings=config.get("tie_word_embeddings", False),
                sliding_window=window,
            )
        )
    except KeyError as error:
        raise ConfigError(f"config.json: {error.args[0]} is missing") from error


def from_gguf(file: GgufFile) -> ArchitectureConfig:
    """From a GGUF's metadata and tensor names. Raises ConfigError for what we don't compute."""
    metadata = file.metadata
    name = metadata.get("general.architecture", "(none)")
    family = _family(_BY_GGUF_NAME, name)
    if metadata.get(f"{name}.expert_count", 0):
        raise ConfigError(f"{file.path}: mixtures of experts ({name}.expert_count) are not supported")
    try:
        num_heads, hidden_size = metadata[f"{name}.attention.head_count"], metadata[f"{name}.embedding_length"]
        head_dim = metadata.get(f"{name}.attention.key_length", hidden_size // num_heads)
        window = metadata.get(f"{name}.attention.sliding_window") or None
        if metadata.get(f"{name}.rope.dimension_count", head_dim) != head_dim:
            raise ConfigError(f"{file.path}: rotary positions on part of a head ({name}.rope.dimension_count) unsupported")
        return _checked(
            ArchitectureConfig(
                family=family,
                vocab_size=file.tensors["token_embd.weight"].shape[0],
                hidden_size=hidden_size,
                num_layers=metadata[f"{name}.block_count"],
                num_heads=num_heads,
                num_kv_heads=metadata.get(f"{name}.attention.head_count_kv", num_heads),
                head_dim=head_dim,
                intermediate_size=metadata[f"{name}.feed_forward_length"],
                rms_norm_eps=metadata[f"{name}.attention.layer_norm_rms_epsilon"],
                rope=_gguf_rope(file, name, head_dim),
                max_context_len=min(metadata[f"{name}.context_length"], window or math.inf),
                tied_embeddings="output.weight" not in file.tensors,
                sliding_window=window,
            )
        )
    except KeyError as error:
        raise ConfigError(f"{file.path}: {error.args[0]} is missing") from error


def _family(table: Mapping[str, Family], name: str) -> Family:
    if name not in table:
        raise ConfigError(f"the architecture {name} is not supported; supported are {', '.join(sorted(table))}")
    return table[name]


def _slides(family: Family, config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_sliding_window", family.default_window is not None))


def _checked(architecture: ArchitectureConfig) -> ArchitectureConfig:
    """Layer-wise lists (of heads, of widths) and heads that don't divide exist in files; we compute neither."""
    for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
        value = getattr(architecture, name)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"the model's {name} is {value!r}; supported is one positive number for all layers")
    if architecture.num_heads % architecture.num_kv_heads:
        raise ConfigError(f"{architecture.num_heads} query heads don't divide among {architecture.num_kv_heads} key heads")
    if architecture.head_dim % 2:
        raise ConfigError(f"head_dim {architecture.head_dim} is odd: rotary positions need pairs")
    return architecture


def _hf_rope(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    # transformers 5 keeps everything in rope_parameters; 4 had rope_theta beside rope_scaling (with "type" before "rope_type").
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("config.json: partial_rotary_factor is not supported, only 1.0")
    match kind:
        case "default":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, (float(rope["factor"]),) * (head_dim // 2))
        case "llama3":
            trained_len = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
            return RopeConfig(
                theta,
                llama3_divisors(
                    theta,
                    head_dim,
                    factor=rope["factor"],
                    low_freq_factor=rope["low_freq_factor"],
                    high_freq_factor=rope["high_freq_factor"],
                    trained_len=trained_len,
                ),
            )
    raise ConfigError(f"config.json: rope type {kind!r} is not supported; supported are default, linear, llama3")


def _gguf_rope(file: GgufFile, name: str, head_dim: int) -> RopeConfig:
    theta = float(file.metadata.get(f"{name}.rope.freq_base", 10000.0))
    kind = file.metadata.get(f"{name}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:  # how a GGUF stores llama3's scaling
        return RopeConfig(theta, tuple(file.read("rope_freqs.weight").tolist()))
    match kind:
        case "none":
            return RopeConfig(theta)
        case "linear":
            return RopeConfig(theta, (float(file.metadata[f"{name}.rope.scaling.factor"]),) * (head_dim // 2))
    raise ConfigError(f"{file.path}: rope scaling {kind!r} is not supported; supported are none, linear, rope_freqs")


def llama3_divisors(
    theta: float, head_dim: int, *, factor: float, low_freq_factor: float, high_freq_factor: float, trained_len: int
) -> tuple[float, ...]:
    """Llama 3.1's stretch: waves longer than the trained context are slowed by `factor`, short ones kept, blended between."""
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        blend = (trained_len / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        divisors.append(1 / ((1 - blend) / factor + blend))
    return tuple(divisors)
