"""`python slots_of.py GCS_ADDRESS`: how many slots Serve thinks each replica has in use, one JSON object.

In a process of its own, since the tests join no Ray cluster. Serve forgets no slot by itself: one that nobody gives back is
lost for good, and its replica is never done with draining.
"""

from __future__ import annotations

import json
import sys

import ray


def main() -> None:
    ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, logging_level="error")
    replicas = {
        actor["name"]: ray.get_actor(actor["name"], namespace=actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith("SERVE_REPLICA::") and "#engine#" in actor["name"]
    }
    print(json.dumps({name: ray.get(actor.get_num_ongoing_requests.remote()) for name, actor in replicas.items()}))


if __name__ == "__main__":
    main()
