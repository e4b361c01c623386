"""`python -m cluster check`: is a configuration right, what will it need, and what does each key mean. Starts nothing.

It needs no GPU, no vLLM and no weights. What can't be checked without them is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.check import check_files, fleets_by_prefix, warnings
from configs.load import describe
from configs.schema import AppConfig, FleetConfig
from replicas.errors import ConfigError
from replicas.model_source import architecture, model_revision
from replicas.vllm_support import installed, options, start


def check(config: AppConfig, *, explain: bool = False, strict: bool = False) -> None:
    """Print a summary; raise ConfigError with every fault that can be found without starting.

    What the configuration names by an absolute path may be on other machines: it is remarked upon, and with `strict` a fault.
    """
    console = Console(soft_wrap=True)
    if explain:
        console.print(_explained())
        return
    faults: list[str] = []
    remarks = warnings(config)
    for prefix, fleet in fleets_by_prefix(config):
        files = check_files(fleet)
        fleet_faults, fleet_remarks = list(files.faults), list(files.absent)
        if fleet.engine.kind == "vllm":
            found, left_out = _check_vllm(fleet, has_files=not fleet_faults and not fleet_remarks)
            fleet_faults += found
            fleet_remarks += left_out
        if strict:
            fleet_faults += files.absent
        faults += [prefix + fault for fault in fleet_faults]
        remarks += [prefix + remark for remark in fleet_remarks]
    if faults:
        raise ConfigError("the configuration is wrong:\n" + "\n".join(f"  {fault}" for fault in faults))
    for title, rows in facts(config):
        summary = Table(show_header=False, box=None, title=title, title_justify="left")
        for name, value in rows.items():
            summary.add_row(name, str(value))
        console.print(summary)
    for remark in remarks:
        console.print(f"note: {remark}", markup=False, highlight=False)
    console.print("ok" if not remarks else "ok, with the notes above")


def _check_vllm(fleet: FleetConfig, *, has_files: bool) -> tuple[list[str], list[str]]:
    """(faults, what was not checked and why)"""
    build = installed.find()
    if fleet.engine.device == "auto":
        device = build.device if build is not None else "cuda" if fleet.replicas.num_gpus else "cpu"
        fleet = replace(fleet, engine=replace(fleet.engine, device=device))
    names = installed.argument_names() if build is not None and fleet.engine.vllm.args else None
    faults = options.problems(fleet, names)
    if faults:
        return faults, []
    if not has_files:
        return [], ["engine: what depends on the files that are not here was not checked"]
    try:
        faults = options.file_problems(fleet)
    except ConfigError as error:
        return [error.message], []
    left_out = []
    if build is None:
        left_out.append("engine: vLLM is not installed here, so its own checks were not made")
    elif fleet.engine.device != build.device:
        left_out.append(
            f"engine: the vLLM that is installed here is a build for {build.device}, so its own checks were not made"
        )
    elif fleet.model.source.endswith(".gguf") or not Path(fleet.model.source).is_dir():
        left_out.append("engine: vLLM's own checks are made when a replica has written the GGUF as a directory that vLLM reads")
    elif not faults and (refusal := start.refusal(fleet, build.device, Path(fleet.model.source))) is not None:
        faults.append(refusal)
    return faults, left_out


def facts(config: AppConfig) -> list[tuple[str, dict[str, Any]]]:
    """What an operator wants to know before starting, under a title for each part of the app."""
    ingress = config.ingress
    about_app = {
        "ingresses": f"{ingress.num} on http://{ingress.host}:{ingress.port}",
        "API keys": len(ingress.api_keys) or "none: everybody who reaches the port may call",
    }
    return [(config.name, about_app), *((fleet.model.served_name, dict(_fleet_facts(fleet))) for fleet in config.fleets)]


def _fleet_facts(fleet: FleetConfig) -> Iterator[tuple[str, Any]]:
    model, engine, replicas = fleet.model, fleet.engine, fleet.replicas
    yield "model", f"{model.source} ({_revision(fleet)})"
    if model.adapters:
        yield "adapters", ", ".join(adapter.name for adapter in model.adapters)
    yield "engine", f"{engine.kind} on {engine.device}, {model.dtype}"
    if engine.kind == "vllm":
        yield "parallel", f"tensor {engine.vllm.tensor_parallel_size} x pipeline {engine.vllm.pipeline_parallel_size}"
    budget = f"{engine.kv_cache_bytes / 2**20:.0f} MiB a replica" if engine.kv_cache_bytes else "by free memory"
    try:
        shape = architecture(model)
    except ConfigError:  # `check` has said what is wrong, or it is a model of vLLM's that we know less of
        yield "context", f"{model.max_model_len} tokens" if model.max_model_len else "what the model takes"
        yield "KV cache", budget
    else:
        yield "context", f"{model.max_model_len or shape.max_context_len} tokens"
        yield "KV cache", f"{shape.num_layers} layers x {shape.num_kv_heads} KV heads x {shape.head_dim}; {budget}"
    yield "replicas", f"{replicas.num} x ({replicas.num_cpus:g} CPU, {replicas.num_gpus:g} GPU)"


def _revision(fleet: FleetConfig) -> str:
    try:
        return f"revision {model_revision(fleet.model)[:12]}"
    except ConfigError:
        return "revision not known here"


def _explained() -> Table:
    table = Table("key", "type", "default", "meaning", "limits")
    for setting in describe():
        table.add_row(setting.key, setting.type, repr(setting.default), setting.help, str(setting.limits or ""))
    return table
