"""Which quantized layout a checkpoint's config.json declares, and whether we read it. No torch.

method      a matrix `name.weight` is kept as                                      `version` of the layout
trieserve   name.weight.data, .scale, .minimum: see formats.py                     1
gptq        name.qweight, .qzeros, .scales, .g_idx; packed along the inputs        gptq (zeros less 1), gptq_v2
awq         name.qweight, .qzeros, .scales; packed along the outputs               gemm

All else is refused by name: a model that loads computes right. Modules that a file leaves alone have a plain `name.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicas.errors import ConfigError

TRIESERVE = "trieserve"
TRIESERVE_VERSION = 1
TRIESERVE_FORMATS = ("int8", "int4")
WHOLE_ROW = -1  # a group size
_GROUP = 32  # what our int4 has a scale for; formats.py's GROUP
_KEY = "quantization_config"


@dataclass(frozen=True, slots=True)
class Scheme:
    """`group_size` inputs share a scale; WHOLE_ROW: all. `zero_offset` is what a stored zero lacks.

    `reorders` says that the file may number its groups by `g_idx`.
    """

    method: str
    group_size: int = 0
    zero_offset: int = 0
    reorders: bool = False


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Of a config.json; None where all numbers are plain. Raises ConfigError for what we don't read, by its key."""
    declared = config.get(_KEY)
    if declared is None:
        return None
    if not isinstance(declared, Mapping):
        raise ConfigError(f"config.json: {_KEY} is {declared!r}, not an object")
    method = declared.get("quant_method")
    if method == TRIESERVE:
        return _own(declared)
    values = _SUPPORTED_VALUES.get(method) if isinstance(method, str) else None
    if values is None:
        raise _unsupported("quant_method", method, ", ".join(_SUPPORTED_VALUES))
    for key, (default, supported) in values.items():
        value = _value(declared, key, default)
        if (value.lower() if isinstance(value, str) else value) not in supported:
            raise _unsupported(key, value, ", ".join(str(known) for known in supported))
    return _awq(declared) if method == "awq" else _gptq(declared)


def declare(config: Mapping[str, Any], format: str) -> dict[str, Any]:
    """A config.json that says of its matrices that they are our own, in one of TRIESERVE_FORMATS."""
    return {**config, _KEY: {"quant_method": TRIESERVE, "format": format, "version": TRIESERVE_VERSION}}


# For each method: key -> (what its absence means, what we read, in small letters). bits has to be there.
_SUPPORTED_VALUES: Mapping[str, Mapping[str, tuple[Any, tuple[Any, ...]]]] = {
    "awq": {
        "bits": (None, (4,)),
        "version": ("gemm", ("gemm",)),
        "format": ("gemm", ("gemm",)),  # what newer files call it
        "backend": ("auto", ("auto", "autoawq", "gemm")),  # llm-awq has a layout of its own
        "zero_point": (True, (True,)),
    },
    "gptq": {
        "bits": (None, (4,)),
        "checkpoint_format": ("gptq", ("gptq", "gptq_v2")),
        "format": ("gptq", ("gptq", "gptq_v2")),  # what newer files call it
        "is_marlin_format": (False, (False,)),
        "pack_dtype": ("int32", ("int32",)),
        "dynamic": (None, (None, {}, [])),  # other bits for some modules
    },
}


def _own(declared: Mapping[str, Any]) -> Scheme:
    for key, supported in (("version", (TRIESERVE_VERSION,)), ("format", TRIESERVE_FORMATS)):
        if declared.get(key) not in supported:
            known = ", ".join(str(value) for value in supported)
            raise ConfigError(
                f"config.json: {_KEY}.{key}={declared.get(key)!r} of {TRIESERVE} is not supported, only {known}: make the "
                "directory again with `python -m cluster quantize`"
            )
    return Scheme(TRIESERVE)


def _awq(declared: Mapping[str, Any]) -> Scheme:
    return Scheme("awq", _group_size(_value(declared, "group_size", declared.get("q_group_size"))))


def _gptq(declared: Mapping[str, Any]) -> Scheme:
    layout = _value(declared, "checkpoint_format", _value(declared, "format", "gptq")).lower()
    return Scheme(
        "gptq",
        _group_size(declared.get("group_size")),
        zero_offset=1 if layout == "gptq" else 0,
        reorders=bool(declared.get("desc_act")),
    )


def _value(declared: Mapping[str, Any], key: str, default: Any) -> Any:
    """A null is as good as nothing."""
    found = declared.get(key)
    return default if found is None else found


def _group_size(value: Any) -> int:
    if value == WHOLE_ROW or (isinstance(value, int) and value > 0 and value % _GROUP == 0):
        return int(value)
    raise _unsupported("group_size", value, f"multiples of {_GROUP} and {WHOLE_ROW}")


def _unsupported(key: str, value: Any, supported: str) -> ConfigError:
    return unsupported(f"{_KEY}.{key}={value!r}", f"only {supported}")


def unsupported(what: str, instead: str) -> ConfigError:
    """Also for what only the tensors show."""
    return ConfigError(f"config.json: {what} is not supported, {instead}; engine.kind: vllm loads it")
