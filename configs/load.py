"""From files, the environment and overrides to one checked AppConfig. The only file that reads the environment.

    overrides  >  environment                >  file  >  defaults of configs.schema
    num=3         TRIESERVE_REPLICAS__NUM=3     YAML

Whatever is wrong is reported at once, in one ConfigError, each fault by its dotted key.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.check import SECRET_FROM_ENVIRONMENT, min_secret_chars, problems
from configs.convert import read_app, to_mapping
from configs.overrides import from_assignments, from_environment, merge, parse_yaml
from configs.reflect import Setting, describe, json_schema
from configs.schema import AppConfig
from replicas.errors import ConfigError

__all__ = ["Setting", "describe", "from_mapping", "from_part", "json_schema", "load", "resolve_secret", "to_mapping"]

_RANDOM_SECRET_BYTES = 32


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> AppConfig:
    """Read and check a configuration; `path` None means the defaults. Raises ConfigError, which lists every fault.

    `overrides` are `dotted.key=value`. The files that the configuration names are not looked at: see `check.check_files`.
    """
    layers = {
        "the environment": from_environment(os.environ),
        "the overrides": from_assignments(overrides),
    }
    if path is not None:
        layers = {str(path): _read_file(Path(path)), **layers}
    # Each by itself first: merging would hide a fault below a later layer's good value, and forget where it stands.
    faults = [f"{fault} (in {origin})" for origin, layer in layers.items() for fault in read_app(layer)[1]]
    if faults:
        raise _error(faults)
    return from_mapping(functools.reduce(merge, layers.values(), {}))


def from_mapping(mapping: Mapping[str, Any]) -> AppConfig:
    """Check and convert; what is left out has its default. Raises ConfigError, which lists every fault."""
    config, faults = read_app(mapping)
    if not faults:  # with a fault some field holds its default, about which the user said nothing
        faults = problems(config)
    if faults:
        raise _error(faults)
    return config


def from_part(mapping: Mapping[str, Any]) -> AppConfig:
    """Some sections of a configuration that was checked as a whole before, for a process that may not see the others: a
    replica gets no API keys. Raises ConfigError for what is wrong within a field; what lies between fields isn't judged.
    """
    config, faults = read_app(mapping)
    if faults:
        raise _error(faults)
    return config


def resolve_secret(config: AppConfig) -> bytes:
    """The deployment's secret: as configured, from the variable that `env:NAME` names, or random if there is none.

    Call it once for each deployment and hand the result on: each call without a configured secret makes another. Raises
    ConfigError where the variable is unset or too short for a socket that others reach.
    """
    text = config.ingress.secret
    if not text:
        return secrets.token_bytes(_RANDOM_SECRET_BYTES)
    if text.startswith(SECRET_FROM_ENVIRONMENT):
        name = text.removeprefix(SECRET_FROM_ENVIRONMENT)
        text = os.environ.get(name, "")
        min_chars = min_secret_chars(config)
        if len(text) < min_chars:
            raise ConfigError(
                f"ingress.secret: the environment variable {name} "
                + (f"holds fewer than {min_chars} characters" if text else "is not set")
            )
    return text.encode()


def _error(faults: list[str]) -> ConfigError:
    return ConfigError("the configuration is wrong:\n" + "\n".join(f"  {fault}" for fault in faults))


def _read_file(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error}") from None
    return parse_yaml(text, str(path))
