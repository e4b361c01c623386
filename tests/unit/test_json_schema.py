"""What is a JSON Schema, and that telling it takes no time, whatever a client sends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from cluster.json_schema import MAX_DEPTH, fault

METASCHEMA = Draft202012Validator(Draft202012Validator.META_SCHEMA)


def nested(depth: int) -> object:
    schema: object = {}
    for _ in range(depth - 1):
        schema = {"properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"], "additionalProperties": False},
        {"$ref": "#/$defs/tree", "$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}}},
        {"definitions": {"old": {"items": [{"type": "string"}, True]}}},
        {"properties": {"$ref": {"type": "string"}, "type": {"type": "integer"}}},  # names of properties, not keywords
        {"const": {"$ref": "http://192.0.2.1/", "type": 7}, "examples": [{"required": 1}]},  # data, not schemas
        {"x-anything": {"type": 7}},
        {"pattern": "a{99999999999999999999999}"},  # `re` has no exception of its own for it
        nested(MAX_DEPTH),
    ],
)
def test_these_are_schemas(schema):
    assert fault(schema) is None


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ([], "object"),
        ({"properties": {"a": 1}}, "object"),
        ({"properties": []}, "`properties`"),
        ({"allOf": []}, "`allOf`"),
        ({"anyOf": {}}, "`anyOf`"),
        ({"items": {"not": {"type": "text"}}}, "`type`"),
        ({"type": []}, "`type`"),
        ({"type": [["string"]]}, "`type`"),
        ({"enum": "a"}, "`enum`"),
        ({"required": [1]}, "`required`"),
        ({"required": ["a", "a"]}, "`required`"),
        ({"dependentRequired": {"a": "b"}}, "`dependentRequired`"),
        ({"minLength": -1}, "`minLength`"),
        ({"maxItems": True}, "`maxItems`"),
        ({"maxItems": 1.5}, "`maxItems`"),
        ({"minimum": "0"}, "`minimum`"),
        ({"multipleOf": 0}, "`multipleOf`"),
        ({"pattern": 1}, "`pattern`"),
        ({"$ref": "other.json"}, "`$ref`"),
        ({"$dynamicRef": "file:///etc/passwd"}, "`$dynamicRef`"),
        (nested(MAX_DEPTH + 1), "within"),
    ],
)
def test_these_are_none_and_it_is_said_why(schema, word):
    """cases SO02, SO03"""
    assert word in (fault(schema) or "")


small = st.sampled_from([None, True, 0, -1, 2, 1.5, "string", "object", "canary", [], {}, ["string"], ["a", "a"], [1], [[]]])
keywords = ("type", "required", "minLength", "maximum", "multipleOf", "uniqueItems", "pattern", "title", "unknown")
inner = ("not", "if", "items", "contains", "additionalProperties")


def schemas_of(schema: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(keywords, small),
            **dict.fromkeys(inner, schema),
            **dict.fromkeys(("anyOf", "prefixItems"), st.lists(schema, max_size=2)),
            **dict.fromkeys(("properties", "$defs"), st.dictionaries(st.sampled_from(["type", "a"]), schema, max_size=2)),
        },
    )


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.sampled_from([True, {}]) | small, schemas_of, max_leaves=4))
def test_the_metaschema_says_the_same(schema):
    """Where the two differ on purpose nothing is drawn: references, old drafts' lists in `items`, an `enum` of nothing."""
    assert (fault(schema) is None) == METASCHEMA.is_valid(schema)
