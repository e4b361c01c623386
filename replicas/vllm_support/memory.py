"""Whether a model and its KV cache fit where they are to go, and what would fit instead. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes of a whole model: `kv_bytes` is what is asked for its KV cache, 0 for what the device has left."""

    weight_bytes: int
    kv_bytes_per_token: int
    num_tokens: int  # of the longest sequence, which must fit
    kv_bytes: int = 0
    num_devices: int = 1  # that share weights and cache evenly


def misfit(demand: Demand, device_bytes: int) -> str | None:
    """Why the demand can't be met with `device_bytes` on each device, and what could be; None if it can."""
    weights = demand.weight_bytes / demand.num_devices
    per_token = demand.kv_bytes_per_token / demand.num_devices
    room = device_bytes - weights
    if room < per_token:
        num_devices = _power_of_two(demand.weight_bytes / max(device_bytes * 0.8, 1))
        return (
            f"the weights take {_gib(weights)} of {_gib(device_bytes)}, which leaves no KV cache; "
            f"on {num_devices} such devices they would fit (engine.vllm.tensor_parallel_size)"
        )
    wanted = demand.kv_bytes / demand.num_devices or per_token * demand.num_tokens
    if wanted > room:
        return (
            f"beside weights of {_gib(weights)} the KV cache of {_gib(wanted)} does not fit into {_gib(device_bytes)}: "
            f"engine.kv_cache_bytes={int(room * demand.num_devices)} and model.max_model_len="
            f"{min(int(room // per_token), demand.num_tokens)} would"
        )
    if demand.kv_bytes and demand.kv_bytes < demand.kv_bytes_per_token * demand.num_tokens:
        return (
            f"engine.kv_cache_bytes={demand.kv_bytes} holds {demand.kv_bytes // demand.kv_bytes_per_token} tokens, and one "
            f"sequence may have {demand.num_tokens}: set it to {demand.kv_bytes_per_token * demand.num_tokens} or more, or "
            f"model.max_model_len to {demand.kv_bytes // demand.kv_bytes_per_token}"
        )
    return None


def share_misfit(share: float, free_bytes: int, total_bytes: int) -> str | None:
    """Why a device hasn't the share of its memory that is asked for; None if it has. vLLM takes all of the share or nothing."""
    if total_bytes * share <= free_bytes:
        return None
    possible = math.floor(free_bytes / total_bytes * 100) / 100
    return (
        f"engine.gpu_memory_share={share} is {_gib(total_bytes * share)}, but others leave {_gib(free_bytes)} of "
        f"{_gib(total_bytes)} free: engine.gpu_memory_share={possible} would fit"
    )


def _power_of_two(number: float) -> int:
    return 1 << max(math.ceil(math.log2(max(number, 1.0))), 1)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
