"""A GGUF written as a directory for vLLM: the same weights, bit for bit, and the same tokens as transformers makes of it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_weights import make_gguf

from configs.schema import ModelConfig
from replicas import model_source
from replicas.chat_template import ChatMessage
from replicas.engine import export
from replicas.engine.export import model_directory
from replicas.errors import ConfigError
from replicas.tokenizer import load_tokenizer
from replicas.tokenizer_files import from_gguf

TEXTS = (
    "Hello, world! It's 12345 o'clock;  we're done.\n\n",
    "Größe Ελληνικά العربية 日本語 😀👩‍👩‍👧‍👦 e\u0301 \u00a0\u2003",
    "<|im_start|>user\n hello <|im_end|><|endoftext|>  <repo_name>x<|im_",
    "",
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return model_directory(ModelConfig(), torch.bfloat16, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def library(exported):
    return transformers.AutoTokenizer.from_pretrained(exported)


# Weights


def test_the_weights_are_those_that_transformers_reads_from_the_file(exported, embedded_reference):
    """After the same rounding, which also undoes llama.cpp's order of the rows of q and k."""
    found = load_file(exported / "model.safetensors")
    expected = {name: tensor for name, tensor in embedded_reference.state_dict().items() if name != "lm_head.weight"}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor.to(torch.bfloat16)) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_each_family_becomes_the_model_that_its_file_was_made_from(tmp_path, monkeypatch, name):
    spec = from_gguf(model_source.resolve(ModelConfig()).path)
    monkeypatch.setattr(export, "from_gguf", lambda path: spec)  # these files have weights and no vocabulary
    original, gguf, tensors = make_gguf(tmp_path, name)
    directory = model_directory(ModelConfig(source=str(gguf)), torch.float32, tmp_path / "cache")
    found = load_file(directory / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
    ids = torch.arange(20).unsqueeze(0)
    models = [transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (original, directory)]
    with torch.inference_mode():
        expected, logits = (model(ids).logits for model in models)
    torch.testing.assert_close(logits, expected)


def test_our_own_engine_reads_the_directory_as_it_reads_the_file(exported):
    directory = ModelConfig(source=str(exported))
    assert model_source.architecture(directory) == model_source.architecture(ModelConfig())
    assert model_source.eos_token_ids(directory) == model_source.eos_token_ids(ModelConfig())


def test_scaled_rotary_positions_are_refused_rather_than_lost(tmp_path, monkeypatch):
    shape = model_source.architecture(ModelConfig())
    scaled = replace(shape, rope=replace(shape.rope, divisors=(2.0,) * (shape.head_dim // 2)))
    monkeypatch.setattr(export, "architecture", lambda model: scaled)
    with pytest.raises(ConfigError, match=r"model\.source: this GGUF scales rotary positions"):
        model_directory(ModelConfig(), torch.bfloat16, tmp_path)
    assert list(tmp_path.iterdir()) == []


# Tokens


@pytest.mark.parametrize("text", TEXTS)
def test_text_with_and_without_markers_has_the_same_ids_as_ours(library, text):
    ours = load_tokenizer(ModelConfig())
    ids = ours.encode(text, add_special_tokens=False, allow_special=True)
    assert library(text)["input_ids"] == ids
    assert library.decode(ids) == text


def test_conversations_have_the_same_ids_as_ours(library):
    messages = [{"role": "user", "content": text} for text in TEXTS if "<|" not in text]
    found = library.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert found == load_tokenizer(ModelConfig()).render_chat([ChatMessage(**message) for message in messages])


def test_special_tokens_keep_their_part_in_the_vocabulary(library):
    ours = load_tokenizer(ModelConfig())
    assert {token_id for token_id, token in library.added_tokens_decoder.items() if token.special} == set(ours.special_ids)
    assert len(library) == ours.vocab_size
    assert library.eos_token == "<|im_end|>"


# The cache


def test_a_directory_of_safetensors_is_used_as_it_is(exported, tmp_path):
    assert model_directory(ModelConfig(source=str(exported)), torch.float32, tmp_path) == exported
    assert list(tmp_path.iterdir()) == []


def test_it_is_written_once_for_each_file_and_number_format(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(export, "_write", lambda model, dtype, folder: written.append(dtype))
    first = model_directory(ModelConfig(), torch.bfloat16, tmp_path)
    assert model_directory(ModelConfig(revision="another/name"), torch.bfloat16, tmp_path) == first
    assert model_directory(ModelConfig(), torch.float32, tmp_path) != first
    assert written == [torch.bfloat16, torch.float32]


def test_two_replicas_that_start_at_once_get_one_whole_directory(tmp_path, monkeypatch):
    def write(model, dtype, folder):
        (folder / "config.json").write_text(json.dumps({"whole": True}))
        both.wait()

    both = Barrier(2)
    monkeypatch.setattr(export, "_write", write)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: model_directory(ModelConfig(), torch.bfloat16, tmp_path), range(2)))
    assert paths[0] == paths[1]
    assert json.loads((paths[0] / "config.json").read_text()) == {"whole": True}
    assert list(tmp_path.iterdir()) == [paths[0]]


def test_a_writer_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(model, dtype, folder):
        (folder / "config.json").touch()
        raise OSError("no space left on device")

    monkeypatch.setattr(export, "_write", fail)
    with pytest.raises(OSError, match="no space"):
        model_directory(ModelConfig(), torch.bfloat16, tmp_path)
    assert list(tmp_path.iterdir()) == []
