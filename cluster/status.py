"""`python -m cluster status`: what a running app says of itself on /ready, /version and /metrics."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

_TIMEOUT_S = 10.0
_MAX_DETAIL_CHARS = 200
# Column -> the series it is read from, one value per `engine`.
_COLUMNS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "generated_tokens": "vllm:generation_tokens_total",
}


@dataclass(frozen=True, slots=True)
class Status:
    url: str
    ready: bool
    detail: str
    version: str
    models: dict[str, dict[str, int]]  # model -> replicas_ready, replicas_wanted
    replicas: dict[str, dict[str, float | str]]  # engine label -> "model", and column -> value


def collect(url: str) -> Status:
    """One look at the app; unreachable is not an error but a status."""
    try:
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
            ready = client.get("/ready")
            metrics = client.get("/metrics")
            version = client.get("/version")
    except httpx.TransportError as error:
        return Status(url, False, f"no answer: {type(error).__name__}", "", {}, {})
    known_version = version.json().get("version", "") if version.status_code == 200 else ""
    models = _models(ready)
    return Status(
        url,
        ready.status_code == 200,
        "" if models else ready.text.strip()[:_MAX_DETAIL_CHARS],
        known_version,
        models,
        per_replica(metrics.text) if metrics.status_code == 200 else {},
    )


def _models(ready: httpx.Response) -> dict[str, dict[str, int]]:
    """Empty where something else than an app answered, as a proxy does that has none yet."""
    try:
        models: dict[str, dict[str, int]] = ready.json()["models"]
    except (ValueError, KeyError, TypeError):
        return {}
    return models


def per_replica(exposition: str) -> dict[str, dict[str, float | str]]:
    """The columns of the table, from a Prometheus exposition."""
    wanted = {series: column for column, series in _COLUMNS.items()}
    rows: dict[str, dict[str, float | str]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            column = wanted.get(sample.name)
            if column is not None and "engine" in sample.labels:
                row = rows.setdefault(sample.labels["engine"], {"model": sample.labels.get("model_name", "")})
                row[column] = sample.value
    return rows


def status(url: str, *, as_json: bool = False) -> bool:
    """Print the status; True if the app is ready."""
    found = collect(os.fspath(url).rstrip("/"))
    if as_json:
        print(json.dumps(asdict(found)))
        return found.ready
    console = Console()
    console.print(f"{found.url}: {'ready' if found.ready else 'NOT READY'} {found.detail}".rstrip(), highlight=False)
    for name, each in found.models.items():
        line = f"{name}: {each['replicas_ready']} of {each['replicas_wanted']} replicas ready"
        console.print(line, highlight=False, markup=False)
    if found.replicas:
        console.print(_table(found))
    return found.ready


def _table(found: Status) -> Table:
    table = Table("replica", "model", *(column.replace("_", " ") for column in _COLUMNS))
    for engine, row in sorted(found.replicas.items(), key=lambda item: (item[1]["model"], item[0])):
        table.add_row(engine, str(row["model"]), *(_cell(column, row.get(column)) for column in _COLUMNS))
    return table


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:.1%}" if column == "kv_usage" else f"{value:.0f}"
