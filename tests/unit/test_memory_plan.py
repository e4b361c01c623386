"""`python -m cluster plan` and what it computes: sizes of published models, users, refusals and what would fit instead."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from gguf.constants import GGMLQuantizationType

from cluster.__main__ import main
from cluster.plan import make_plan, read, settings
from configs.load import load
from replicas.engine.models.config import from_hf_config
from replicas.errors import CapacityError, ConfigError
from replicas.gguf_file import GgufTensor
from replicas.memory_plan import (
    CONTEXTS,
    GIB,
    KV_PRECISIONS,
    RESERVE_FORMULAS,
    WEIGHT_PRECISIONS,
    Demand,
    device_counts,
    fewest_devices,
    num_parameters,
    options,
    shard,
    vector_bytes,
    weights_as_shipped,
    weights_in,
)

# As the models' publishers write them, without what changes no size.
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}
SMALL = {**QWEN3_06B, "num_hidden_layers": 2, "max_position_embeddings": 8192}
ON_GPU = Demand(24 * GIB, on_cpu=False)


def shape_of(config, **changes):
    return from_hf_config({**config, **changes})


def precision(name):
    return next(one for one in WEIGHT_PRECISIONS if one.name == name)


def option(shape, demand, weights, kv):
    [found] = [one for one in options(shape, demand) if (one.weights.precision.name, one.kv.name) == (weights, kv)]
    return found


@pytest.fixture
def folder(tmp_path):
    """Writes a directory with nothing but a config.json."""

    def folder(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return folder


@pytest.fixture
def run(capsys):
    """(exit code, standard output, standard error) of the command."""

    def run(*arguments):
        code = main(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# Weights


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA_31_8B, 8_030_261_248), (QWEN25_7B, 7_615_616_512), (QWEN3_06B, 596_049_920)],
    ids=["Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-0.6B"],
)
def test_parameters_are_those_that_the_publishers_state(config, parameters):
    assert num_parameters(shape_of(config)) == parameters


def test_a_tied_head_counts_once():
    untied = shape_of(QWEN3_06B, tie_word_embeddings=False)
    assert num_parameters(untied) == 751_632_384
    bf16 = precision("bf16")
    assert weights_in(untied, bf16).num_bytes - weights_in(shape_of(QWEN3_06B), bf16).num_bytes == 2 * 151936 * 1024


@pytest.mark.parametrize(("name", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8 + 32 / 4096), ("int4", 5)])
def test_a_layer_takes_the_bits_of_its_format(name, bits):
    """The difference of two models that differ in one layer: no embedding, norms apart."""
    more, less = (shape_of(LLAMA_31_8B, num_hidden_layers=count) for count in (3, 2))
    grown = weights_in(more, precision(name)).num_bytes - weights_in(less, precision(name)).num_bytes
    norms = 2 * 4096
    numbers = num_parameters(more) - num_parameters(less) - norms
    # int8: all but the last matrix have rows of 4096, whose scale is 4 bytes; `down` has rows of 14336
    wide_rows = 4096 * (32 * 14336 / 4096 - 32) if name == "int8" else 0
    assert (grown - 4 * norms) * 8 == numbers * bits - wide_rows


@pytest.mark.parametrize(("name", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8 + 32 / 4096), ("int4", 8.5)])
def test_embedding_and_head_of_int4_are_8_bits_with_a_scale_for_32(name, bits):
    shape = shape_of(LLAMA_31_8B)
    fewer = replace(shape, vocab_size=shape.vocab_size - 32)
    difference = weights_in(shape, precision(name)).num_bytes - weights_in(fewer, precision(name)).num_bytes
    assert difference * 8 == 2 * 32 * 4096 * bits


def test_int4_needs_widths_of_whole_groups():
    odd = shape_of(SMALL, hidden_size=1000, intermediate_size=3008)
    with pytest.raises(ConfigError, match="widths that 32 divides"):
        weights_in(odd, precision("int4"))
    assert {one.weights.precision.name for one in options(odd, ON_GPU)} == {"fp32", "bf16", "int8"}


def test_a_ggufs_matrices_are_kept_only_where_those_that_are_fused_have_one_format_that_we_compute():
    shape = shape_of(SMALL)
    kinds = {"attn_q": "Q4_1", "attn_k": "Q4_1", "attn_v": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "Q4_1", "ffn_down": "Q6_K"}
    tensors = {
        f"blk.0.{name}.weight": GgufTensor((256, 512), GGMLQuantizationType[kind], offset=0) for name, kind in kinds.items()
    }
    tensors["blk.0.attn_norm.weight"] = GgufTensor((512,), GGMLQuantizationType.F32, offset=0)
    planned = weights_as_shipped(shape, tensors)
    assert planned.num_bytes - vector_bytes(shape) == 256 * 512 * (4 * 2 + 2 * 20 / 32)
    assert planned.remark == ("shipped: 2 x Q4_1 (kept as bf16), 1 x Q8_0 (kept as bf16), 2 x Q4_1, 1 x Q6_K (kept as bf16)")


# KV cache and users


def test_a_token_takes_keys_and_values_of_all_layers():
    shape = shape_of(LLAMA_31_8B)
    per_token = {kv.name: kv.bytes_per_block(shape) / 16 for kv in KV_PRECISIONS}
    assert per_token == {"fp32": 262144, "bf16": 131072, "int8": 65536 + 2 * 32 * 8 * 4 / 16}


def test_users_are_whole_requests_of_whole_blocks():
    found = option(shape_of(LLAMA_31_8B), ON_GPU, "bf16", "bf16")
    blocks = found.capacity.num_blocks
    assert blocks == found.kv_bytes // (16 * 131072)
    assert found.users == {2048: blocks // 128, 4096: blocks // 256, 32768: blocks // 2048}
    assert found.users[4096] > 0


@pytest.mark.parametrize(
    ("demand", "possible"),
    [(ON_GPU, [2048, 4096]), (replace(ON_GPU, max_model_len=4095), [2048]), (replace(ON_GPU, max_model_len=100), [])],
)
def test_no_user_is_counted_at_a_context_that_no_request_may_have(demand, possible):
    for found in options(shape_of(SMALL), demand):
        assert [length for length in CONTEXTS if found.users[length] is not None] == possible


def test_everything_planned_adds_up_to_no_more_than_the_memory_and_leaves_less_than_a_block():
    for config in (LLAMA_31_8B, QWEN25_7B, QWEN3_06B):
        for memory in (3 * GIB, 17 * GIB, 80 * GIB):
            for found in options(shape_of(config), replace(ON_GPU, memory_bytes=memory, on_cpu=True)):
                if found.capacity is not None:
                    taken = found.weights.num_bytes + found.reserve.total + found.capacity.num_blocks * found.bytes_per_block
                    assert 0 <= memory - taken < 2 * found.bytes_per_block
                    assert found.reserve.total == sum(getattr(found.reserve, part) for part in RESERVE_FORMULAS)


def test_the_reserve_is_what_its_formulas_say():
    demand = replace(ON_GPU, max_num_seqs=10, max_num_batched_tokens=100)
    kept = option(shape_of(QWEN3_06B), demand, "bf16", "bf16").reserve
    assert kept.activations == 4 * 100 * (2 * 1024 + 3 * 32 * 128)  # heads and twice the key heads are wider than 3072
    assert kept.logits == 4 * 10 * 151936
    assert kept.rotary_table == 4 * 40960 * 128
    assert kept.gathered_kv == 8192 * 16 * 2 * 8 * 128 * 2
    assert kept.plain_twin == 0
    assert kept.runtime == GIB // 2
    assert option(shape_of(QWEN3_06B), demand, "fp32", "fp32").reserve.rotary_table == 8 * 40960 * 128
    assert option(shape_of(QWEN3_06B), demand, "int8", "bf16").reserve.plain_twin == (2 + 6) * 151936 * 1024


def test_the_native_kernels_gather_nothing_and_need_no_twin():
    for found in options(shape_of(QWEN3_06B), replace(ON_GPU, on_cpu=True)):
        assert (found.reserve.gathered_kv, found.reserve.plain_twin) == (0, 0)
        assert found.reserve.rotary_table == 4 * 40960 * 128


# What fits


@pytest.mark.parametrize("max_model_len", [0, 4096])
def test_what_needs_a_memory_fits_into_it_and_not_into_a_byte_less(max_model_len):
    shape = shape_of(LLAMA_31_8B)
    for found in options(shape, replace(ON_GPU, memory_bytes=1, max_model_len=max_model_len)):
        names = found.weights.precision.name, found.kv.name
        enough = replace(ON_GPU, memory_bytes=found.needed_bytes, max_model_len=max_model_len)
        assert found.capacity is None
        assert option(shape, enough, *names).capacity is not None
        assert option(shape, replace(enough, memory_bytes=found.needed_bytes - 1), *names).capacity is None


def test_devices_share_heads_and_keep_norms():
    shape = shape_of(LLAMA_31_8B)
    half, whole = weights_in(shard(shape, 2), precision("bf16")).num_bytes, weights_in(shape, precision("bf16")).num_bytes
    norms = 4 * (2 * 32 + 1) * 4096
    assert 2 * (half - norms) == whole - norms
    assert shard(shape, 16).num_kv_heads == 1  # 8 key heads on 16 devices: each twice
    assert device_counts(shape) == [1, 2, 4, 8, 16, 32]
    with pytest.raises(ConfigError, match="possible are 1, 2, 4"):
        shard(shape, 3)


def test_the_fewest_devices_are_enough_and_fewer_are_not():
    shape, demand = shape_of(LLAMA_31_8B), replace(ON_GPU, memory_bytes=6 * GIB, max_model_len=8192)
    assert fewest_devices(shape, demand, "bf16", "bf16") == 4
    assert option(shape, replace(demand, num_devices=4), "bf16", "bf16").capacity is not None
    assert option(shape, replace(demand, num_devices=2), "bf16", "bf16").capacity is None


def test_a_refusal_says_what_is_missing_and_each_thing_it_names_fits(folder):
    subject = read(folder(LLAMA_31_8B))
    demand = Demand(12 * GIB, max_model_len=8192)
    refusal = make_plan(subject, demand, "bf16", "bf16").refusal
    assert "14.96 GiB (weights)" in refusal
    assert "engine.quantization=int8 engine.kv_cache_dtype=bf16" in refusal
    assert "engine.quantization=int4" in refusal
    assert "in bf16, 2 GPUs of 12.00 GiB (engine.kind=vllm engine.vllm.tensor_parallel_size=2)" in refusal
    assert make_plan(subject, demand, "int8", "bf16").refusal is None
    assert make_plan(subject, replace(demand, num_devices=2, on_cpu=False), "bf16", "bf16").refusal is None


def test_a_context_that_is_too_long_for_the_memory_gets_one_that_fits(folder):
    subject, demand = read(folder(LLAMA_31_8B)), replace(ON_GPU, memory_bytes=18 * GIB, max_model_len=131072)
    refusal = make_plan(subject, demand, "bf16", "bf16").refusal
    length = int(refusal.partition("model.max_model_len=")[2].split()[0])
    assert make_plan(subject, replace(demand, max_model_len=length), "bf16", "bf16").refusal is None
    with pytest.raises(CapacityError, match="more than this model can use"):
        make_plan(subject, replace(demand, max_model_len=131073))


def test_where_nothing_fits_and_no_devices_help_the_refusal_names_a_memory(folder):
    subject = read(folder(SMALL))
    demand = Demand(GIB // 4)
    refusal = make_plan(subject, demand).refusal
    assert refusal.endswith("would fit: a memory of 1 GiB")
    assert make_plan(subject, replace(demand, memory_bytes=GIB)).refusal is None


@pytest.mark.parametrize(
    ("memory_gb", "expected"), [(80, ("bf16", "bf16")), (15, ("int8", "bf16")), (11, ("int8", "int8")), (9, ("int4", "int8"))]
)
def test_recommended_are_the_most_precise_weights_that_hold_a_request_of_32k(folder, memory_gb, expected):
    made = make_plan(read(folder(LLAMA_31_8B)), Demand(memory_gb * GIB))
    assert (made.recommended.weights.precision.name, made.recommended.kv.name) == expected


# The command


def test_a_directory_with_a_config_alone_is_planned_and_so_is_the_file_itself(folder, run):
    source = folder(SMALL)
    for model in (source, f"{source}/config.json"):
        code, out, err = run("--model", model, "--memory-gb", 2)
        assert (code, err) == (0, "")
        assert "the model's own context is 8192 tokens" in out
        assert "engine.kv_cache_bytes=" in out


def test_json_says_it_in_bytes(folder, run):
    code, out, _ = run("--model", folder(SMALL), "--memory-gb", 2, "--json")
    said = json.loads(out)
    assert code == 0
    assert len(said["options"]) == len(WEIGHT_PRECISIONS) * len(KV_PRECISIONS)
    assert said["kv_bytes_per_token"] == {"fp32": 16384, "bf16": 8192, "int8": 4096 + 8}
    assert said["recommended"]["users"]["32768"] is None
    assert said["recommended"]["settings"]["engine.kv_cache_dtype"] == "bf16"
    assert said["demand"]["memory_bytes"] == 2 * GIB


def test_what_does_not_fit_ends_with_2_and_the_plan_is_still_printed(folder, run):
    code, out, err = run("--model", folder(LLAMA_31_8B), "--memory-gb", 12, "--quantization", "bf16")
    assert code == 2
    assert "no fit" in out
    assert err.startswith("error: ")
    assert "would fit" in err
    code, out, _ = run("--model", folder(LLAMA_31_8B), "--memory-gb", 12, "--quantization", "bf16", "--json")
    assert code == 2
    assert "would fit" in json.loads(out)["refusal"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--memory-gb", "nan"),
        ("--memory-gb", "inf"),
        ("--memory-gb", "-1"),
        ("--memory-gb", "2", "--devices", "0"),
        ("--memory-gb", "2", "--devices", "3"),
        ("--memory-gb", "2", "--devices", "2", "--device", "cpu"),
        ("--memory-gb", "2", "--max-model-len", "-1"),
        ("--memory-gb", "2", "--runtime-gb", "-1"),
        ("--memory-gb", "2", "--quantization", "shipped"),
        ("--memory-gb", "2", "--max-num-seqs", "0"),
    ],
)
def test_numbers_that_make_no_sense_are_errors(folder, run, arguments):
    code, out, err = run("--model", folder(SMALL), *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")


def test_several_devices_are_keys_of_vllm(folder):
    made = make_plan(read(folder(LLAMA_31_8B)), replace(ON_GPU, num_devices=2), "bf16", "int8")
    keys = settings(made.recommended, made)
    assert keys["engine.vllm.tensor_parallel_size"] == keys["replicas.num_gpus"] == 2
    assert keys["engine.vllm.kv_cache_dtype"] == "fp8"
    assert keys["engine.kv_cache_bytes"] == made.recommended.capacity.num_blocks * made.recommended.bytes_per_block * 2


@pytest.mark.parametrize(
    ("demand", "expected"),
    [
        (Demand(2 * GIB), {"model.dtype": "bf16", "engine.quantization": "none", "engine.kv_cache_dtype": "bf16"}),
        (Demand(2 * GIB, on_cpu=False), {"engine.device": "cuda", "replicas.num_gpus": 1, "engine.kv_cache_dtype": "bf16"}),
        (Demand(GIB), {"engine.device": "cpu"}),
    ],
)
def test_every_key_that_is_named_is_one_of_the_configuration_and_its_value_is_allowed(
    folder, clean_environment, demand, expected
):
    subject = read(folder(SMALL))
    made = make_plan(subject, demand)
    keys = settings(made.recommended, made)
    assert keys.items() >= expected.items()
    for option in (one for one in made.options if one.capacity is not None):
        written = [f"{key}={value}" for key, value in settings(option, made).items()]
        assert load(None, written).model.source == subject.source


def test_on_a_gpu_no_precision_is_recommended_that_torch_has_not(folder):
    subject = read(folder(LLAMA_31_8B))
    for memory_gb in (80, 40, 20, 18):
        made = make_plan(subject, replace(ON_GPU, memory_bytes=memory_gb * GIB))
        assert made.recommended.kv.name == "bf16"
