"""What an answer's text must match: OpenAI's `response_format`, vLLM's `structured_outputs` and its older spellings.

Here only the form is checked: that a schema is one and that nothing is too large. Whether it can be kept, and how, is the
engine's business, which refuses on its own account what it can't.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from cluster.json_schema import fault
from cluster.openai_models import GenerateBody, ResponseFormat, StructuredOutputs
from configs.schema import LimitsConfig
from replicas.contract import GrammarKind, OutputGrammar
from replicas.errors import RequestError, UnsupportedError


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """`param` is the field that asked for it."""

    grammar: OutputGrammar
    param: str


def grammar_of(request: GenerateBody, limits: LimitsConfig) -> AskedGrammar | None:
    """The one grammar that a request asks for. Raises RequestError, UnsupportedError."""
    asked = [found for read in _READERS for found in read(request)]
    if not asked:
        return None
    if len(asked) > 1:
        params = ", ".join(dict.fromkeys(param for param, _, _ in asked))
        raise RequestError(f"{params}: an answer can be kept within one grammar only", param=asked[1][0])
    param, kind, value = asked[0]
    _check_end(request, param)
    spec = _SPECS[kind](value, param, limits)
    _check_size(spec, param, limits)
    return AskedGrammar(OutputGrammar(kind, spec), param)


def _check_end(request: GenerateBody, param: str) -> None:
    """The grammar says where an answer ends: past it no token is allowed that would be one of the answer's."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(request, name):
            raise RequestError(f"{name}: can't be kept together with {param}, which says where an answer ends", param=name)


def _check_size(spec: str, param: str, limits: LimitsConfig) -> None:
    if len(spec) > limits.max_grammar_chars:
        raise RequestError(f"{param}: at most {limits.max_grammar_chars} characters accepted", param=param)


Asked = tuple[str, GrammarKind, Any]


def _from_response_format(request: GenerateBody) -> Iterator[Asked]:
    param, found = "response_format", request.response_format
    if found is None or found.type == "text":
        return
    if found.type == "json_object":
        yield param, GrammarKind.JSON_OBJECT, None
    elif found.type == "json_schema":
        yield param, GrammarKind.JSON_SCHEMA, _schema_in(found)
    elif found.type == "structural_tag":
        raise UnsupportedError(f"{param}.type: structural_tag is not supported by this server", param=f"{param}.type")
    else:
        raise RequestError(f"{param}.type: must be text, json_object or json_schema", param=f"{param}.type")


def _schema_in(found: ResponseFormat) -> Any:
    if found.json_schema is None or found.json_schema.json_schema is None:
        raise RequestError("response_format.json_schema: needs a `schema`", param="response_format.json_schema")
    return found.json_schema.json_schema


def _from_structured_outputs(request: GenerateBody) -> Iterator[Asked]:
    param, found = "structured_outputs", request.structured_outputs or StructuredOutputs()
    for name, kind, value in (
        ("json", GrammarKind.JSON_SCHEMA, found.json_),
        ("regex", GrammarKind.REGEX, found.regex),
        ("choice", GrammarKind.CHOICE, found.choice),
        ("grammar", GrammarKind.EBNF, found.grammar),
        ("json_object", GrammarKind.JSON_OBJECT, found.json_object or None),
    ):
        if value is not None:
            yield f"{param}.{name}", kind, value


def _from_guided(request: GenerateBody) -> Iterator[Asked]:
    for param, kind, value in (
        ("guided_json", GrammarKind.JSON_SCHEMA, request.guided_json),
        ("guided_regex", GrammarKind.REGEX, request.guided_regex),
        ("guided_choice", GrammarKind.CHOICE, request.guided_choice),
        ("guided_grammar", GrammarKind.EBNF, request.guided_grammar),
    ):
        if value is not None:
            yield param, kind, value


_READERS: tuple[Callable[[GenerateBody], Iterator[Asked]], ...] = (
    _from_response_format,
    _from_structured_outputs,
    _from_guided,
)


def _schema_spec(value: Any, param: str, limits: LimitsConfig) -> str:
    """Sizes come first: of a schema that is too large nothing is looked at."""
    try:
        if isinstance(value, str):
            _check_size(value, param, limits)
            value = from_json(value, allow_inf_nan=False)  # as strict as with bodies
        spec = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise RequestError(f"{param}: not a JSON text", param=param) from None
    _check_size(spec, param, limits)
    if not isinstance(value, dict):
        raise RequestError(f"{param}: a JSON Schema is an object", param=param)
    found = fault(value)
    if found is not None:
        raise RequestError(f"{param}: not a JSON Schema: {found}", param=param)
    return spec


def _choice_spec(value: list[str], param: str, limits: LimitsConfig) -> str:
    if not value or "" in value:
        raise RequestError(f"{param}: must be a list of texts that aren't empty", param=param)
    if len(value) > limits.max_choices:
        raise RequestError(f"{param}: at most {limits.max_choices} choices accepted", param=param)
    return json.dumps(list(dict.fromkeys(value)), ensure_ascii=False)


def _text_spec(value: str, param: str, _: LimitsConfig) -> str:
    if not value.strip() or "\0" in value:
        raise RequestError(f"{param}: must not be empty, and without NUL", param=param)
    return value


_SPECS: Mapping[GrammarKind, Callable[[Any, str, LimitsConfig], str]] = {
    GrammarKind.JSON_OBJECT: lambda _value, _param, _limits: "",
    GrammarKind.JSON_SCHEMA: _schema_spec,
    GrammarKind.CHOICE: _choice_spec,
    GrammarKind.REGEX: _text_spec,
    GrammarKind.EBNF: _text_spec,
}
