"""What the schema says about itself: the one place that looks at the dataclasses' annotations and metadata.

`convert` checks values against it, `overrides` finds the type of a dotted key in it, and `describe` and `json_schema` turn
it into documentation, so that what is checked and what is documented cannot differ.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from configs.schema import AppConfig


class Shape(Enum):
    LEAF = "leaf"
    SECTION = "section"
    LIST = "list"  # of sections
    MAPPING = "mapping"  # of free keys, whose meaning is somebody else's


_WORDS: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_JSON_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}


@dataclass(frozen=True, slots=True)
class Dial:
    """One field of a section. `type` is a leaf's type, a section's dataclass, or the dataclass of a list's items."""

    name: str
    shape: Shape
    type: Any
    default: Any
    help: str
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...] | None

    @property
    def allowed(self) -> str:
        """The values that this dial takes, in words: `an integer from 1 to 4096`."""
        if self.shape is Shape.SECTION:
            return "a section with " + ", ".join(dials_of(self.type))
        if self.shape is Shape.LIST:
            return "a list of {" + ", ".join(dials_of(self.type)) + "}"
        if self.shape is Shape.MAPPING:
            return "a mapping of names to values"
        if self.choices is not None:
            return "one of " + ", ".join(self.choices)
        words = _WORDS[self.type]
        if self.minimum is not None and self.maximum is not None:
            return f"{words} from {self.minimum} to {self.maximum}"
        if self.minimum is not None:
            return f"{words}, at least {self.minimum}"
        return words if self.maximum is None else f"{words}, at most {self.maximum}"


@dataclass(frozen=True, slots=True)
class Setting:
    """A leaf of the configuration for readers: `key` is dotted, `limits` is in words."""

    key: str
    type: str
    default: Any
    help: str
    limits: str


@cache
def dials_of(section: type) -> dict[str, Dial]:
    """The fields of a section's dataclass by name, in the order of their definition."""
    hints = typing.get_type_hints(section)
    return {field.name: _dial(field, hints[field.name]) for field in dataclasses.fields(section)}


def _dial(field: dataclasses.Field[Any], hint: Any) -> Dial:
    shape = Shape.LEAF
    if typing.get_origin(hint) is tuple:
        shape, (hint, *_) = Shape.LIST, typing.get_args(hint)
    elif typing.get_origin(hint) is Mapping:
        shape = Shape.MAPPING
    elif dataclasses.is_dataclass(hint):
        shape = Shape.SECTION
    assert shape is not Shape.LEAF or hint in _WORDS, f"{field.name}: the loader reads no fields of type {hint}"
    return Dial(
        name=field.name,
        shape=shape,
        type=hint,
        default=None if shape is Shape.SECTION else {} if shape is Shape.MAPPING else field.default,
        help=field.metadata.get("help", ""),
        minimum=field.metadata.get("minimum"),
        maximum=field.metadata.get("maximum"),
        choices=field.metadata.get("choices"),
    )


def describe() -> list[Setting]:
    """Every leaf of the configuration, in the schema's order; the fields of a list's items are `list[].field`."""
    return list(_settings(AppConfig, ""))


def _settings(section: type, prefix: str) -> Iterator[Setting]:
    for dial in dials_of(section).values():
        key = prefix + dial.name
        if dial.shape is Shape.SECTION:
            yield from _settings(dial.type, f"{key}.")
            continue
        type_name = dial.type.__name__ if dial.shape is Shape.LEAF else dial.shape.value
        yield Setting(key, type_name, dial.default, dial.help, dial.allowed)
        if dial.shape is Shape.LIST:
            yield from _settings(dial.type, f"{key}[].")


def json_schema() -> dict[str, Any]:
    """The configuration as JSON Schema (draft 2020-12), for editors that complete and check YAML."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Trieserve", **_section_schema(AppConfig)}


def _section_schema(section: type) -> dict[str, Any]:
    properties = {dial.name: _dial_schema(dial) for dial in dials_of(section).values()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _dial_schema(dial: Dial) -> dict[str, Any]:
    if dial.shape is Shape.SECTION:
        return _section_schema(dial.type)
    if dial.shape is Shape.LIST:
        items = _section_schema(dial.type)
        return {"type": "array", "items": items, "default": list(dial.default), "description": dial.help}
    if dial.shape is Shape.MAPPING:
        return {"type": "object", "default": dict(dial.default), "description": dial.help}
    schema: dict[str, Any] = {"type": _JSON_TYPES[dial.type], "default": dial.default, "description": dial.help}
    limits = {"minimum": dial.minimum, "maximum": dial.maximum, "enum": dial.choices and list(dial.choices)}
    return schema | {word: limit for word, limit in limits.items() if limit is not None}
