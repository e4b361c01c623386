"""`python -m cluster build`: a Ray Serve config file, for `serve deploy`, `serve run` and KubeRay's serveConfigV2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from configs.load import to_mapping
from configs.schema import AppConfig

_HEADER = "# Written by `python -m cluster build`; edit the source and build again.\n"


PROXY_LOCATION = "EveryNode"


def http_options(config: AppConfig) -> dict[str, Any]:
    """Serve's, the same whether `up` or a config file starts it."""
    return {
        "host": config.ingress.host,
        "port": config.ingress.port,
        "request_timeout_s": config.ingress.limits.request_timeout_s,
    }


def serve_config(config: AppConfig) -> dict[str, Any]:
    """A mapping for ray.serve.schema.ServeDeploySchema. The whole configuration travels as the builder's `args`."""
    return {
        "proxy_location": PROXY_LOCATION,
        "http_options": http_options(config),
        "applications": [
            {
                "name": config.name,
                "route_prefix": "/",
                "import_path": "cluster.app:build_app",
                "args": to_mapping(config),
            }
        ],
    }


def build(config: AppConfig, output: str = "-") -> None:
    text = _HEADER + yaml.safe_dump(serve_config(config), sort_keys=False)
    if output == "-":
        sys.stdout.write(text)
    else:
        Path(output).write_text(text)
