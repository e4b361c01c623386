"""Random models of each family, a few thousand weights small, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB_SIZE = 160
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough that logits differ and greedy choices are clear
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama3-rope": lambda: transformers.LlamaConfig(**_SIZES, rope_parameters=_LLAMA3),
    "linear-rope": lambda: transformers.LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**{**_SIZES, "head_dim": 32}, tie_word_embeddings=True),
}


def make(name: str, directory: Path, **changes: object) -> transformers.PreTrainedModel:
    """Save the tiny model `name` into `directory` in fp32 and return it; biases and norms are random as well."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=1.0 if "norm" in parameter_name else 0.0, std=0.3)
    model.save_pretrained(directory)
    return model


def poison(directory: Path, token_id: int) -> None:
    """Make the token's embedding, in the model that `make` saved there, no number at all."""
    [path] = directory.glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][token_id] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
