"""The shape of OpenAI request bodies: types and ranges, for `model_validate_json` on the raw bytes.

Strict: no "1" for 1, no 1.0 for an int, no true for 1, no NaN, no infinity. The JSON parser underneath refuses lone
surrogates, numbers of thousands of digits and nesting beyond 200 levels, in fields that nobody reads too. Limits that the
operator sets, and fields that are not declared here, are the business of cluster/openai_parse.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, StringConstraints
from pydantic_core import CoreSchema

_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class OneOf:
    """One error message for a union, instead of one for each of its members."""

    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: dict[str, Any] = dict(handler(source))
        return {**schema, "custom_error_type": "one_of", "custom_error_message": self.message}


Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Count = Annotated[int, Field(ge=1, le=_INT32_MAX)]
Texts = Annotated[list[str], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)],
    OneOf("Input should be a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
Stop = Annotated[str | Texts, OneOf("Input should be a string or a list of strings")]


class Body(BaseModel):
    """Undeclared fields are kept in `model_extra`, to be told apart in openai_parse."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)


class ContentPart(Body):
    type: Annotated[str, StringConstraints(max_length=64)]
    text: str | None = None


class Message(Body):
    role: Annotated[str, StringConstraints(max_length=64)]
    content: (
        Annotated[str | list[ContentPart], OneOf("Input should be a string or a list of content parts with a `type`")] | None
    ) = None
    # OpenAI's own pattern. It also keeps marker characters out of a string that templates put next to markers.
    name: Annotated[str, StringConstraints(pattern=r"^[^\s<|\\/>]{1,64}$")] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Body):
    """`schema` is a name that pydantic's models have already."""

    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(Body):
    type: Annotated[str, StringConstraints(max_length=64)]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's. A JSON Schema may be an object or a JSON text."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json"), OneOf("Input should be an object or a JSON text")] = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerateBody(Body):
    """What /v1/chat/completions and /v1/completions have in common. null means the default."""

    model: Name
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=_INT64_MIN, le=_INT64_MAX)] | None = None
    stop: Stop | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Name | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[dict[str, Any] | str, OneOf("Input should be an object or a JSON text")] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None


class ChatBody(GenerateBody):
    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(GenerateBody):
    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None


class TokenizeBody(Body):
    model: Name | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: Name | None = None
    tokens: TokenIds
