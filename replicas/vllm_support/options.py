"""From our configuration to the arguments of vLLM's AsyncEngineArgs, and what can be known to be wrong with it beforehand.

Keys in messages are those of one fleet's configuration (`engine.vllm.block_size`). Pure: files are looked at where a
function says so, and neither vLLM nor a GPU is needed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from configs.schema import FleetConfig
from replicas.errors import ConfigError
from replicas.model_source import architecture, read_json, resolve

_GPU_BLOCK_SIZE = 16
_CPU_BLOCK_SIZE = 32
_DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_NEEDS_MODEL = frozenset({"eagle3", "eagle", "draft_model"})
# vLLM 0.32's names (model_executor/layers/quantization), which 0.33 has too.
_QUANTIZATIONS = (
    *("awq", "auto_awq", "fp8", "fbgemm_fp8", "fp_quant", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"),
    *("auto_gptq", "gptq", "gptq_marlin", "awq_marlin", "humming", "compressed-tensors", "experts_int8", "quark"),
    *("moe_wna16", "torchao", "inc", "mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8", "online", "fp8_per_tensor"),
    *("fp8_per_block", "fp8_per_channel", "int8_per_channel_weight_only", "nvfp4_per_token", "mxfp8"),
)
_DEPRECATED_QUANTIZATIONS = frozenset({"fbgemm_fp8", "fp_quant"})
# Of an adapter_config.json: what changes the computation and is none of vLLM's (lora/peft_helper.py), with its absence.
_LORA_FEATURES: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, {}),
}
# Arguments that have a key of their own, or that the engine depends on.
_OURS: Mapping[str, str] = {
    "model": "model.source",
    "tokenizer": "model.source",
    "served_model_name": "model.served_name",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "enable_chunked_prefill": "engine.chunked_prefill",
    "enable_prefix_caching": "engine.prefix_caching",
    "gpu_memory_utilization": "engine.gpu_memory_share",
    "kv_cache_memory_bytes": "engine.kv_cache_bytes",
    "block_size": "engine.vllm.block_size",
    "tensor_parallel_size": "engine.vllm.tensor_parallel_size",
    "pipeline_parallel_size": "engine.vllm.pipeline_parallel_size",
    "quantization": "engine.vllm.quantization",
    "kv_cache_dtype": "engine.vllm.kv_cache_dtype",
    "speculative_config": "engine.vllm.speculative",
    "spec_method": "engine.vllm.speculative.method",
    "spec_model": "engine.vllm.speculative.model",
    "spec_tokens": "engine.vllm.speculative.num_tokens",
    "enforce_eager": "engine.vllm.enforce_eager",
    "enable_lora": "model.adapters",
    "max_loras": "model.adapters",
    "max_lora_rank": "model.adapters",
    "kv_events_config": "",
    "prefix_caching_hash_algo": "",
    "disable_log_stats": "",
    "enable_logging_iteration_details": "",
    "max_logprobs": "",
    "skip_tokenizer_init": "",
    "data_parallel_size": "replicas.num",
}
# Names of arguments that say nothing where they stand in a sentence.
_EVERYDAY_WORDS = frozenset({"model", "tokenizer"})


def engine_arguments(fleet: FleetConfig, *, model: Path, device: str, sockets: Path, kv_cache_bytes: int) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs. `device` is cpu or cuda, `sockets` a directory for vLLM's KV event sockets,
    `kv_cache_bytes` 0 for what is left of the share of the GPU."""
    engine, options = fleet.engine, fleet.engine.vllm
    num_workers = options.tensor_parallel_size * options.pipeline_parallel_size
    arguments: dict[str, Any] = {
        "model": str(model),
        "tokenizer": str(model),
        "served_model_name": fleet.model.served_name,
        "dtype": _DTYPES[fleet.model.dtype],
        "max_model_len": fleet.model.max_model_len or None,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_chunked_prefill": engine.chunked_prefill,
        "enable_prefix_caching": engine.prefix_caching,
        "gpu_memory_utilization": engine.gpu_memory_share,
        "kv_cache_memory_bytes": kv_cache_bytes // num_workers or None,  # vLLM's is of each worker
        "block_size": block_size(fleet, device),
        "tensor_parallel_size": options.tensor_parallel_size,
        "pipeline_parallel_size": options.pipeline_parallel_size,
        "quantization": options.quantization or None,
        "kv_cache_dtype": options.kv_cache_dtype,
        "enforce_eager": options.enforce_eager,
        # The ingress caps what clients may ask for.
        "max_logprobs": -1,
        "disable_log_stats": True,
        "enable_logging_iteration_details": True,
        "trust_remote_code": False,
        "seed": 0,
    }
    if num_workers > 1:
        # On GPUs Ray places the workers, in the bundles that Serve reserved for the replica (cluster.placement).
        arguments["distributed_executor_backend"] = "ray" if device == "cuda" else "mp"
    if options.speculative.method:
        arguments["speculative_config"] = _speculative(fleet)
    if fleet.model.adapters:
        ranks = [_rank(Path(adapter.source)) for adapter in fleet.model.adapters]
        arguments |= {
            "enable_lora": True,
            "max_loras": len(ranks),
            "max_lora_rank": min(rank for rank in _LORA_RANKS if rank >= max(ranks)),
        }
    if engine.prefix_caching:
        arguments["kv_events_config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{sockets}/events",
            "replay_endpoint": f"ipc://{sockets}/replay",
        }
    return arguments | dict(options.args)


def environment(fleet: FleetConfig, device: str, given: Mapping[str, str]) -> dict[str, str]:
    """Variables that vLLM reads when it is imported. Of those that change no result, what is `given` stays."""
    variables = {
        # Whole hashes in KV events: 64 bits of one would be a name that others can search for.
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": given.get("HF_HUB_OFFLINE", "1"),
        "VLLM_LOGGING_LEVEL": given.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    num_workers = fleet.engine.vllm.tensor_parallel_size * fleet.engine.vllm.pipeline_parallel_size
    if num_workers == 1:
        variables["VLLM_HOST_IP"] = "127.0.0.1"  # nothing of a single process listens for others
    if device == "cpu":
        num_threads = max((fleet.engine.num_threads or int(fleet.replicas.num_cpus)) // num_workers, 1)
        # vLLM's own binding gives every replica of a machine the same cores.
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(num_threads), "VLLM_TARGET_DEVICE": "cpu"}
    return variables


def block_size(fleet: FleetConfig, device: str) -> int:
    return fleet.engine.vllm.block_size or (_GPU_BLOCK_SIZE if device == "cuda" else _CPU_BLOCK_SIZE)


def key_of(message: str) -> str:
    """The key that sets what a message of vLLM's is about, as far as it names an argument; empty if it doesn't.

    vLLM writes `max_model_len`, `--max-model-len` and "max model len" alike. The longest name counts: of two it is the one
    that says more.
    """
    names = sorted((name for name, key in _OURS.items() if key and name not in _EVERYDAY_WORDS), key=len, reverse=True)
    return next((_OURS[name] for name in names if re.search(rf"\b{name.replace('_', '[ _-]')}\b", message.lower())), "")


def problems(fleet: FleetConfig, known_arguments: Collection[str] | None = None) -> list[str]:
    """What vLLM would refuse, as far as it can be known from the configuration alone.

    `known_arguments` are the names of AsyncEngineArgs, where vLLM is installed.
    """
    return [
        *_batch_problems(fleet),
        *_device_problems(fleet),
        *_speculative_problems(fleet),
        *_argument_problems(fleet, known_arguments),
    ]


def file_problems(fleet: FleetConfig) -> list[str]:
    """What vLLM would refuse once it has read the files of the model, its heads and adapters. They must be there."""
    found = _shape_problems(fleet, _model_config(fleet))
    if resolve(fleet.model).kind == "gguf" and architecture(fleet.model).rope.divisors is not None:
        found.append("model.source: this GGUF scales rotary positions, which can't be written for vLLM; give a directory")
    for index, adapter in enumerate(fleet.model.adapters):
        found += [f"model.adapters[{index}].source: {problem}" for problem in _adapter_problems(Path(adapter.source))]
    return found


_OF_OUR_ENGINE = {
    "quantization": "engine.vllm.quantization",
    "kv_cache_dtype": "engine.vllm.kv_cache_dtype",
    "kernels": "chosen by itself (auto)",
}


def _batch_problems(fleet: FleetConfig) -> list[str]:
    found, engine = [], fleet.engine
    if engine.attention != "auto":
        found.append("engine.attention: reference is our own engine's; vLLM chooses by itself (auto)")
    for key, theirs in _OF_OUR_ENGINE.items():
        if (value := getattr(engine, key)) != "auto":
            found.append(f"engine.{key}: {value} is for our own engine; vLLM's is {theirs}")
    if engine.speculation.method:
        found.append(
            f"engine.speculation.method: {engine.speculation.method} is for our own engine; vLLM's is engine.vllm.speculative"
        )
    if not engine.chunked_prefill and 0 < engine.max_num_batched_tokens < fleet.model.max_model_len:
        found.append(
            f"engine.max_num_batched_tokens: {engine.max_num_batched_tokens} is less than model.max_model_len "
            f"({fleet.model.max_model_len}), and without chunked_prefill a prompt must fit in one step"
        )
    quantization = engine.vllm.quantization
    if quantization and quantization not in _QUANTIZATIONS:
        found.append(f"engine.vllm.quantization: {quantization!r} is none of vLLM's{_nearest(quantization, _QUANTIZATIONS)}")
    if quantization in _DEPRECATED_QUANTIZATIONS and not engine.vllm.args.get("allow_deprecated_quantization"):
        found.append(
            f"engine.vllm.quantization: vLLM is about to drop {quantization}, and wants "
            "engine.vllm.args.allow_deprecated_quantization: true"
        )
    return found


def _device_problems(fleet: FleetConfig) -> list[str]:
    found, options = [], fleet.engine.vllm
    num_gpus = options.tensor_parallel_size * options.pipeline_parallel_size
    size = options.block_size
    if fleet.engine.device == "cuda":
        if not math.isclose(fleet.replicas.num_gpus, num_gpus) and not (num_gpus == 1 and 0 < fleet.replicas.num_gpus < 1):
            found.append(
                f"replicas.num_gpus: {fleet.replicas.num_gpus:g}, but a replica takes {num_gpus}: "
                "engine.vllm.tensor_parallel_size times pipeline_parallel_size"
            )
        if size % _GPU_BLOCK_SIZE:
            found.append(f"engine.vllm.block_size: {size} is no multiple of {_GPU_BLOCK_SIZE}")
    if fleet.engine.device == "cpu":
        if fleet.replicas.num_gpus:
            found.append("replicas.num_gpus: would be reserved and idle, because engine.device is cpu")
        if size % _CPU_BLOCK_SIZE:
            found.append(f"engine.vllm.block_size: {size} is no multiple of {_CPU_BLOCK_SIZE}, as vLLM needs it on a CPU")
        if options.kv_cache_dtype.startswith("fp8"):
            found.append(f"engine.vllm.kv_cache_dtype: {options.kv_cache_dtype} is for GPUs")
    return found


def _speculative_problems(fleet: FleetConfig) -> list[str]:
    found, speculative = [], fleet.engine.vllm.speculative
    if speculative.method in _NEEDS_MODEL and not speculative.model:
        found.append(f"engine.vllm.speculative.model: {speculative.method} needs a directory")
    if speculative.model and speculative.method not in _NEEDS_MODEL:
        found.append(f"engine.vllm.speculative.model: {speculative.method or 'no method'} has no use for one")
    # Each sequence of a step may bring all its draft tokens (vLLM demands it with LoRA alone).
    batch, num_seqs = fleet.engine.max_num_batched_tokens, fleet.engine.max_num_seqs
    if speculative.method and fleet.model.adapters and batch < num_seqs * (speculative.num_tokens + 1):
        found.append(
            f"engine.max_num_batched_tokens: {batch} is less than max_num_seqs ({num_seqs}) times one more than "
            f"engine.vllm.speculative.num_tokens ({speculative.num_tokens}), which vLLM demands with adapters"
        )
    return found


def _argument_problems(fleet: FleetConfig, known: Collection[str] | None) -> list[str]:
    found = []
    for name in fleet.engine.vllm.args:
        key = f"engine.vllm.args.{name}"
        if name in _OURS:
            found.append(f"{key}: {f'set {_OURS[name]} instead' if _OURS[name] else 'Trieserve sets this itself'}")
        elif known is not None and name not in known:
            found.append(f"{key}: vLLM has no such argument{_nearest(name, known)}")
    return found


def _model_config(fleet: FleetConfig) -> Mapping[str, Any]:
    """config.json of the model, or of what a GGUF becomes, as far as `_shape_problems` reads it."""
    files = resolve(fleet.model)
    if files.kind == "safetensors":
        config = read_json(files.path / "config.json")
        text_config = config.get("text_config")
        return text_config if isinstance(text_config, dict) else config
    shape = architecture(fleet.model)
    return {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "num_hidden_layers": shape.num_layers,
        "max_position_embeddings": shape.max_context_len,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
    }


def _shape_problems(fleet: FleetConfig, config: Mapping[str, Any]) -> list[str]:
    found, options = [], fleet.engine.vllm
    num_heads, num_layers = config.get("num_attention_heads", 0), config.get("num_hidden_layers", 0)
    num_kv_heads, parallel = config.get("num_key_value_heads") or num_heads, options.tensor_parallel_size
    if num_heads and num_heads % parallel:
        found.append(f"engine.vllm.tensor_parallel_size: {parallel} doesn't divide {num_heads} attention heads")
    elif num_kv_heads and num_kv_heads % parallel and parallel % num_kv_heads:
        found.append(f"engine.vllm.tensor_parallel_size: {num_kv_heads} KV heads can't be shared by {parallel}")
    if num_layers and options.pipeline_parallel_size > num_layers:
        found.append(f"engine.vllm.pipeline_parallel_size: {options.pipeline_parallel_size} for {num_layers} layers")
    longest = config.get("max_position_embeddings", 0)
    if longest and fleet.model.max_model_len > longest:
        found.append(f"model.max_model_len: {fleet.model.max_model_len}, but the model can take {longest}")
    own = (config.get("quantization_config") or {}).get("quant_method")
    if own and options.quantization and own not in options.quantization:
        found.append(f"engine.vllm.quantization: {options.quantization}, but the checkpoint says {own}; leave it out")
    if options.speculative.method in _NEEDS_MODEL and options.speculative.model:
        found += _head_problems(Path(options.speculative.model), config)
    return found


def _head_problems(head: Path, target: Mapping[str, Any]) -> list[str]:
    key = "engine.vllm.speculative.model"
    if not (head / "config.json").is_file():
        return [f"{key}: there is no {head}/config.json"]
    config = read_json(head / "config.json")
    config = {**config, **(config.get("transformer_layer_config") or {})}
    wanted = target.get("vocab_size")
    found = config.get("vocab_size")
    if wanted and found and found != wanted:
        return [f"{key}: it has a vocabulary of {found} tokens, the model one of {wanted}"]
    hidden, wanted_hidden = config.get("target_hidden_size"), target.get("hidden_size")
    if hidden and wanted_hidden and hidden != wanted_hidden:
        return [f"{key}: it is made for a hidden size of {hidden}, the model has {wanted_hidden}"]
    return []


def _adapter_problems(source: Path) -> list[str]:
    if not (source / "adapter_config.json").is_file():
        return [f"there is no {source}/adapter_config.json"]
    config = read_json(source / "adapter_config.json")
    if config.get("peft_type") != "LORA":
        return [f"its peft_type is {config.get('peft_type')!r}, not LORA"]
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(isinstance(rank, int) and 1 <= rank <= max(_LORA_RANKS) for rank in ranks):
        return [f"its rank is {config.get('r')!r}, not a number up to {max(_LORA_RANKS)}, here or in rank_pattern"]
    return [f"vLLM computes no {name}" for name, absent in _LORA_FEATURES.items() if config.get(name) not in absent]


def _rank(source: Path) -> int:
    problem = next(iter(_adapter_problems(source)), None)
    if problem is not None:
        raise ConfigError(f"model.adapters: {problem}")
    config = read_json(source / "adapter_config.json")
    ranks: list[int] = [config["r"], *(config.get("rank_pattern") or {}).values()]
    return max(ranks)


def _speculative(fleet: FleetConfig) -> dict[str, Any]:
    speculative = fleet.engine.vllm.speculative
    found: dict[str, Any] = {"method": speculative.method, "num_speculative_tokens": speculative.num_tokens}
    return found | ({"model": speculative.model} if speculative.model else {})


def _nearest(name: str, known: Collection[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""
