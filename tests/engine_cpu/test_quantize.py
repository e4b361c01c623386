"""Weights in few bits: the formats against gguf's own, and a model quantized into a directory."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import gguf
import numpy as np
import pytest
import tiny_models
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file
from test_weights import interleave, source, write_gguf

from cluster.__main__ import main
from configs.schema import ModelConfig
from replicas import model_source
from replicas.engine import export
from replicas.engine.export import tensor_shapes
from replicas.engine.gguf_weights import gguf_tensor_name
from replicas.engine.models.model_weights import ModelWeights
from replicas.engine.quantize import checkpoint as quantize_checkpoint
from replicas.engine.quantize.checkpoint import quantize_model
from replicas.engine.quantize.formats import GROUP, QUANTIZERS, QuantizedTensor, concatenate, quantize
from replicas.engine.weights import open_checkpoint
from replicas.errors import ConfigError
from replicas.tokenizer import load_tokenizer
from replicas.tokenizer_files import from_gguf

FORMATS = sorted(QUANTIZERS)
GGUF_KINDS = {"Q4_0": "int4", "Q4_1": "int4", "Q8_0": "int8_g32"}
TINY = {name: tiny_models.CONFIGS[name] for name in ("llama", "llama-tied", "qwen2", "qwen3")}


def open_model(model):
    return open_checkpoint(model_source.resolve(model), model_source.architecture(model))


def parts(matrix):
    return [part for part in (matrix.data, matrix.scale, matrix.minimum) if part is not None]


def assert_same(found, expected):
    """Bit for bit, numbers and quantized matrices alike."""
    assert type(found) is type(expected)
    if isinstance(expected, QuantizedTensor):
        assert found.format == expected.format
        assert all(torch.equal(a, b) for a, b in zip(parts(found), parts(expected), strict=True))
    elif expected is not None:
        assert torch.equal(found.float(), expected.float())


def all_weights(model, quantization):
    weights = ModelWeights(model_source.architecture(model), open_model(model), quantization)
    yield from (weights.embedding(), weights.head(), weights.norm())
    for index in range(model_source.architecture(model).num_layers):
        layer = weights.layer(index)
        yield from (getattr(layer, name) for name in layer.__slots__)


# The formats


@st.composite
def matrices(draw):
    """Weights from tiny to large, with rows and groups of zeros and of one value."""
    shape = (draw(st.integers(1, 5)), GROUP * draw(st.integers(1, 3)))
    numbers = draw(arrays(np.float32, shape, elements=st.floats(-1, 1, width=32), fill=st.just(0.0)))
    return torch.from_numpy(numbers) * 10.0 ** draw(st.integers(-9, 3))


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=200)
@given(weight=matrices())
def test_every_number_is_kept_to_half_a_step_and_is_a_number(format, weight):
    matrix = quantize(weight, format)
    found = matrix.dequantize()
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    groups = weight if format == "int8" else weight.view(len(weight), -1, GROUP)
    span, steps = (groups.amax(-1) - groups.amin(-1), 15) if format == "int4" else (groups.abs().amax(-1), 127)
    # Of scale and minimum, numbers of 16 bits, 2**-11 is lost, and 2**-25 at the least; of the scale once for each step.
    lost = 0 if format == "int8" else (groups.abs().amax(-1) + span) * 2**-11 + (steps + 1) * 2**-25
    bound = span / steps / 2 + lost + span * 1e-6 + 1e-38  # the last: below the normal numbers of 32 bits
    error = (found.view_as(groups) - groups).abs().amax(-1)
    assert (error <= bound).all(), (error, bound)


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros(format):
    weight = torch.randn(4, 96)
    weight[1] = 0
    assert (quantize(weight, format).dequantize()[1] == 0).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_matrix_in_any_float_and_any_layout_is_quantized(format, dtype):
    weight = torch.randn(96, 64).to(dtype)
    assert_same(quantize(weight.t(), format), quantize(weight.float().t().contiguous(), format))


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_taken_and_joined_as_those_of_the_numbers_are(format):
    matrix = quantize(torch.randn(6, 64), format)
    numbers, index = matrix.dequantize(), torch.tensor([5, 0, 3])
    assert torch.equal(matrix.take_rows(index).dequantize(), numbers[index])
    joined = concatenate([matrix, matrix.take_rows(index)])
    assert torch.equal(joined.dequantize(), torch.cat((numbers, numbers[index])))
    assert (joined.rows, joined.columns) == (9, 64)
    assert joined.nbytes == sum(part.nbytes for part in parts(joined))


@pytest.mark.parametrize(("kind", "format"), [("Q4_1", "int4"), ("Q8_0", "int8_g32")])
def test_our_error_is_no_larger_than_that_of_gguf(kind, format):
    weight, kind = torch.randn(64, 256), gguf.GGMLQuantizationType[kind]
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    ours = quantize(weight, format).dequantize()
    assert (ours - weight).square().mean() <= (theirs - weight).square().mean() * 1.001


# GGUF


def make_quantized_gguf(directory, name, kind):
    """(a GGUF whose matrices are of `kind`, what gguf's own package makes of them, by transformers' names)."""
    tiny_models.make(name, directory)
    config = json.loads((directory / "config.json").read_text())
    kind = gguf.GGMLQuantizationType[kind]
    heads = {".q_proj.weight": config["num_attention_heads"], ".k_proj.weight": config["num_key_value_heads"]}
    numbers, stored = {}, {}
    for tensor_name, tensor in load_file(directory / "model.safetensors").items():
        numbers[tensor_name] = tensor.numpy()
        num_heads = next((n for suffix, n in heads.items() if name == "llama" and tensor_name.endswith(suffix)), None)
        ordered = tensor.numpy() if num_heads is None else interleave(tensor.numpy(), num_heads)
        if tensor.dim() == 2:
            numbers[tensor_name] = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)
            ordered = gguf.quants.quantize(ordered, kind)
        stored[gguf_tensor_name(tensor_name)] = ordered, kind if tensor.dim() == 2 else None
    path = directory.with_suffix(".gguf")
    write_gguf(path, name, config, stored)
    return path, numbers


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_gguf_is_read_as_it_keeps_its_matrices(tmp_path, name, kind):
    path, numbers = make_quantized_gguf(tmp_path / name, name, kind)
    checkpoint = open_model(source(path))
    for tensor_name, expected in numbers.items():
        found = checkpoint.quantized(tensor_name, expected.shape)
        if expected.ndim == 1:
            assert found is None
            continue
        assert found.format == GGUF_KINDS[kind]
        assert all(part.is_contiguous() for part in parts(found))
        assert torch.equal(found.dequantize(), torch.from_numpy(expected)), tensor_name


def test_a_matrix_that_is_one_group_wide_is_contiguous_too(tmp_path):
    tiny_models.make("llama", tmp_path / "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text()) | {"hidden_size": GROUP}
    kind, weight = gguf.GGMLQuantizationType.Q4_1, np.random.default_rng(0).normal(size=(160, GROUP)).astype(np.float32)
    stored = {"token_embd.weight": (gguf.quants.quantize(weight, kind), kind)}
    write_gguf(tmp_path / "narrow.gguf", "llama", config, stored)
    found = open_model(source(tmp_path / "narrow.gguf")).quantized("model.embed_tokens.weight", weight.shape)
    assert all(part.is_contiguous() for part in parts(found))
    assert torch.equal(found.dequantize(), torch.from_numpy(gguf.quants.dequantize(stored["token_embd.weight"][0], kind)))


def test_the_embedded_model_has_layers_of_four_bits_and_a_head_of_eight():
    checkpoint = open_model(ModelConfig())
    formats = {}
    for name, shape in tensor_shapes(model_source.architecture(ModelConfig())).items():
        found = checkpoint.quantized(name, shape)
        formats[name] = None if found is None else found.format
        if found is not None and (".0." in name or "embed" in name):
            assert torch.equal(found.dequantize(), checkpoint.tensor(name, shape)), name
    assert formats.pop("model.embed_tokens.weight") == "int8_g32"
    assert {format for name, format in formats.items() if "proj" in name} == {"int4"}
    assert {format for name, format in formats.items() if "norm" in name} == {None}


# The command


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("name", TINY)
def test_a_quantized_directory_is_what_quantizing_at_every_start_gives(tmp_path, name, format):
    tiny_models.make(name, tmp_path / "model")
    done = quantize_model(source(tmp_path / "model"), format, tmp_path / "out")
    assert (done.num_kept, done.num_matrices) == (0, 16 if "tied" not in name and name != "qwen3" else 15)
    assert done.bytes_after < done.bytes_before / 2
    model, quantized = source(tmp_path / "model"), source(tmp_path / "out")
    assert model_source.architecture(quantized) == model_source.architecture(model)
    for asked in ("file", format):
        for found, expected in zip(all_weights(quantized, asked), all_weights(model, format), strict=True):
            assert_same(found, expected)


def test_the_numbers_of_a_quantized_directory_are_those_of_its_matrices(tmp_path):
    tiny_models.make("qwen2", tmp_path / "model")
    quantize_model(source(tmp_path / "model"), "int4", tmp_path / "out")
    plain, checkpoint = open_model(source(tmp_path / "model")), open_model(source(tmp_path / "out"))
    for name, shape in tensor_shapes(model_source.architecture(source(tmp_path / "out"))).items():
        kept, numbers = checkpoint.quantized(name, shape), checkpoint.tensor(name, shape)
        expected = kept.dequantize() if kept is not None else plain.tensor(name, shape)
        assert torch.equal(numbers, expected), name


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_int4_keeps_the_matrices_of_a_gguf_bit_for_bit(tmp_path, monkeypatch, kind):
    spec = from_gguf(model_source.resolve(ModelConfig()).path)
    monkeypatch.setattr(export, "from_gguf", lambda path: spec)  # the file has weights and no vocabulary
    path, _ = make_quantized_gguf(tmp_path / "llama", "llama", kind)
    done = quantize_model(source(path), "int4", tmp_path / "out")
    assert done.num_kept == done.num_matrices == 16
    for found, expected in zip(all_weights(source(tmp_path / "out"), "file"), all_weights(source(path), "file"), strict=True):
        assert_same(found, expected)


@pytest.fixture(scope="module")
def embedded_int4(tmp_path_factory):
    output = tmp_path_factory.mktemp("quantized") / "int4"
    assert main(["quantize", "--format", "int4", "--output", str(output)]) == 0
    return output


def test_the_embedded_model_keeps_its_weights_its_tokens_and_its_ends(embedded_int4):
    quantized = source(embedded_int4)
    for found, expected in zip(all_weights(quantized, "file"), all_weights(ModelConfig(), "file"), strict=True):
        assert_same(found, expected)
    assert model_source.eos_token_ids(quantized) == model_source.eos_token_ids(ModelConfig())
    ours, theirs = load_tokenizer(quantized), load_tokenizer(ModelConfig())
    text = "Größe 12345 <|im_start|>user\n日本語 😀 <|endoftext|>"
    for allow_special in (False, True):
        expected = theirs.encode(text, add_special_tokens=True, allow_special=allow_special)
        assert ours.encode(text, add_special_tokens=True, allow_special=allow_special) == expected


def test_the_token_that_begins_a_text_is_kept(tmp_path, monkeypatch):
    spec = replace(from_gguf(model_source.resolve(ModelConfig()).path), bos_ids=(1,))
    monkeypatch.setattr(export, "from_gguf", lambda path: spec)
    quantize_model(ModelConfig(), "int4", tmp_path / "out")
    assert load_tokenizer(source(tmp_path / "out")).encode("Hello", add_special_tokens=True)[0] == 1
    library = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert library("Hello")["input_ids"][0] == 1


def test_the_command_says_the_sizes_before_and_after(tmp_path, capsys):
    tiny_models.make("llama", tmp_path / "model")
    assert main(["quantize", "--model", str(tmp_path / "model"), "--format", "int8", "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    before = (tmp_path / "model" / "model.safetensors").stat().st_size / 2**20
    after = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) / 2**20
    assert f"model: {before:.1f} MiB" in printed
    assert f"out: {after:.1f} MiB ({after / before:.0%}), int8" in printed
    assert f"model.source={tmp_path / 'out'}" in printed


def test_what_stands_beside_the_weights_goes_along_and_their_rights_are_the_usual_ones(tmp_path):
    model = tmp_path / "model"
    tiny_models.make("llama", model)
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "model.safetensors.index.json", "quantize_config.json"):
        (model / name).write_text('{"eos_token_id": 7}')
    quantize_model(source(model), "int8", tmp_path / "out")
    copied = {path.name for path in (tmp_path / "out").iterdir()} - {"config.json", "model-00001.safetensors"}
    assert copied == {"tokenizer.json", "chat_template.jinja", "LICENSE", "generation_config.json"}
    (tmp_path / "usual").touch()
    assert {path.stat().st_mode for path in (tmp_path / "out").iterdir()} == {(tmp_path / "usual").stat().st_mode}
    declared = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert declared == {"quant_method": "trieserve", "format": "int8", "version": 1}


def test_progress_rises_to_one(tmp_path):
    tiny_models.make("llama", tmp_path / "model")
    heard = []
    quantize_model(source(tmp_path / "model"), "int8", tmp_path / "out", heard.append)
    assert all(a < b for a, b in pairwise(heard))
    assert heard[-1] == 1.0


def test_a_model_larger_than_a_shard_becomes_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(quantize_checkpoint, "_SHARD_BYTES", 20_000)
    monkeypatch.setattr(quantize_checkpoint, "_NUMBERS_AT_ONCE", 1000)
    tiny_models.make("llama", tmp_path / "model")
    done = quantize_model(source(tmp_path / "model"), "int4", tmp_path / "out")
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert done.bytes_after == sum(file.stat().st_size for file in files)
    expected = all_weights(source(tmp_path / "model"), "int4")
    for found, wanted in zip(all_weights(source(tmp_path / "out"), "file"), expected, strict=True):
        assert_same(found, wanted)


@pytest.mark.parametrize("existing", ["file", "directory"])
def test_nothing_is_overwritten(tmp_path, capsys, existing):
    tiny_models.make("llama", tmp_path / "model")
    output = tmp_path / "out"
    if existing == "directory":
        output.mkdir()
        (output / "mine").touch()
    else:
        output.touch()
    arguments = ["quantize", "--model", str(tmp_path / "model"), "--format", "int8", "--output", str(output)]
    assert main(arguments) == 2
    assert "isn't an empty directory: nothing is overwritten" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_an_empty_directory_is_filled(tmp_path):
    tiny_models.make("llama", tmp_path / "model")
    (tmp_path / "out").mkdir()
    quantize_model(source(tmp_path / "model"), "int8", tmp_path / "out")
    assert model_source.architecture(source(tmp_path / "out")).vocab_size == tiny_models.VOCAB_SIZE


def test_weights_that_are_no_numbers_are_named_and_leave_nothing_behind(tmp_path):
    tiny_models.make("llama", tmp_path / "model")
    tiny_models.poison(tmp_path / "model", 5)
    for format in ("int8", "int4"):
        with pytest.raises(ConfigError, match=r"tensor model\.embed_tokens\.weight has numbers that int8(_g32)? can't say"):
            quantize_model(source(tmp_path / "model"), format, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_columns_that_are_no_whole_groups_are_refused_for_int4_and_fine_for_int8(tmp_path):
    tiny_models.make("llama", tmp_path / "model", intermediate_size=100)
    with pytest.raises(ConfigError, match=r"down_proj\.weight has 100 columns; int4 needs a multiple of 32, int8 doesn't"):
        quantize_model(source(tmp_path / "model"), "int4", tmp_path / "out")
    assert quantize_model(source(tmp_path / "model"), "int8", tmp_path / "out").num_matrices == 16


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight.scale"), "no whole model.layers.0.mlp.up_proj.weight"),
        (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight.minimum"), "no whole model.layers.0.mlp.up_proj"),
        (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight.data"), "no tensor model.layers.0.mlp.up_proj.weight"),
        (
            lambda tensors: tensors.update({"lm_head.weight.data": torch.zeros(3, 96, dtype=torch.int8)}),
            r"lm_head\.weight\.data is torch\.int8 \(3, 96\)",
        ),
    ],
)
def test_a_damaged_quantized_directory_says_which_tensor(tmp_path, damage, message):
    tiny_models.make("llama", tmp_path / "model")
    quantize_model(source(tmp_path / "model"), "int4", tmp_path / "out")
    [path] = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=message):
        list(all_weights(source(tmp_path / "out"), "file"))
