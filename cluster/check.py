"""`python -m cluster check`: is a configuration right, what will it need, and what does each key mean. Starts nothing."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from configs.check import check_files
from configs.load import describe
from configs.schema import AppConfig
from replicas.errors import ConfigError
from replicas.model_source import architecture, context_length, model_revision


def check(config: AppConfig, *, explain: bool = False) -> None:
    """Print a summary; raise ConfigError with every fault that can be found without starting."""
    console = Console()
    if explain:
        console.print(_explained())
        return
    faults = check_files(config)
    if faults:
        raise ConfigError("the configuration is wrong:\n" + "\n".join(f"  {fault}" for fault in faults))
    summary = Table(show_header=False, box=None)
    for name, value in facts(config).items():
        summary.add_row(name, str(value))
    console.print(summary)
    console.print("ok")


def facts(config: AppConfig) -> dict[str, Any]:
    """What an operator wants to know before starting."""
    model = architecture(config.model)
    return {
        "app": config.name,
        "model": f"{config.model.served_name} from {config.model.source} (revision {model_revision(config.model)[:12]})",
        "engine": f"{config.engine.kind} on {config.engine.device}, {config.model.dtype}",
        "context": f"{config.model.max_model_len or context_length(config.model)} tokens",
        "KV cache": f"{model.num_layers} layers x {model.num_kv_heads} KV heads x {model.head_dim}; "
        + (f"{config.engine.kv_cache_bytes / 2**20:.0f} MiB a replica" if config.engine.kv_cache_bytes else "by free memory"),
        "replicas": f"{config.replicas.num} x ({config.replicas.num_cpus} CPU, {config.replicas.num_gpus} GPU)",
        "ingresses": f"{config.ingress.num} on http://{config.ingress.host}:{config.ingress.port}",
        "API keys": len(config.ingress.api_keys) or "none: everybody who reaches the port may call",
    }


def _explained() -> Table:
    table = Table("key", "type", "default", "meaning", "limits")
    for setting in describe():
        table.add_row(setting.key, setting.type, repr(setting.default), setting.help, str(setting.limits or ""))
    return table
