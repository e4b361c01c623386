"""`python -m cluster plan`: what a model takes of a memory in each precision, and how many users fit beside it.

Reads what the model's files say of it, never a weight: a directory with nothing but a config.json will do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.schema import ModelConfig
from replicas.blocks import BLOCK_SIZE
from replicas.engine.models.config import ArchitectureConfig, from_hf_config
from replicas.errors import CapacityError, ConfigError
from replicas.gguf_file import GgufTensor
from replicas.memory_plan import (
    AS_SHIPPED,
    CONTEXTS,
    GIB,
    RESERVE_FORMULAS,
    WEIGHT_PRECISIONS,
    Demand,
    Option,
    fewest_devices,
    num_parameters,
    options,
    shard,
    weights_in,
)
from replicas.model_source import architecture, gguf_header, read_json, resolve

# From what is kept first to what is given up last. fp32 serves comparisons: no model of today gains by it.
_WEIGHTS_BY_PREFERENCE = (AS_SHIPPED, "bf16", "int8", "int4", "fp32")
_KV_BY_PREFERENCE = ("bf16", "int8", "fp32")
# vLLM's names for our KV precisions; it has no int8, and its fp8 takes as much.
_VLLM_KV = {"fp32": "auto", "bf16": "bfloat16", "int8": "fp8"}
_MAX_ALTERNATIVES = 3


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is planned for; `tensors` are those of a GGUF."""

    source: str
    shape: ArchitectureConfig
    tensors: Mapping[str, GgufTensor] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """`chosen` are the options that were asked for, all of `options` if nothing was; `refusal` says why none of them fits."""

    subject: Subject
    demand: Demand
    options: Sequence[Option]
    chosen: Sequence[Option]
    recommended: Option | None
    refusal: str | None


def run(
    *,
    model: str,
    memory_gb: float,
    devices: int,
    max_model_len: int,
    quantization: str,
    kv_cache_dtype: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    runtime_gb: float,
    device: str | None,
    json: bool,
) -> None:
    """The command, with its options as they are written."""
    if not (math.isfinite(memory_gb) and math.isfinite(runtime_gb)):
        raise ConfigError("--memory-gb and --runtime-gb are finite numbers of GiB")
    demand = Demand(
        memory_bytes=int(memory_gb * GIB),
        num_devices=devices,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        runtime_bytes=int(runtime_gb * GIB),
        on_cpu=(device or ("cpu" if devices == 1 else "cuda")) == "cpu",
    )
    plan(model, demand, quantization=quantization, kv_cache_dtype=kv_cache_dtype, as_json=json)


def plan(source: str, demand: Demand, *, quantization: str = "", kv_cache_dtype: str = "", as_json: bool = False) -> None:
    """Print the plan. Raises CapacityError, after printing, if nothing that was asked for fits."""
    made = make_plan(read(source), demand, quantization, kv_cache_dtype)
    if as_json:
        print(json.dumps(report(made)))
    else:
        console = Console(soft_wrap=True)
        for table in _tables(made):
            console.print(table)
        for note in notes(made):
            console.print(f"note: {note}", markup=False, highlight=False)
        if made.recommended is not None:
            keys = settings(made.recommended, made)
            console.print(f"{made.recommended.name}: {_written(keys)}", markup=False, highlight=False)
    if made.refusal is not None:
        raise CapacityError(made.refusal)


def read(source: str) -> Subject:
    """`source` is as `model.source`, and may also be a config.json or a directory with no other file."""
    path = Path(source).expanduser()
    config = path / "config.json" if path.is_dir() else path
    if config.name == "config.json" and config.is_file():
        return Subject(source, from_hf_config(read_json(config)))
    model = ModelConfig(source=source)
    files = resolve(model)
    return Subject(source, architecture(model), gguf_header(files.path).tensors if files.kind == "gguf" else None)


def make_plan(subject: Subject, demand: Demand, quantization: str = "", kv_cache_dtype: str = "") -> Plan:
    """Raises ConfigError for numbers and precisions that make no sense for this model."""
    if demand.memory_bytes <= 0 or min(demand.num_devices, demand.max_num_seqs, demand.max_num_batched_tokens) < 1:
        raise ConfigError("memory, devices, sequences and tokens of a step must be more than 0")
    if demand.on_cpu and demand.num_devices > 1:
        raise ConfigError("several devices are GPUs: one CPU is one device")
    if demand.max_model_len < 0 or demand.runtime_bytes < 0:
        raise ConfigError("a context or a reserve can't be less than 0")
    found = options(subject.shape, demand, subject.tensors)
    chosen = [
        option
        for option in found
        if quantization in ("", option.weights.precision.name) and kv_cache_dtype in ("", option.kv.name)
    ]
    if not chosen:
        raise ConfigError(_impossible(subject, demand, quantization))
    recommended = _recommended(subject.shape, demand, chosen)
    refusal = None if recommended is not None else _refusal(subject, demand, found, chosen)
    return Plan(subject, demand, found, chosen, recommended, refusal)


def _impossible(subject: Subject, demand: Demand, quantization: str) -> str:
    if quantization == AS_SHIPPED:
        return "weights as shipped are those of a GGUF file, on a CPU: torch makes them numbers"
    [precision] = [one for one in WEIGHT_PRECISIONS if one.name == quantization]
    try:
        weights_in(shard(subject.shape, demand.num_devices), precision)
    except ConfigError as error:
        return error.message
    raise AssertionError(quantization)


def is_served(option: Option, demand: Demand) -> bool:
    """Whether an engine of ours or, on several devices, vLLM computes these precisions from any checkpoint."""
    weights, kv = option.weights.precision, option.kv
    if demand.num_devices > 1:
        return not weights.is_quantized and kv.name in (weights.name, "int8")
    return demand.on_cpu or kv.itemsize == weights.itemsize


def _recommended(shape: ArchitectureConfig, demand: Demand, chosen: Sequence[Option]) -> Option | None:
    """The first by preference of those that hold the longest requests; 32k are long enough."""

    def rank(option: Option) -> tuple[bool, int, int, int]:
        length = min(option.capacity.max_model_len if option.capacity else 0, shape.max_context_len, max(CONTEXTS))
        weights, kv = option.weights.precision.name, option.kv.name
        return not is_served(option, demand), -length, _WEIGHTS_BY_PREFERENCE.index(weights), _KV_BY_PREFERENCE.index(kv)

    return min((option for option in chosen if option.capacity is not None), key=rank, default=None)


def _refusal(subject: Subject, demand: Demand, found: Sequence[Option], chosen: Sequence[Option]) -> str:
    """What the least demanding of `chosen` lacks, and what would fit."""
    least = min(chosen, key=lambda option: option.needed_bytes)
    tokens = demand.max_model_len or BLOCK_SIZE
    on = "" if demand.num_devices == 1 else f" on each of {demand.num_devices} devices"
    missing = least.needed_bytes - demand.memory_bytes
    lines = [
        f"{subject.source} does not fit into {_size(demand.memory_bytes)}{on}: with {least.name} it takes "
        f"{_size(least.weights.num_bytes)} (weights) + {_size(least.reserve.total)} (reserve) + "
        f"{_size(missing + least.kv_bytes)} (KV of one request of {tokens} tokens), {_size(missing)} too much"
    ]
    lines += [
        f"would fit: {one.name} ({_written(_precision_keys(one, demand))}) in {_size(one.needed_bytes)}"
        for one in _alternatives(found, demand)[:_MAX_ALTERNATIVES]
    ]
    held = max(least.kv_bytes, 0) // least.bytes_per_block * BLOCK_SIZE
    if held:
        lines.append(f"would fit: model.max_model_len={held}")
    numbers = "bf16" if least.weights.precision.is_quantized else least.weights.precision.name
    number = fewest_devices(subject.shape, demand, numbers, numbers)
    if number is not None:
        lines.append(
            f"would fit: in {numbers}, {number} GPUs of {_size(demand.memory_bytes)} (engine.kind=vllm "
            f"engine.vllm.tensor_parallel_size={number})"
        )
    if len(lines) == 1:
        lines.append(f"would fit: a memory of {math.ceil(least.needed_bytes / GIB)} GiB")
    return "\n  ".join(lines)


def _alternatives(found: Sequence[Option], demand: Demand) -> list[Option]:
    """Of each precision of weights the first by preference that fits and is served."""
    served = (one for one in found if one.capacity is not None and is_served(one, demand))
    fitting = {(one.weights.precision.name, one.kv.name): one for one in served}
    ranked = ([fitting.get((weights, kv)) for kv in _KV_BY_PREFERENCE] for weights in _WEIGHTS_BY_PREFERENCE)
    return [one for row in ranked if (one := next(filter(None, row), None)) is not None]


def settings(option: Option, made: Plan) -> dict[str, str | int]:
    """The keys that make a configuration of this option; none if it doesn't fit."""
    if option.capacity is None:
        return {}
    demand = made.demand
    keys: dict[str, str | int] = {"model.source": made.subject.source, **_precision_keys(option, demand)}
    keys["engine.device"] = "cpu" if demand.on_cpu else "cuda"
    if not demand.on_cpu:
        keys["replicas.num_gpus"] = demand.num_devices
    if demand.num_devices > 1:
        keys |= {"engine.kind": "vllm", "engine.vllm.tensor_parallel_size": demand.num_devices}
    keys["engine.kv_cache_bytes"] = option.capacity.num_blocks * option.bytes_per_block * demand.num_devices
    if option.capacity.max_model_len < made.subject.shape.max_context_len:
        keys["model.max_model_len"] = option.capacity.max_model_len
    keys |= {"engine.max_num_seqs": demand.max_num_seqs, "engine.max_num_batched_tokens": demand.max_num_batched_tokens}
    return keys


def _precision_keys(option: Option, demand: Demand) -> dict[str, str]:
    weights, kv = option.weights.precision.name, option.kv.name
    numbers = not option.weights.precision.is_quantized
    if demand.num_devices > 1:
        return ({"model.dtype": weights} if numbers else {}) | {"engine.vllm.kv_cache_dtype": _VLLM_KV[kv]}
    if weights == AS_SHIPPED:
        keys = {"model.dtype": "auto", "engine.quantization": "auto"}
    elif numbers:
        keys = {"model.dtype": weights, "engine.quantization": "none"}
    else:
        keys = {"engine.quantization": weights}
    return keys | {"engine.kv_cache_dtype": kv}


def _written(keys: Mapping[str, str | int]) -> str:
    return " ".join(f"{key}={value}" for key, value in keys.items())


def notes(made: Plan) -> list[str]:
    """What the figures don't say by themselves."""
    shape, demand = made.subject.shape, made.demand
    said = []
    if shape.max_context_len < max(CONTEXTS):
        window = " (its sliding window)" if shape.sliding_window == shape.max_context_len else ""
        said.append(f"the model's own context is {shape.max_context_len} tokens{window}: longer requests are refused")
    most = max((count for option in made.chosen for count in option.users.values() if count is not None), default=0)
    if most > demand.max_num_seqs:
        said.append(f"a step computes at most engine.max_num_seqs={demand.max_num_seqs} sequences; further users wait")
    names = {option.weights.precision.name for option in made.options}
    left_out = [one.name for one in WEIGHT_PRECISIONS if one.name not in names]
    if left_out:
        said.append(f"{', '.join(left_out)}: not for this model, whose widths are not made of whole groups")
    said += dict.fromkeys(option.weights.remark for option in made.options if option.weights.remark)
    if demand.num_devices > 1:
        said.append(
            "our own engine computes on one device: several take engine.kind=vllm, whose reserve is its own, and which takes "
            "int8 and int4 only from a checkpoint that is quantized already"
        )
    elif not demand.on_cpu:
        said.append(
            "on a GPU our own engine keeps the KV cache in the numbers it computes with, and computes int8 and int4 weights "
            "slowly, by their plain twin"
        )
    return said


def report(made: Plan) -> dict[str, Any]:
    """The plan for programs: sizes in bytes, on each device."""
    shape, demand = made.subject.shape, made.demand
    return {
        "model": made.subject.source,
        "num_parameters": num_parameters(shape),
        "context_length": shape.max_context_len,
        "block_size": BLOCK_SIZE,
        "demand": asdict(demand),
        "weight_bytes": {option.weights.precision.name: option.weights.num_bytes for option in made.options},
        "kv_bytes_per_token": {option.kv.name: option.bytes_per_block / BLOCK_SIZE for option in made.options},
        "options": [_option(option, made) for option in made.chosen],
        "recommended": None if made.recommended is None else _option(made.recommended, made),
        "notes": notes(made),
        "refusal": made.refusal,
    }


def _option(option: Option, made: Plan) -> dict[str, Any]:
    return {
        "weights": option.weights.precision.name,
        "kv_cache": option.kv.name,
        "fits": option.capacity is not None,
        "weight_bytes": option.weights.num_bytes,
        "reserve_bytes": {**asdict(option.reserve), "total": option.reserve.total},
        "kv_bytes": option.kv_bytes,
        "num_blocks": option.capacity.num_blocks if option.capacity else 0,
        "max_model_len": option.capacity.max_model_len if option.capacity else 0,
        "users": {str(length): count for length, count in option.users.items()},
        "settings": settings(option, made),
    }


def _tables(made: Plan) -> Iterator[Table]:
    shape, demand = made.subject.shape, made.demand
    each = "" if demand.num_devices == 1 else ", on each device"
    parameters = num_parameters(shape)
    weights = _table(f"{made.subject.source}: {parameters:,} parameters{each}", "weights", "bytes", "GiB", "bits each")
    for name, one in {option.weights.precision.name: option.weights for option in made.options}.items():
        bits = one.num_bytes * demand.num_devices * 8 / parameters
        weights.add_row(name, f"{one.num_bytes:,}", f"{one.num_bytes / GIB:.2f}", f"{bits:.2f}")
    yield weights
    per_token = _table(f"KV cache{each}", "KV", "bytes a token", f"bytes a block of {BLOCK_SIZE}")
    for name, size in {option.kv.name: option.bytes_per_block for option in made.options}.items():
        per_token.add_row(name, f"{size / BLOCK_SIZE:,.1f}", f"{size:,}")
    yield per_token
    shown = made.recommended or min(made.chosen, key=lambda option: option.needed_bytes)
    kept = _table(f"reserve for {shown.name}{each}", "for", "bytes", "counted as")
    kept.columns[-1].justify = "left"
    for name, size in asdict(shown.reserve).items():
        kept.add_row(name, f"{size:,}", RESERVE_FORMULAS[name])
    kept.add_row("total", f"{shown.reserve.total:,}")
    yield kept
    columns = ("weights", "KV", "left GiB", "blocks", "longest", *(f"at {length // 1024}k" for length in CONTEXTS))
    combinations = _table(f"users in {_size(demand.memory_bytes)}{each}", *columns)
    for option in made.chosen:
        row = (option.weights.precision.name, option.kv.name, f"{option.kv_bytes / GIB:.2f}")
        if option.capacity is None:
            combinations.add_row(*row, "no fit")
            continue
        users = ("-" if count is None else f"{count:,}" for count in option.users.values())
        combinations.add_row(*row, f"{option.capacity.num_blocks:,}", f"{option.capacity.max_model_len:,}", *users)
    yield combinations


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB else f"{num_bytes / 2**20:.1f} MiB"
