"""On a CUDA device the same code gives the logits that it gives on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "engine_cpu"))  # tiny_models, paged_model

import tiny_models
from paged_model import PagedModel, load_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PROMPT = [(13 * i) % tiny_models.VOCAB_SIZE for i in range(190)]


@pytest.mark.parametrize("name", ["llama", "llama3-rope", "qwen2", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_logits_on_cuda_equal_those_on_the_cpu(tmp_path, name, dtype, tolerance):
    tiny_models.make(name, tmp_path, initializer_range=0.05)
    expected = PagedModel(load_model(tmp_path), len(PROMPT)).feed(PROMPT)
    paged = PagedModel(load_model(tmp_path, torch.device("cuda"), dtype), len(PROMPT))
    logits = torch.cat([paged.feed(PROMPT[:33]), paged.feed(PROMPT[33:189]), paged.feed(PROMPT[189:])]).float().cpu()
    assert (logits - expected).norm() < tolerance * expected.norm()
