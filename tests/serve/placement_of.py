"""`python placement_of.py GCS_ADDRESS`: what a replica finds that `cluster.placement` reserved for, one JSON object.

The GPUs are only declared, and the replica stands in for vLLM's: it starts a worker in each bundle, as vLLM's executor does.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement import reservation
from configs.schema import EngineConfig, FleetConfig, ReplicasConfig, VllmConfig

FLEET = FleetConfig(
    engine=EngineConfig(kind="vllm", vllm=VllmConfig(tensor_parallel_size=2, pipeline_parallel_size=2)),
    replicas=ReplicasConfig(num=1, num_cpus=0.5, num_gpus=4),
)


@serve.deployment
class Replica:
    def look(self) -> dict[str, Any]:
        group = ray.util.get_current_placement_group()
        worker = ray.remote(num_cpus=0, num_gpus=1)(ray.get_gpu_ids)
        workers = [
            worker.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
            for index in range(group.bundle_count)
        ]
        return {"bundles": group.bundle_specs, "own_gpus": ray.get_gpu_ids(), "worker_gpus": ray.get(workers, timeout=60)}


def main() -> None:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
    serve.start(proxy_location="Disabled")
    handle = serve.run(Replica.options(**reservation(FLEET)).bind(), name="placement", route_prefix=None)
    found = handle.look.remote().result(timeout_s=90)
    serve.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
