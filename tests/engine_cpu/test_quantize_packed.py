"""Matrices of four bits in AWQ's and GPTQ's files, which the packers here make number by number, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from test_quantize import assert_same, open_model, parts
from test_weights import edit_config, source

from replicas import model_source
from replicas.engine.export import tensor_shapes
from replicas.engine.models.config import from_hf_config
from replicas.engine.quantize.checkpoint import quantize_model
from replicas.engine.quantize.scheme import scheme_of
from replicas.engine.weights import SafetensorsCheckpoint
from replicas.errors import ConfigError

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(numbers, order=range(8)):
    """[rows, words * 8] of 0..15 -> int32 [rows, words]; `order` names the elements from the lowest bits on."""
    packed = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
    for row in range(packed.shape[0]):
        for word in range(packed.shape[1]):
            for place, element in enumerate(order):
                packed[row, word] |= np.uint32(int(numbers[row, word * 8 + element]) << (4 * place))
    return torch.from_numpy(packed.view(np.int32))


def pack_gptq(module, numbers, zeros, scales, *, less=1, order=None):
    """numbers [out, in], zeros and scales [out, groups]"""
    in_features = numbers.shape[1]
    size = in_features // zeros.shape[1]
    return {
        f"{module}.qweight": pack_words(numbers).t().contiguous(),
        f"{module}.qzeros": pack_words(zeros.T - less),
        f"{module}.scales": scales.t().contiguous(),
        f"{module}.g_idx": torch.arange(in_features, dtype=torch.int32) // size if order is None else order,
    }


def pack_awq(module, numbers, zeros, scales):
    return {
        f"{module}.qweight": pack_words(numbers.T, AWQ_ORDER),
        f"{module}.qzeros": pack_words(zeros.T, AWQ_ORDER),
        f"{module}.scales": scales.t().contiguous(),
    }


def draw_packed(rows, columns, size, *, symmetric, least_zero=1, seed=0):
    """(numbers, zeros, scales, the weight they mean)"""
    draw = np.random.default_rng(seed)
    num_groups = 1 if size == -1 else columns // size
    numbers = draw.integers(0, 16, (rows, columns))
    zeros = np.full((rows, num_groups), 8) if symmetric else draw.integers(least_zero, 16, (rows, num_groups))
    scales = torch.from_numpy(draw.uniform(0.001, 0.1, (rows, num_groups))).half()
    groups = torch.from_numpy(numbers.reshape(rows, num_groups, -1) - zeros[..., None]).float()
    return numbers, zeros, scales, (groups * scales.float().unsqueeze(-1)).view(rows, columns)


def gptq(**changes):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, **changes}


def awq(**changes):
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True, **changes}


def open_packed(tmp_path, declared, tensors):
    save_file(tensors, tmp_path / "packed.safetensors")
    return SafetensorsCheckpoint([tmp_path / "packed.safetensors"], scheme_of({"quantization_config": declared}))


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("size", [32, 64, 128, -1])
@pytest.mark.parametrize(
    "layout",
    [
        {"quant_method": "gptq"},
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
        {"quant_method": "gptq", "checkpoint_format": None, "format": "gptq_v2", "desc_act": True},
        {"quant_method": "awq"},
        {"quant_method": "awq", "version": "GEMM", "backend": None},
    ],
    ids=lambda layout: "-".join(str(value) for value in layout.values()),
)
def test_matrices_of_awq_and_gptq_mean_scale_times_number_less_zero(tmp_path, layout, size, symmetric):
    is_v2 = "gptq_v2" in layout.values()
    least_zero = 0 if is_v2 or layout["quant_method"] == "awq" else 1
    numbers, zeros, scales, weight = draw_packed(24, 256, size, symmetric=symmetric, least_zero=least_zero)
    if layout["quant_method"] == "awq":
        checkpoint = open_packed(tmp_path, awq(group_size=size, **layout), pack_awq("linear", numbers, zeros, scales))
    else:
        tensors = pack_gptq("linear", numbers, zeros, scales, less=0 if is_v2 else 1)
        checkpoint = open_packed(tmp_path, gptq(group_size=size, sym=symmetric) | layout, tensors)
    assert torch.equal(checkpoint.tensor("linear.weight", (24, 256)), weight)
    matrix = checkpoint.quantized("linear.weight", (24, 256))
    assert (matrix.format, matrix.rows, matrix.columns) == ("int4", 24, 256)
    assert all(part.is_contiguous() for part in parts(matrix))
    # The minimum, scale * zero, is rounded to 16 bits: exact where the zero is a power of two.
    bound = 0 if symmetric else float(scales.max()) / 128
    assert (matrix.dequantize() - weight).abs().max() <= bound


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_packed_model_loads_with_its_plain_modules_plain(tmp_path, method):
    tiny_models.make("qwen2", tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    for seed, name in enumerate(name for name in list(tensors) if ".layers." in name and tensors[name].dim() == 2):
        numbers, zeros, scales, expected[name] = draw_packed(*tensors.pop(name).shape, 32, symmetric=False, seed=seed)
        pack = pack_gptq if method == "gptq" else pack_awq
        tensors |= pack(name.removesuffix(".weight"), numbers, zeros, scales)
    expected |= {name: tensor for name, tensor in tensors.items() if name.endswith((".weight", ".bias"))}
    save_file(tensors, tmp_path / "model.safetensors")
    edit_config(tmp_path, quantization_config=gptq(sym=False) if method == "gptq" else awq())
    checkpoint = open_model(source(tmp_path))
    for name, shape in tensor_shapes(model_source.architecture(source(tmp_path))).items():
        assert torch.equal(checkpoint.tensor(name, shape), expected[name]), name
        assert (checkpoint.quantized(name, shape) is None) == (name in tensors)
    done = quantize_model(source(tmp_path), "int4", tmp_path / "out")
    assert (done.num_kept, done.num_matrices) == (14, 16)  # embedding and head were plain
    again = open_model(source(tmp_path / "out"))
    assert_same(
        again.quantized("model.layers.1.mlp.down_proj.weight", (96, 128)),
        checkpoint.quantized("model.layers.1.mlp.down_proj.weight", (96, 128)),
    )


def refused(declared, named):
    return pytest.param(declared, named, id=named)


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        refused({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method='bitsandbytes'"),
        refused({"quant_method": "fp8"}, "quant_method='fp8'"),
        refused({"quant_method": "compressed-tensors"}, "quant_method='compressed-tensors'"),
        refused({"bits": 4}, "quant_method=None"),
        refused({"quant_method": ["gptq"]}, "quant_method=['gptq']"),
        refused(gptq(bits=8), "bits=8"),
        refused(gptq(bits=3), "bits=3"),
        refused(gptq(group_size=16), "group_size=16"),
        refused(gptq(group_size="large"), "group_size='large'"),
        refused(gptq(checkpoint_format="marlin"), "checkpoint_format='marlin'"),
        refused(gptq(is_marlin_format=True), "is_marlin_format=True"),
        refused(gptq(dynamic={"+:.*down.*": {"bits": 8}}), "dynamic={"),
        refused(awq(version="gemv"), "version='gemv'"),
        refused(awq(version="gemv_fast"), "version='gemv_fast'"),
        refused(awq(version="marlin"), "version='marlin'"),
        refused(awq(backend="llm-awq"), "backend='llm-awq'"),
        refused(awq(zero_point=False), "zero_point=False"),
        refused(awq(bits=8), "bits=8"),
    ],
)
def test_what_is_not_read_is_named_and_vllm_is_pointed_to(tmp_path, declared, named):
    tiny_models.make("llama", tmp_path)
    edit_config(tmp_path, quantization_config=declared)
    with pytest.raises(ConfigError) as refusal:
        model_source.architecture(source(tmp_path))
    assert f"quantization_config.{named}" in refusal.value.message
    assert "engine.kind: vllm loads it" in refusal.value.message


def test_a_directory_of_a_later_version_of_ours_says_how_to_get_this_ones(tmp_path):
    declared = {"quant_method": "trieserve", "format": "int4", "version": 2}
    with pytest.raises(ConfigError, match=r"version=2 .* only 1: make the directory again with `python -m cluster quantize`"):
        scheme_of({"quantization_config": declared})
    with pytest.raises(ConfigError, match="not an object"):
        from_hf_config({"architectures": ["LlamaForCausalLM"], "quantization_config": "gptq"})


def test_inputs_in_the_order_of_their_activations_are_refused(tmp_path):
    order = torch.arange(256, dtype=torch.int32).flip(0) // 32
    numbers, zeros, scales, _ = draw_packed(8, 256, 32, symmetric=True)
    checkpoint = open_packed(tmp_path, gptq(desc_act=True), pack_gptq("linear", numbers, zeros, scales, order=order))
    with pytest.raises(ConfigError, match=r"desc_act, in linear\.g_idx is not supported.*engine\.kind: vllm loads it"):
        checkpoint.quantized("linear.weight", (8, 256))
    without = {name: part for name, part in pack_gptq("linear", numbers, zeros, scales).items() if "g_idx" not in name}
    with pytest.raises(ConfigError, match="desc_act"):
        open_packed(tmp_path, gptq(desc_act=True), without).tensor("linear.weight", (8, 256))
    assert open_packed(tmp_path, gptq(), without).tensor("linear.weight", (8, 256)).shape == (8, 256)


@pytest.mark.parametrize(
    ("shape", "damage", "message"),
    [
        ((8, 512), {}, r"linear\.qweight has the shape"),
        ((8, 256), {"linear.qzeros": None}, r"no tensor linear\.qzeros"),
        ((8, 256), {"linear.scales": torch.ones(8, 9).half()}, r"linear\.scales has the shape"),
        ((8, 256), {"linear.scales": torch.full((8, 8), torch.nan).half()}, "too large for 16 bits, or that are none"),
        ((8, 256), {"linear.scales": torch.full((8, 8), 1e4)}, "too large for 16 bits, or that are none"),
        ((8, 240), {}, "only whole groups, of multiples of 32; engine.kind: vllm"),
        ((12, 256), {}, "12 outputs is not supported, only multiples of 8"),
    ],
)
def test_packed_matrices_that_do_not_fit_are_refused(tmp_path, shape, damage, message):
    numbers, zeros, scales, _ = draw_packed(8, 256, 32, symmetric=True)
    tensors = pack_gptq("linear", numbers, zeros, scales) | damage
    checkpoint = open_packed(tmp_path, gptq(), {name: part for name, part in tensors.items() if part is not None})
    with pytest.raises(ConfigError, match=message):
        checkpoint.quantized("linear.weight", shape)
