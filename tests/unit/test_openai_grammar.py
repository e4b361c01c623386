"""`response_format`, `structured_outputs` and the older spellings: what they become, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import openai_grammar
from cluster.openai_api import GenerateCall, require_grammar
from cluster.openai_parse import parse_chat, parse_completion
from configs.schema import LimitsConfig
from replicas.contract import GrammarKind, OutputGrammar
from replicas.errors import RequestError, UnsupportedError

LIMITS = LimitsConfig(max_grammar_chars=300, max_choices=3)
SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def chat(**fields) -> GenerateCall:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return parse_chat(json.dumps(body).encode(), LIMITS)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, OutputGrammar(GrammarKind.JSON_OBJECT)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
            OutputGrammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, OutputGrammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, OutputGrammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
        ({"structured_outputs": {"json_object": True}}, OutputGrammar(GrammarKind.JSON_OBJECT)),
        ({"structured_outputs": {"regex": "a+"}}, OutputGrammar(GrammarKind.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["ja", "ja", "nein"]}}, OutputGrammar(GrammarKind.CHOICE, '["ja", "nein"]')),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, OutputGrammar(GrammarKind.EBNF, 'root ::= "a"')),
        ({"guided_json": SCHEMA}, OutputGrammar(GrammarKind.JSON_SCHEMA, SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, OutputGrammar(GrammarKind.REGEX, "a+")),
        ({"guided_choice": ["a"]}, OutputGrammar(GrammarKind.CHOICE, '["a"]')),
        ({"guided_grammar": "g"}, OutputGrammar(GrammarKind.EBNF, "g")),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"structured_outputs": {"json_object": False}}, None),
    ],
)
def test_every_spelling_becomes_one_grammar(fields, expected):
    assert chat(**fields).grammar == expected


def test_completions_take_them_too():
    body = json.dumps({"model": "m", "prompt": "x", "response_format": {"type": "json_object"}}).encode()
    assert parse_completion(body, LIMITS).grammar == OutputGrammar(GrammarKind.JSON_OBJECT)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format.json_schema.schema"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, "response_format"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"maximum": NaN}'}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"maximum": float("inf")}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"const": "\\ud800"}'}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"not":' * 300 + "{}" + "}" * 300}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"$ref": "http://192.0.2.1/schema"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"properties": {"a": {"$ref": "file:///x"}}}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 301}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", "b", "c", "d"]}}, "structured_outputs.choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 5}, "min_tokens"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ],
)
def test_what_is_no_grammar_is_refused_by_its_name(fields, param):
    """cases SO01, SO02, SO04"""
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_schema_that_is_too_large_is_not_looked_at(as_text, monkeypatch):
    """cases SO03: what is checked takes time, so sizes come first."""
    monkeypatch.setattr(openai_grammar, "fault", lambda schema: pytest.fail("looked at"))
    schema = {"properties": {f"p{i}": {} for i in range(100)}}
    with pytest.raises(RequestError, match="at most 300 characters"):
        chat(guided_json=json.dumps(schema) if as_text else schema)


def test_what_a_client_wrote_is_not_repeated():
    with pytest.raises(RequestError) as caught:
        chat(guided_json={"properties": {"canary": {"type": "canary"}}})
    assert caught.value.message.startswith("guided_json: not a JSON Schema: `type` must be one of array, ")
    assert "canary" not in caught.value.message


def test_an_engine_without_the_kind_refuses_it_by_the_field_that_asked():
    call = chat(response_format={"type": "json_object"})
    require_grammar(call, ("json_object",))
    require_grammar(chat(), ())
    with pytest.raises(UnsupportedError) as caught:
        require_grammar(call, ("regex",))
    assert caught.value.param == "response_format"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "$ref", "properties", "x"]), inner),
    max_leaves=8,
)


@given(json_values)
def test_any_schema_is_taken_or_refused_but_never_crashes(schema):
    with suppress(RequestError):
        chat(structured_outputs={"json": schema})
    with suppress(RequestError):
        chat(response_format=schema)
