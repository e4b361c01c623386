"""The installed vLLM against what we say of it: its surface, the arguments it takes, and those it refuses.

No engine is started. When a new version moves something, the first test here says what.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

from configs.load import from_mapping
from configs.schema import ModelConfig
from replicas.engine.export import model_directory
from replicas.vllm_support import installed
from replicas.vllm_support.options import _DEPRECATED_QUANTIZATIONS, _LORA_RANKS, _OURS, _QUANTIZATIONS, file_problems, problems
from replicas.vllm_support.start import refusal


@pytest.fixture(scope="module", autouse=True)
def _variables():
    """What `refusal` sets in this process ends with this module."""
    kept = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(kept)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(ModelConfig(), torch.bfloat16, tmp_path_factory.mktemp("models"))


@pytest.fixture
def fleet(model):
    """A function from sections to a fleet of the embedded model on a CPU, that no rule of ours was asked about."""

    def fleet(*, vllm=None, **sections):
        engine = {"kind": "vllm", "device": "cpu", "kv_cache_bytes": 2**28, **sections.get("engine", {}), "vllm": vllm or {}}
        source = {"source": str(model), "max_model_len": 2048, **sections.get("model", {})}
        return from_mapping({"model": source, "engine": engine}).fleets[0]

    return fleet


def test_every_name_that_we_touch_is_there():
    assert installed.surface_faults() == []


def test_the_installed_build_is_one_that_we_support():
    assert installed.require("cpu") == installed.find()


def test_every_argument_that_we_reserve_exists():
    assert _OURS.keys() - installed.argument_names() == set()


def test_our_tables_are_vllm_s():
    from vllm.config.lora import MaxLoRARanks
    from vllm.model_executor.layers.quantization import DEPRECATED_QUANTIZATION_METHODS, QuantizationMethods

    assert MaxLoRARanks.__args__ == _LORA_RANKS
    assert set(_QUANTIZATIONS) == set(QuantizationMethods.__args__)
    assert set(_DEPRECATED_QUANTIZATIONS) == set(DEPRECATED_QUANTIZATION_METHODS)


def test_a_method_of_the_surface_is_found_with_its_parameters(monkeypatch):
    """The check itself: a name and a parameter that don't exist are reported."""
    surface = {"vllm.v1.engine.async_llm": {"AsyncLLM.generate": ("no_such_parameter",), "AsyncLLM.no_such_method": ()}}
    monkeypatch.setattr(installed, "SURFACE", {**surface, "vllm.no_such_module": {}})
    assert [fault.partition(":")[0] for fault in installed.surface_faults()] == [
        "vllm.v1.engine.async_llm.AsyncLLM.generate has no no_such_parameter any more",
        "vllm.v1.engine.async_llm.AsyncLLM.no_such_method is gone",
        "vllm.no_such_module",
    ]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"vllm": {"enforce_eager": True, "block_size": 128, "args": {"stream_interval": 2}}},
        {"vllm": {"speculative": {"method": "ngram", "num_tokens": 2}}},
        {"engine": {"chunked_prefill": False, "max_num_batched_tokens": 2048}},
        {"engine": {"prefix_caching": False}},
    ],
)
def test_what_we_let_through_vllm_takes(fleet, model, sections):
    config = fleet(**sections)
    assert [*problems(config, installed.argument_names()), *file_problems(config)] == []
    assert refusal(config, "cpu", model) is None


# What our own rules refuse, vLLM refuses as well, and then names the same key.


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"vllm": {"tensor_parallel_size": 2}}, "engine.vllm.tensor_parallel_size"),
        ({"vllm": {"quantization": "fp9"}}, "engine.vllm.quantization"),
        ({"vllm": {"quantization": "fbgemm_fp8"}}, "engine.vllm.quantization"),
        ({"model": {"max_model_len": 8193}}, "model.max_model_len"),
        ({"engine": {"chunked_prefill": False, "max_num_batched_tokens": 512}}, "engine.max_num_batched_tokens"),
        ({"vllm": {"args": {"attention_bakend": "x"}}}, "engine.vllm.args.attention_bakend"),
    ],
)
def test_what_we_refuse_vllm_refuses_with_the_same_key(fleet, model, sections, key):
    config = fleet(**sections)
    ours = [*problems(config, installed.argument_names()), *file_problems(config)]
    assert [fault.split(":")[0] for fault in ours] == [key]
    theirs = refusal(config, "cpu", model)
    assert theirs is not None
    assert theirs.startswith(f"{key}: vLLM refuses it: ")


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"vllm": {"args": {"long_prefill_token_threshold": 4096}}}, "engine.vllm.args.long_prefill_token_threshold"),
        ({"vllm": {"args": {"max_num_active_seqs": 1024}}}, "engine.vllm.args.max_num_active_seqs"),
        ({"vllm": {"args": {"attention_backend": "NO_SUCH"}}}, "engine"),
    ],
)
def test_what_only_vllm_knows_to_be_wrong_is_our_error_too(fleet, model, sections, key):
    config = fleet(**sections)
    assert problems(config, installed.argument_names()) == []
    theirs = refusal(config, "cpu", model)
    assert theirs is not None
    assert theirs.startswith(f"{key}: vLLM refuses it: ")


def test_an_adapter_s_rules_are_those_of_vllm_s_own_reader(tmp_path, fleet):
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    good = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    bad = [{"use_dora": True}, {"bias": "all"}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}, {"use_qalora": True}]
    for changes in ({}, *bad):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**good, **changes}))
        faults = file_problems(fleet(model={"adapters": [{"name": "a", "source": str(tmp_path)}]}))
        helper = PEFTHelper.from_dict({**good, **changes})
        assert bool(faults) is bool(changes)
        if changes:
            with pytest.raises(ValueError):
                helper.validate_legal(LoRAConfig(max_lora_rank=8))
        else:
            helper.validate_legal(LoRAConfig(max_lora_rank=8))
