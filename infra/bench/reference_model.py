"""The embedded model as transformers reads it from its GGUF file: the reference of the benchmarks."""

from __future__ import annotations

import torch
from serving_app import CONFIG
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from configs.load import load
from replicas.model_source import resolve


def reference_model(dtype: torch.dtype) -> PreTrainedModel:
    """What from_pretrained(gguf_file=...) does, which wants the package accelerate for nothing that matters here."""
    path = resolve(load(CONFIG).model).path
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), (missing, unexpected)
    model.tie_weights()
    return model


def reference_tokenizer() -> PreTrainedTokenizerBase:
    path = resolve(load(CONFIG).model).path
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
