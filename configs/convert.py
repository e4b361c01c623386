"""Plain mappings, as YAML and JSON give them, to configuration dataclasses and back.

Reading goes on after a fault and collects all of them: who mends a configuration should not need one run for each.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from configs.reflect import Dial, Shape, dials_of
from configs.schema import AppConfig

_MAX_SHOWN_CHARS = 60
# People paste keys into the wrong field: what stands in these is never repeated in a message.
_NEVER_SHOWN = frozenset({"secret", "sha256"})


def read_app(mapping: object) -> tuple[AppConfig, list[str]]:
    """The configuration that `mapping` describes and what is wrong with it; where something is, the default stands in."""
    faults: list[str] = []
    config: AppConfig = _read_section(AppConfig, mapping, "", faults)
    return config, faults


def to_mapping(config: AppConfig) -> dict[str, Any]:
    """The inverse of `from_mapping`, of JSON's types alone. It holds the secret too: not for logs."""
    return {dial.name: _plain(getattr(config, dial.name)) for dial in dials_of(AppConfig).values()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _read_section(kind: Any, value: object, path: str, faults: list[str]) -> Any:
    if value is None:  # a section whose keys are all commented out
        return kind()
    dials = dials_of(kind)
    if not isinstance(value, Mapping):
        shown = "this" if path.endswith("]") else _shown(value)  # an item of api_keys might be a key
        faults.append(f"{path or 'the configuration'}: {shown} is not a section with {', '.join(dials)}")
        return kind()
    known = {}
    for key, item in value.items():
        name = str(key)
        dotted = f"{path}.{name}" if path else name
        if name in dials:
            known[name] = _read_dial(dials[name], item, dotted, faults)
        else:
            faults.append(f"{dotted}: unknown key{_hint(name, path, list(dials))}")
    return kind(**known)


def _read_dial(dial: Dial, value: object, path: str, faults: list[str]) -> Any:
    if dial.shape is Shape.SECTION:
        return _read_section(dial.type, value, path, faults)
    if dial.shape is Shape.LIST:
        if not isinstance(value, list | tuple):
            faults.append(f"{path}: this is not {dial.allowed}")
            return dial.default
        return tuple(_read_section(dial.type, item, f"{path}[{i}]", faults) for i, item in enumerate(value))
    if dial.shape is Shape.MAPPING:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            faults.append(f"{path}: {_shown(value)} is not {dial.allowed}")
            return MappingProxyType({})
        return MappingProxyType(dict(value))
    if fits(dial, value):
        return float(value) if dial.type is float else value  # type: ignore[arg-type]  # it fits: a number
    shown = "the value" if dial.name in _NEVER_SHOWN else _shown(value)
    faults.append(f"{path}: {shown} is not {dial.allowed}{_suggestion(dial, value)}")
    return dial.default


def fits(dial: Dial, value: object) -> bool:
    """Whether a leaf takes this value. bool is not a number here, though Python says so; an int serves as a float."""
    if dial.type is bool or isinstance(value, bool):
        return dial.type is type(value)
    if dial.type is float and isinstance(value, int | float):
        return math.isfinite(value) and _within(dial, value)
    if not isinstance(value, dial.type):
        return False
    if isinstance(value, int):
        return _within(dial, value)
    return dial.choices is None or value in dial.choices


def _within(dial: Dial, value: float) -> bool:
    return (dial.minimum is None or value >= dial.minimum) and (dial.maximum is None or value <= dial.maximum)


def _hint(name: str, path: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    if nearest:
        return f"; did you mean {path}.{nearest[0]}?" if path else f"; did you mean {nearest[0]}?"
    return f"; known here: {', '.join(known)}"


def _suggestion(dial: Dial, value: object) -> str:
    if dial.choices is not None and isinstance(value, str):
        nearest = difflib.get_close_matches(value, dial.choices, n=1)
        return f"; did you mean {nearest[0]}?" if nearest else ""
    if dial.type is str and dial.choices is None:
        return "; put it in quotes"  # YAML reads `no`, `1.0` and 2024-01-01 as something else
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
