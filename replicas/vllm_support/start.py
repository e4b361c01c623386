"""Starting vLLM for a fleet: check, prepare the model's files and the environment, start, warm up; or say why not."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from configs.schema import AppConfig, FleetConfig
from replicas.blocks import chain_root
from replicas.contract import EngineInfo, GenerationRequest, SamplingParams
from replicas.errors import CapacityError, ConfigError, EngineError, TrieserveError
from replicas.model_source import architecture, eos_token_ids, model_revision
from replicas.vllm_engine import VllmEngine
from replicas.vllm_support.installed import import_failure, make_engine_config, require
from replicas.vllm_support.memory import Demand, misfit, share_misfit
from replicas.vllm_support.options import block_size, engine_arguments, environment, file_problems, key_of, problems
from replicas.vllm_support.sampling import GRAMMARS

logger = logging.getLogger(__name__)

_CACHE = Path("~/.cache/trieserve/models").expanduser()
_WARM_UP_TOKENS = 4
# What vLLM raises for arguments that it doesn't take; pydantic's errors are ValueErrors.
_REFUSALS = (ImportError, RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError)
_PYDANTIC = re.compile(r"^  (?:Value error, |Assertion failed, )?(.+?) \[type=", re.MULTILINE)


def build(config: AppConfig, replicas_on_node: int) -> VllmEngine:
    """vLLM as `config.engine` describes it, warm. Takes 40 s and more.

    Raises ConfigError for what vLLM would refuse, with the key's name, CapacityError with what would fit.
    """
    installed = require(config.engine.device)
    fleet = _resolved(config.fleets[0], installed.device)
    check(fleet)
    plan = _plan(fleet, replicas_on_node)
    if plan.misfit is not None:
        raise CapacityError(plan.misfit)
    os.environ.update(environment(fleet, installed.device, os.environ))
    sockets = Path(tempfile.mkdtemp(prefix="ts-vllm-"))
    engine: VllmEngine | None = None
    try:
        arguments = engine_arguments(
            fleet, model=plan.model, device=installed.device, sockets=sockets, kv_cache_bytes=plan.kv_cache_bytes
        )
        adapters = {adapter.name: Path(adapter.source) for adapter in fleet.model.adapters}
        engine = _start(fleet, arguments, adapters, sockets)
        engine.warm_up(_warm_up_requests(engine.info))
    except BaseException as error:
        if engine is not None:
            engine.shutdown()
        shutil.rmtree(sockets, ignore_errors=True)
        if isinstance(error, _REFUSALS):
            raise _explained(error, fleet, plan) from error
        raise
    return engine


def check(fleet: FleetConfig) -> None:
    """Raises ConfigError with everything in the configuration and the model's files that vLLM would refuse."""
    faults = problems(fleet)
    faults += [] if faults else file_problems(fleet)
    if faults:
        raise ConfigError("vLLM would refuse this configuration:\n" + "\n".join(f"  {fault}" for fault in faults))


def refusal(fleet: FleetConfig, device: str, model: Path) -> str | None:
    """What vLLM itself says against the configuration of `model`, a directory of safetensors; None if nothing.

    Starts nothing, but imports vLLM and lets it set variables of this process's environment.
    """
    os.environ.update(environment(fleet, device, os.environ))
    arguments = engine_arguments(fleet, model=model, device=device, sockets=Path(), kv_cache_bytes=fleet.engine.kv_cache_bytes)
    try:
        make_engine_config({name: value for name, value in arguments.items() if name != "kv_events_config"})
    except _REFUSALS as error:
        return import_failure(error).message if _is_import_failure(error) else _refused(error, fleet)
    return None


@dataclass(frozen=True, slots=True)
class _Plan:
    model: Path
    kv_cache_bytes: int
    demand: Demand | None  # None for a model that we know too little of
    misfit: str | None


def _resolved(fleet: FleetConfig, device: str) -> FleetConfig:
    """With what `auto` means here. Raises ConfigError where there is no such device.

    A replica whose workers Ray places elsewhere sees no GPU itself, and one that computes must not begin to use it before
    vLLM does. So GPUs aren't asked what they multiply: on them vLLM chooses.
    """
    from replicas.engine.device import choose_device, choose_dtype, dtype_name

    options, dtype = fleet.engine.vllm, fleet.model.dtype
    if device == "cpu":
        dtype = dtype_name(choose_dtype(dtype, choose_device(device)))
    elif options.tensor_parallel_size * options.pipeline_parallel_size == 1:
        choose_device(device)
    return replace(fleet, model=replace(fleet.model, dtype=dtype), engine=replace(fleet.engine, device=device))


def _plan(fleet: FleetConfig, replicas_on_node: int) -> _Plan:
    from replicas.engine.device import choose_device, choose_dtype, free_memory_bytes, kv_cache_budget_bytes
    from replicas.engine.export import model_directory

    is_cpu = fleet.engine.device == "cpu"
    # Where vLLM chooses, the checkpoint decides, and hardly any is of more than 16 bits.
    dtype = choose_dtype("bf16" if fleet.model.dtype == "auto" else fleet.model.dtype, choose_device("cpu"))
    model = model_directory(fleet.model, dtype, _CACHE)
    kv_cache_bytes = fleet.engine.kv_cache_bytes
    if is_cpu and not kv_cache_bytes:
        kv_cache_bytes = kv_cache_budget_bytes(choose_device("cpu"), fleet.engine.gpu_memory_share, replicas_on_node)
    options = fleet.engine.vllm
    try:
        shape = architecture(fleet.model)
    except ConfigError:
        return _Plan(model, kv_cache_bytes, None, None)
    item_bytes = 1 if options.kv_cache_dtype.startswith("fp8") else dtype.itemsize
    demand = Demand(
        weight_bytes=sum(file.stat().st_size for file in model.glob("*.safetensors")),
        kv_bytes_per_token=shape.kv_bytes_per_token(item_bytes),
        num_tokens=fleet.model.max_model_len or shape.max_context_len,
        kv_bytes=kv_cache_bytes,
        num_devices=options.tensor_parallel_size * options.pipeline_parallel_size,
    )
    return _Plan(model, kv_cache_bytes, demand, misfit(demand, free_memory_bytes()) if is_cpu else None)


def _start(fleet: FleetConfig, arguments: Mapping[str, Any], adapters: Mapping[str, Path], sockets: Path) -> VllmEngine:
    # vLLM reads the environment when it is imported.
    from replicas.vllm_support.event_feed import EventFeed
    from replicas.vllm_support.llm import Llm

    make_feed: Callable[[], EventFeed] | None = None
    if "kv_events_config" in arguments:
        make_feed = partial(EventFeed, f"ipc://{sockets}/events", f"ipc://{sockets}/replay")
    return VllmEngine(
        partial(Llm, arguments, adapters),
        make_feed,
        _info(fleet, fleet.engine.device),
        max_queued_requests=fleet.engine.max_queued_requests,
        can_seed=fleet.engine.device != "cpu",
        clean_up=partial(shutil.rmtree, sockets, ignore_errors=True),
    )


def _info(fleet: FleetConfig, device: str) -> EngineInfo:
    """What vLLM decides itself (lengths, number of blocks, vocabulary) is filled in by the engine."""
    return EngineInfo(
        model_name=fleet.model.served_name,
        model_revision=model_revision(fleet.model),
        vocab_size=0,
        max_model_len=fleet.model.max_model_len,
        block_size=block_size(fleet, device),
        num_blocks=0,
        eos_token_ids=eos_token_ids(fleet.model),
        max_num_batched_tokens=fleet.engine.max_num_batched_tokens,
        max_num_seqs=fleet.engine.max_num_seqs,
        adapters=tuple(adapter.name for adapter in fleet.model.adapters),
        grammars=GRAMMARS,
    )


def _warm_up_requests(info: EngineInfo) -> list[GenerationRequest]:
    """Prompts of one step and of less, and one for each adapter, which is loaded by its first request."""
    longest = max(min(info.max_num_batched_tokens, info.max_model_len - _WARM_UP_TOKENS), 1)
    lengths = [longest, max(longest // 4, 1), max(longest // 16, 1), 1]
    root = chain_root(os.urandom(32))
    params = SamplingParams(_WARM_UP_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [(tuple((start + i) % info.vocab_size for i in range(length)), "") for start, length in enumerate(lengths)]
    prompts += [((1,), adapter) for adapter in info.adapters]
    return [
        GenerationRequest(f"warm-up-{number}", prompt, params, root, adapter=adapter)
        for number, (prompt, adapter) in enumerate(prompts)
    ]


def _explained(error: Exception, fleet: FleetConfig, plan: _Plan) -> TrieserveError:
    """vLLM's core dies in a process of its own, and says why only in its log: most of the time for want of memory."""
    if _is_import_failure(error):
        return import_failure(error)
    if "core initialization failed" in str(error).lower():
        reason = _shortage(fleet, plan.demand)
        if reason is not None:
            return CapacityError(reason)
        return EngineError("vLLM does not start; the reason stands above this in the log of the replica")
    return ConfigError(_refused(error, fleet))


def _is_import_failure(error: Exception) -> bool:
    return isinstance(error, ImportError) or "torchvision" in str(error)


def _refused(error: Exception, fleet: FleetConfig) -> str:
    """vLLM's words, after the key that they are about. pydantic repeats all arguments behind what is wrong with one of them, so
    the key is looked for in the words alone."""
    text = str(error).strip()
    found = _PYDANTIC.search(text)
    words = found.group(1) if found else text.partition("\n")[0]
    argument = next((name for name in fleet.engine.vllm.args if re.search(rf"\b{re.escape(name)}\b", words)), None)
    key = key_of(words) if argument is None else f"engine.vllm.args.{argument}"
    return f"{key or 'engine'}: vLLM refuses it: {words}"


def _shortage(fleet: FleetConfig, demand: Demand | None) -> str | None:
    """Why memory can't have sufficed, and what would fit; None if it should have, or if nothing is known of it."""
    memory, share = _memory_bytes(fleet.engine.device), fleet.engine.gpu_memory_share
    if memory is None:
        return None
    free, total = memory
    if fleet.engine.device == "cpu":
        return None if demand is None else misfit(demand, free)
    return share_misfit(share, free, total) or (None if demand is None else misfit(demand, int(total * share)))


def _memory_bytes(device: str) -> tuple[int, int] | None:
    """(free, all) of the device; None where this process sees none."""
    from replicas.engine.device import free_memory_bytes, gpu_memory_bytes

    if device == "cpu":
        free = free_memory_bytes()
        return free, free
    return gpu_memory_bytes()
