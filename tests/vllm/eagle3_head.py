"""An EAGLE-3 head for the embedded model, of random numbers: it drafts, and is hardly ever right. In SafeAILab's format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from configs.schema import ModelConfig
from replicas.model_source import architecture

_DRAFT_VOCABULARY = 4096


def make(folder: Path) -> Path:
    shape = architecture(ModelConfig())
    hidden, mlp, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    sizes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (_DRAFT_VOCABULARY, hidden),
        "midlayer.self_attn.q_proj": (shape.num_heads * head, 2 * hidden),
        "midlayer.self_attn.k_proj": (shape.num_kv_heads * head, 2 * hidden),
        "midlayer.self_attn.v_proj": (shape.num_kv_heads * head, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, shape.num_heads * head),
        "midlayer.mlp.gate_proj": (mlp, hidden),
        "midlayer.mlp.up_proj": (mlp, hidden),
        "midlayer.mlp.down_proj": (hidden, mlp),
    }
    generator = torch.Generator().manual_seed(1)
    tensors = {f"{name}.weight": torch.randn(size, generator=generator) * 0.02 for name, size in sizes.items()}
    for name in ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(hidden)
    tensors["d2t"] = torch.zeros(_DRAFT_VOCABULARY, dtype=torch.int64)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": _DRAFT_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": head,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_context_len,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
