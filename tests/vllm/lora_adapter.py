"""A LoRA adapter for the embedded model, of random numbers large enough to change what it says. In PEFT's files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from configs.schema import ModelConfig
from replicas.model_source import architecture

RANK = 8


def make(folder: Path) -> Path:
    shape = architecture(ModelConfig())
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(shape.num_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, shape.hidden_size, generator=generator) * 0.3
        tensors[f"{name}.lora_B.weight"] = torch.randn(shape.num_heads * shape.head_dim, RANK, generator=generator) * 0.3
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
