"""What Ray reserves for a replica, and what its deployment is called. Decides, without Ray."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from configs.schema import FleetConfig

FIRST = "engine"


def reservation(fleet: FleetConfig) -> dict[str, Any]:
    """Options of the fleet's Serve deployment.

    A replica on several GPUs gets a placement group. Its first bundle holds the replica itself, which uses no GPU: vLLM's
    workers do, one in each bundle, placed by vLLM's Ray executor. Tensor parallelism keeps them on one node; pipeline
    parallelism may go over nodes where one hasn't enough.
    """
    replicas, options = fleet.replicas, fleet.engine.vllm
    num_workers = options.tensor_parallel_size * options.pipeline_parallel_size
    if fleet.engine.kind != "vllm" or num_workers == 1 or replicas.num_gpus == 0:
        return {"ray_actor_options": {"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus}}
    first: dict[str, float] = {"CPU": replicas.num_cpus, "GPU": 1}
    return {
        "ray_actor_options": {"num_cpus": replicas.num_cpus, "num_gpus": 0},
        "placement_group_bundles": [first, *({"GPU": 1} for _ in range(num_workers - 1))],
        "placement_group_strategy": "STRICT_PACK" if options.pipeline_parallel_size == 1 else "PACK",
    }


def deployment_names(fleets: Sequence[FleetConfig]) -> list[str]:
    """One for each fleet, made of its model's name, so that a fleet that comes or goes doesn't restart the others."""
    names = [FIRST]
    for fleet in fleets[1:]:
        name = base = f"{FIRST}-{re.sub(r'[^A-Za-z0-9_-]+', '-', fleet.model.served_name)}"
        number = 2
        while name in names:
            name, number = f"{base}-{number}", number + 1
        names.append(name)
    return names
