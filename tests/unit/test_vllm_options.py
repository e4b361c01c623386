"""From our configuration to vLLM's arguments, and what is refused on the way: no vLLM, no GPU, no weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.load import from_mapping, load
from configs.schema import FleetConfig
from replicas.errors import ConfigError
from replicas.vllm_support.options import engine_arguments, environment, file_problems, key_of, problems

CONFIGS = Path(__file__).parents[2] / "configs"
SOCKETS = Path("/run/sockets")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "max_position_embeddings": 4096,
    "hidden_size": 2048,
    "vocab_size": 128256,
}


def fleet(*, model=None, engine=None, vllm=None, replicas=None) -> FleetConfig:
    """Of kind vllm on a CPU, if nothing else is said."""
    sections = {
        "model": model or {},
        "engine": {"kind": "vllm", "device": "cpu", **(engine or {}), "vllm": vllm or {}},
        "replicas": replicas or {},
    }
    return from_mapping(sections).fleets[0]


def on_gpus(number: int = 1, **sections) -> FleetConfig:
    engine = {"device": "cuda", **sections.pop("engine", {})}
    return fleet(engine=engine, replicas={"num_gpus": number}, **sections)


def arguments(config: FleetConfig, kv_cache_bytes: int = 0):
    device = "cpu" if config.engine.device == "cpu" else "cuda"
    return engine_arguments(config, model=Path("/model"), device=device, sockets=SOCKETS, kv_cache_bytes=kv_cache_bytes)


@pytest.fixture
def model(tmp_path):
    """A function that writes a directory with config.json (and weights that nobody reads) and returns its path."""

    def model(config=None, name="model", **changes) -> str:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**(LLAMA if config is None else config), **changes}))
        (directory / "tokenizer.json").touch()
        (directory / "model.safetensors").touch()
        return str(directory)

    return model


@pytest.fixture
def adapter(tmp_path):
    def adapter(**changes) -> str:
        directory = tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        config = {"peft_type": "LORA", "r": 8, "bias": "none", "use_dora": False, "modules_to_save": None, **changes}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        return str(directory)

    return adapter


# Arguments


def test_our_dials_become_vllm_s_arguments():
    found = arguments(
        on_gpus(
            4,
            model={"dtype": "bf16", "max_model_len": 1000, "served_name": "m"},
            engine={"max_num_seqs": 7, "max_num_batched_tokens": 70, "gpu_memory_share": 0.5, "chunked_prefill": True},
            vllm={"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "quantization": "fp8", "kv_cache_dtype": "fp8"},
        )
    )
    assert (
        found.items()
        >= {
            "model": "/model",
            "tokenizer": "/model",
            "served_model_name": "m",
            "dtype": "bfloat16",
            "max_model_len": 1000,
            "max_num_seqs": 7,
            "max_num_batched_tokens": 70,
            "gpu_memory_utilization": 0.5,
            "kv_cache_memory_bytes": None,
            "block_size": 16,
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "ray",
            "quantization": "fp8",
            "kv_cache_dtype": "fp8",
        }.items()
    )
    assert found.keys().isdisjoint({"speculative_config", "enable_lora"})


def test_workers_share_a_replicas_cache_and_threads():
    config = fleet(engine={"kind": "vllm", "device": "cpu", "num_threads": 8}, vllm={"tensor_parallel_size": 4})
    assert arguments(config, 2**30)["kv_cache_memory_bytes"] == 2**28
    assert environment(config, "cpu", {})["OMP_NUM_THREADS"] == "2"


def test_nothing_said_leaves_it_to_vllm():
    found = arguments(fleet(), kv_cache_bytes=2**20)
    assert (found["dtype"], found["max_model_len"], found["quantization"]) == ("auto", None, None)
    assert (found["block_size"], found["kv_cache_memory_bytes"]) == (32, 2**20)
    assert "distributed_executor_backend" not in found


def test_one_gpu_needs_no_executor_over_processes():
    assert "distributed_executor_backend" not in arguments(on_gpus())


def test_events_go_over_sockets_in_the_file_system_and_only_where_there_is_a_cache_of_prefixes():
    events = arguments(fleet())["kv_events_config"]
    assert (events["endpoint"], events["replay_endpoint"]) == ("ipc:///run/sockets/events", "ipc:///run/sockets/replay")
    assert "kv_events_config" not in arguments(fleet(engine={"prefix_caching": False}))


def test_a_head_becomes_a_speculative_config():
    speculative = {"method": "eagle3", "model": "/head", "num_tokens": 5}
    assert arguments(fleet(vllm={"speculative": speculative}))["speculative_config"] == {
        "method": "eagle3",
        "model": "/head",
        "num_speculative_tokens": 5,
    }
    assert "model" not in arguments(fleet(vllm={"speculative": {"method": "mtp"}}))["speculative_config"]


def test_adapters_reserve_the_next_rank_that_vllm_has(adapter):
    adapters = [{"name": "a", "source": adapter(r=4)}, {"name": "b", "source": adapter(r=8, rank_pattern={"q_proj": 20})}]
    found = arguments(fleet(model={"adapters": adapters}))
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 2, 32)


def test_further_arguments_come_last():
    assert (
        arguments(fleet(vllm={"args": {"seed": 3, "stream_interval": 2}})).items() >= {"seed": 3, "stream_interval": 2}.items()
    )


def test_the_environment_fixes_what_results_depend_on_and_leaves_the_rest_to_the_operator():
    given = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    found = environment(fleet(engine={"num_threads": 3}), "cpu", given)
    assert found["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] == "0"
    assert found["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert (found["VLLM_CPU_OMP_THREADS_BIND"], found["OMP_NUM_THREADS"]) == ("nobind", "3")
    assert found["VLLM_HOST_IP"] == "127.0.0.1"


def test_workers_on_other_nodes_must_reach_the_first():
    config = on_gpus(2, vllm={"tensor_parallel_size": 2})
    assert "VLLM_HOST_IP" not in environment(config, "cuda", {})


# What is refused without looking at a file


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (fleet(engine={"attention": "reference"}), "engine.attention"),
        (fleet(model={"max_model_len": 2048}, engine={"chunked_prefill": False}), "engine.max_num_batched_tokens"),
        (fleet(vllm={"quantization": "fp9"}), "engine.vllm.quantization"),
        (fleet(vllm={"quantization": "fbgemm_fp8"}), "engine.vllm.quantization"),
        (fleet(vllm={"block_size": 16}), "engine.vllm.block_size"),
        (on_gpus(vllm={"block_size": 24}), "engine.vllm.block_size"),
        (fleet(vllm={"kv_cache_dtype": "fp8"}), "engine.vllm.kv_cache_dtype"),
        (on_gpus(vllm={"tensor_parallel_size": 2}), "replicas.num_gpus"),
        (on_gpus(2), "replicas.num_gpus"),
        (fleet(vllm={"speculative": {"method": "eagle3"}}), "engine.vllm.speculative.model"),
        (fleet(vllm={"speculative": {"method": "mtp", "model": "/head"}}), "engine.vllm.speculative.model"),
        (fleet(vllm={"speculative": {"model": "/head"}}), "engine.vllm.speculative.model"),
        (
            fleet(
                model={"adapters": [{"name": "a", "source": "x"}]},
                engine={"max_num_batched_tokens": 64, "max_num_seqs": 64},
                vllm={"speculative": {"method": "ngram"}},
            ),
            "engine.max_num_batched_tokens",
        ),
    ],
)
def test_what_vllm_would_refuse_is_refused_with_its_key(config, key):
    [fault] = problems(config)
    assert fault.startswith(f"{key}: ")


@pytest.mark.parametrize(
    "config",
    [
        fleet(),
        fleet(vllm={"block_size": 128}),
        on_gpus(),
        on_gpus(vllm={"block_size": 48, "kv_cache_dtype": "fp8_e5m2", "quantization": "fp8"}),
        on_gpus(0.5),
        on_gpus(8, vllm={"tensor_parallel_size": 4, "pipeline_parallel_size": 2}),
        fleet(vllm={"speculative": {"method": "ngram"}}),
        fleet(vllm={"quantization": "fp_quant", "args": {"allow_deprecated_quantization": True}}),
    ],
)
def test_what_vllm_takes_is_not_refused(config):
    assert problems(config) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensor_parallel_size", "set engine.vllm.tensor_parallel_size instead"),
        ("spec_method", "set engine.vllm.speculative.method instead"),
        ("kv_events_config", "Trieserve sets this itself"),
        ("attention_bakend", "vLLM has no such argument; did you mean attention_backend?"),
    ],
)
def test_an_argument_of_ours_or_of_nobody_is_refused(name, words):
    [fault] = problems(fleet(vllm={"args": {name: 1}}), {"attention_backend", "seed"})
    assert fault == f"engine.vllm.args.{name}: {words}"


def test_without_vllm_nobody_knows_which_arguments_there_are():
    assert problems(fleet(vllm={"args": {"attention_bakend": 1}})) == []


# What is refused once the files are read


@pytest.mark.parametrize(
    ("changes", "config", "words"),
    [
        ({}, {"vllm": {"tensor_parallel_size": 3}}, "engine.vllm.tensor_parallel_size: 3 doesn't divide 32"),
        (
            {"num_key_value_heads": 6, "num_attention_heads": 12},
            {"vllm": {"tensor_parallel_size": 4}},
            "engine.vllm.tensor_parallel_size: 6 KV heads",
        ),
        ({}, {"vllm": {"pipeline_parallel_size": 17}}, "engine.vllm.pipeline_parallel_size: 17 for 16 layers"),
        ({}, {"max_model_len": 4097}, "model.max_model_len: 4097, but the model can take 4096"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            {"vllm": {"quantization": "fp8"}},
            "engine.vllm.quantization: fp8, but the checkpoint says awq",
        ),
    ],
)
def test_a_model_that_an_option_does_not_fit_is_named_with_the_key(model, changes, config, words):
    config = fleet(
        model={"source": model(**changes), "max_model_len": config.get("max_model_len", 0)}, vllm=config.get("vllm", {})
    )
    [fault] = file_problems(config)
    assert fault.startswith(words)


def test_key_heads_may_be_copied_to_more_devices_than_there_are_heads(model):
    config = fleet(model={"source": model(num_key_value_heads=2)}, vllm={"tensor_parallel_size": 8})
    assert file_problems(config) == []


def test_models_that_we_do_not_compute_ourselves_are_checked_as_well(model):
    config = {"architectures": ["SomethingForConditionalGeneration"], "text_config": LLAMA}
    found = file_problems(fleet(model={"source": model(config)}, vllm={"tensor_parallel_size": 5}))
    assert [fault.split(":")[0] for fault in found] == ["engine.vllm.tensor_parallel_size"]


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"vocab_size": 32000}, "it has a vocabulary of 32000 tokens, the model one of 128256"),
        ({"vocab_size": 128256, "target_hidden_size": 4096}, "it is made for a hidden size of 4096, the model has 2048"),
        ({"transformer_layer_config": {"vocab_size": 32000}}, "it has a vocabulary of 32000"),
    ],
)
def test_a_head_of_another_model_is_refused(model, head, words):
    speculative = {"method": "eagle3", "model": model(head, name="head")}
    [fault] = file_problems(fleet(model={"source": model()}, vllm={"speculative": speculative}))
    assert fault.startswith(f"engine.vllm.speculative.model: {words}")


def test_a_head_that_drafts_from_a_part_of_the_vocabulary_fits(model):
    head = {"vocab_size": 128256, "draft_vocab_size": 32000, "hidden_size": 1024}
    speculative = {"method": "eagle3", "model": model(head, name="head")}
    assert file_problems(fleet(model={"source": model()}, vllm={"speculative": speculative})) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "its peft_type is 'PREFIX_TUNING', not LORA"),
        ({"r": 1024}, "its rank is 1024"),
        ({"r": None}, "its rank is None"),
        ({"rank_pattern": {"q_proj": 1024}}, "its rank is 8, not a number up to 512, here or in rank_pattern"),
        ({"use_dora": True}, "vLLM computes no use_dora"),
        ({"bias": "all"}, "vLLM computes no bias"),
        ({"modules_to_save": ["lm_head"]}, "vLLM computes no modules_to_save"),
    ],
)
def test_an_adapter_that_vllm_does_not_compute_is_refused(model, adapter, changes, words):
    adapters = [{"name": "good", "source": adapter()}, {"name": "bad", "source": adapter(**changes)}]
    [fault] = file_problems(fleet(model={"source": model(), "adapters": adapters}))
    assert fault.startswith(f"model.adapters[1].source: {words}")


def test_a_directory_without_an_adapter_is_refused_before_and_at_start(tmp_path):
    config = fleet(model={"adapters": [{"name": "a", "source": str(tmp_path)}]})
    assert "adapter_config.json" in file_problems(config)[0]
    with pytest.raises(ConfigError, match="adapter_config"):
        arguments(config)


# What vLLM says, by our keys


@pytest.mark.parametrize(
    ("message", "key"),
    [
        ("Total number of attention heads (9) must be divisible by tensor parallel size (2).", "tensor_parallel_size"),
        ("User-specified max_model_len (99) is greater than the derived max_model_len", "model.max_model_len"),
        ("Try increasing `gpu_memory_utilization` when initializing the engine", "engine.gpu_memory_share"),
        ("max_num_batched_tokens (16) must be greater than or equal to max_num_seqs (64).", "max_num_batched_tokens"),
        ("Decrease --kv-cache-memory-bytes", "engine.kv_cache_bytes"),
        ("This model is not supported for the tokenizer mode", ""),
    ],
)
def test_an_argument_in_a_message_of_vllm_s_leads_to_the_key_that_sets_it(message, key):
    assert key_of(message).endswith(key)
    assert bool(key_of(message)) is bool(key)


# The shipped configurations


@pytest.mark.parametrize("name", ["vllm-1gpu.yaml", "vllm-4gpu-tp.yaml", "vllm-eagle3.yaml", "vllm-cpu.yaml"])
def test_the_shipped_configurations_are_ones_that_vllm_takes(name, clean_environment):
    [config] = load(CONFIGS / name).fleets
    assert problems(config) == []


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("quantization", "int8", "engine.vllm.quantization"),
        ("kv_cache_dtype", "bf16", "engine.vllm.kv_cache_dtype"),
        ("kernels", "torch", "auto"),
    ],
)
def test_number_formats_of_our_own_engine_are_refused_with_vllms_key(key, value, named):
    [problem] = problems(fleet(engine={key: value}))
    assert problem.startswith(f"engine.{key}: ")
    assert named in problem
