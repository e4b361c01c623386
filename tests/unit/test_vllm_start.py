"""Why vLLM doesn't start: its core says only "initialization failed", and whoever starts a replica needs to know more."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from configs.load import from_mapping
from replicas.errors import CapacityError, ConfigError, EngineError
from replicas.vllm_support import start
from replicas.vllm_support.installed import Installed
from replicas.vllm_support.memory import Demand

GIB = 2**30
CORE_FAILED = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
DEMAND = Demand(weight_bytes=10 * GIB, kv_bytes_per_token=2**17, num_tokens=8192)


@pytest.fixture
def failure(monkeypatch, tmp_path):
    """A function: what `build` raises where vLLM raises `error`, on a machine with `free` and `total` memory. No file stays."""

    def failure(error=CORE_FAILED, *, device="cuda", free=80 * GIB, total=80 * GIB, args=None, misfit=None):
        def fail(*_):
            raise error

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(start, "require", lambda device: Installed("0.33.0", device))
        monkeypatch.setattr(start, "_resolved", lambda fleet, device: fleet)
        monkeypatch.setattr(start, "check", lambda fleet: None)
        monkeypatch.setattr(start, "environment", lambda *_: {})
        monkeypatch.setattr(start, "_plan", lambda *_: start._Plan(Path("/model"), 0, DEMAND, misfit))
        monkeypatch.setattr(start, "_memory_bytes", lambda device: (free, total))
        monkeypatch.setattr(start, "_start", fail)
        config = {"engine": {"kind": "vllm", "device": device, "vllm": {"args": args or {}}}}
        with pytest.raises((ConfigError, EngineError)) as caught:
            start.build(from_mapping({**config, "replicas": {"num_gpus": 1 if device == "cuda" else 0}}), 1)
        assert list(tmp_path.iterdir()) == []
        return caught.value

    return failure


def test_a_core_that_found_too_little_memory_is_explained_with_what_would_fit(failure):
    error = failure(free=10 * GIB, total=12 * GIB)
    assert isinstance(error, CapacityError)
    assert "engine.gpu_memory_share=0.83 would fit" in error.message
    error = failure(total=11 * GIB)
    assert isinstance(error, CapacityError)
    assert "model.max_model_len=" not in error.message
    assert "on 2 such devices they would fit" in error.message


def test_a_context_that_does_not_fit_on_a_cpu_is_explained_too(failure):
    error = failure(device="cpu", free=int(10.5 * GIB))
    assert isinstance(error, CapacityError)
    assert "model.max_model_len=4096" in error.message


def test_a_core_that_failed_with_memory_enough_points_to_its_log(failure):
    error = failure()
    assert isinstance(error, EngineError)
    assert "log" in error.message


def test_what_can_not_fit_is_refused_before_vllm_is_loaded(failure):
    error = failure(AssertionError("vLLM was started"), misfit="too large; smaller would fit")
    assert isinstance(error, CapacityError)
    assert error.message == "too large; smaller would fit"


def test_an_argument_that_vllm_refuses_is_named_by_its_key(failure):
    assert failure(ValueError("max_model_len is too long")).message == (
        "model.max_model_len: vLLM refuses it: max_model_len is too long"
    )
    unexpected = TypeError("AsyncEngineArgs.__init__() got an unexpected keyword argument 'swap'")
    assert failure(unexpected, args={"swap": 1}).message.startswith("engine.vllm.args.swap: vLLM refuses it: ")


def test_a_dump_of_all_arguments_does_not_hide_which_one_is_wrong(failure):
    pydantic = ValueError(
        "1 validation error for ModelConfig\n  Value error, Unknown quantization method: fp9. [type=value_error, "
        "input_value=ArgsKwargs((), {'max_model_len': 9}), input_type=ArgsKwargs]"
    )
    assert failure(pydantic).message == "engine.vllm.quantization: vLLM refuses it: Unknown quantization method: fp9."


def test_packages_that_can_not_be_imported_are_named(failure):
    assert "pip uninstall torchvision" in failure(RuntimeError("operator torchvision::nms does not exist")).message
    assert "can't be imported" in failure(ImportError("libcudart.so.13: cannot open shared object file")).message
