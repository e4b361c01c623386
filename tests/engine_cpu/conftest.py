"""What the suites of models share."""

from __future__ import annotations

import pytest

from configs.schema import ModelConfig
from replicas.model_source import resolve


@pytest.fixture(scope="session")
def embedded_reference():
    """What from_pretrained(gguf_file=...) does, which wants the package accelerate for nothing that matters here."""
    import torch
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = resolve(ModelConfig()).path
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model
