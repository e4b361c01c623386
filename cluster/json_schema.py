"""Whether what a client calls a JSON Schema has the form of one. A walk of our own, because requests are anybody's.

The usual validator takes seconds of CPU for a schema of 64 KiB, compiles the client's patterns with `re`, and gives up with
whatever exception comes when one of them is too large. This one looks at each schema once, follows no reference, compiles
nothing and repeats nothing that it read. What a schema *means*, and whether an engine can keep to it, is the engine's business.
Source of the keywords: JSON Schema 2020-12, with `definitions` and lists in `items` as older drafts have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MAX_DEPTH = 32  # schemas within schemas (case SO03)

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


def fault(schema: Any) -> str | None:
    """What keeps `schema`, which came from a JSON text, from being a JSON Schema; None if nothing does. Level by level, so
    that nothing recurses."""
    level = [schema]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            if isinstance(each, bool):
                continue
            if not isinstance(each, dict):
                return "a schema is an object, or true or false"
            for keyword, value in each.items():
                inner = _SCHEMAS_IN.get(keyword)
                if inner is not None:
                    found = inner(value)
                    if found is None:
                        return f"`{keyword}` doesn't hold schemas as it should"
                    below += found
                elif keyword in _VALUES and not _VALUES[keyword][0](value):
                    return f"`{keyword}` must be {_VALUES[keyword][1]}"
        if not below:
            return None
        level = below
    return f"more than {MAX_DEPTH} schemas within each other"


def _one(value: Any) -> list[Any] | None:
    return [value]


def _one_or_list(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) else [value]


def _list(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) and value else None


def _by_name(value: Any) -> list[Any] | None:
    return list(value.values()) if isinstance(value, dict) else None


# Keyword -> the schemas in its value; None where the value can't hold any.
_SCHEMAS_IN: Mapping[str, Callable[[Any], list[Any] | None]] = {
    **dict.fromkeys(("additionalItems", "additionalProperties", "contains", "contentSchema", "propertyNames"), _one),
    **dict.fromkeys(("not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties"), _one),
    "items": _one_or_list,
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _list),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"), _by_name),
}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value) and len(set(value)) == len(value)


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) and value else [value]
    return _is_texts(names) and _TYPES.issuperset(names)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_local_reference(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("#")


# Keyword -> whether a value may stand there, and what may.
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(sorted(_TYPES))}, or a list of such"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    "required": (_is_texts, "a list of names, none of them twice"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_is_texts, value.values())),
        "an object of lists of names",
    ),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    # Nothing is fetched for a client.
    **dict.fromkeys(("$ref", "$dynamicRef"), (_is_local_reference, "a place in the schema itself, beginning with #")),
    **dict.fromkeys(("pattern", "format", "title", "description", "$id", "$schema", "$anchor"), (_is_text, "a text")),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (_is_number, "a number")),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"),
        (_is_size, "a whole number, 0 or more"),
    ),
}
