"""From the raw bytes of a request to a checked call. Every mistake is a RequestError (400) that names its `param`.

No message repeats what the client sent: not text, not names of unknown fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cluster.openai_api import Conversation, DetokenizeCall, GenerateCall, Kind, Prompt, TokenizeCall
from cluster.openai_fields import (
    HARMLESS,
    HARMLESS_IN_MESSAGE,
    TEMPLATE_OPTIONS,
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETION,
    UNSUPPORTED_IN_MESSAGE,
    UNSUPPORTED_PARTS,
    UNSUPPORTED_ROLES,
)
from cluster.openai_grammar import grammar_of
from cluster.openai_models import (
    Body,
    ChatBody,
    CompletionBody,
    ContentPart,
    DetokenizeBody,
    GenerateBody,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TokenizeBody,
)
from configs.schema import LimitsConfig
from replicas.chat_template import ChatMessage
from replicas.errors import PayloadTooLarge, RequestError, UnsupportedError

# OpenAI's newer name for instructions by the operator; chat templates know only the older one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MAX_UNKNOWN_FIELDS = 16
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_BODIES: tuple[type[Body], ...] = (
    *(ChatBody, CompletionBody, TokenizeBody, DetokenizeBody),
    *(Message, ContentPart, StreamOptions, ResponseFormat, JsonSchemaFormat, StructuredOutputs),
)
_FIELD_NAMES = frozenset(field.alias or name for model in _BODIES for name, field in model.model_fields.items())

_Body = TypeVar("_Body", bound=Body)


def parse_chat(body: bytes, limits: LimitsConfig) -> GenerateCall:
    """/v1/chat/completions. Raises RequestError, UnsupportedError, PayloadTooLarge."""
    request = _validate(ChatBody, body, limits)
    unknown = _unknown_fields(request, UNSUPPORTED_IN_CHAT, HARMLESS)
    conversation = _conversation(request.messages, request.chat_template_kwargs, limits)
    unknown += [
        f"messages.{name}"
        for message in request.messages
        for name in _unknown_fields(message, UNSUPPORTED_IN_MESSAGE, HARMLESS_IN_MESSAGE)
    ]
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs: needs logprobs to be true", param="top_logprobs")
    _at_most("top_logprobs", request.top_logprobs or 0, limits.max_logprobs)
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _generate_call(Kind.CHAT, request, (conversation,), num_logprobs, unknown, limits)


def parse_completion(body: bytes, limits: LimitsConfig) -> GenerateCall:
    """/v1/completions. Raises RequestError, UnsupportedError, PayloadTooLarge."""
    request = _validate(CompletionBody, body, limits)
    unknown = _unknown_fields(request, UNSUPPORTED_IN_COMPLETION, HARMLESS)
    prompts = _prompts(request.prompt)
    _at_most("prompt", len(prompts), limits.max_prompts, "prompts")
    _at_most("logprobs", request.logprobs or 0, limits.max_logprobs)
    return _generate_call(Kind.COMPLETION, request, prompts, request.logprobs, unknown, limits)


def parse_tokenize(body: bytes, limits: LimitsConfig) -> TokenizeCall:
    """/tokenize, of a text or of a conversation. Raises RequestError, UnsupportedError, PayloadTooLarge."""
    request = _validate(TokenizeBody, body, limits)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("either prompt or messages must be given", param="prompt")
    prompt: Prompt
    if request.messages is not None:
        prompt = _conversation(request.messages, request.chat_template_kwargs, limits)
    else:
        prompt = request.prompt or ""
    return TokenizeCall(
        model=request.model,
        prompt=prompt,
        add_special_tokens=request.add_special_tokens is not False,
        add_generation_prompt=request.add_generation_prompt is not False,
        return_token_strs=bool(request.return_token_strs),
    )


def parse_detokenize(body: bytes, limits: LimitsConfig) -> DetokenizeCall:
    """/detokenize. Raises RequestError, PayloadTooLarge."""
    request = _validate(DetokenizeBody, body, limits)
    return DetokenizeCall(model=request.model, tokens=tuple(request.tokens))


def _validate(model: type[_Body], body: bytes, limits: LimitsConfig) -> _Body:
    if len(body) > limits.max_body_bytes:
        raise PayloadTooLarge(f"the body has {len(body)} bytes; at most {limits.max_body_bytes} are accepted")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        param = _param(first["loc"])
        raise RequestError(f"{param}: {first['msg']}" if param else first["msg"], param=param) from None


def _param(location: Sequence[int | str]) -> str | None:
    """`messages[0].content`. Ends before the first part that isn't a field's name: a client's key or a union's member."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _FIELD_NAMES:
            path += f".{part}" if path else part
        else:
            break
    return path or None


def _unknown_fields(
    body: BaseModel, unsupported: Mapping[str, tuple[Any, ...]], harmless: frozenset[str], path: str = ""
) -> list[str]:
    """Names of `body`'s undeclared fields that mean nothing to us. Raises UnsupportedError for those that do."""
    unknown = []
    for name, value in (body.model_extra or {}).items():
        accepted = unsupported.get(name)
        if accepted is not None:
            if value is not None and value not in accepted:
                raise UnsupportedError(f"{path}{name} is not supported by this server", param=f"{path}{name}")
        elif name not in harmless:
            unknown.append(name if _PLAIN_NAME.fullmatch(name) else "?")
    return unknown


def _at_most(param: str, number: int, limit: int, things: str = "") -> None:
    if number > limit:
        raise RequestError(f"{param}: at most {limit}{' ' if things else ''}{things} accepted", param=param)


def _conversation(messages: Sequence[Message], options: Mapping[str, Any] | None, limits: LimitsConfig) -> Conversation:
    if not messages:
        raise RequestError("messages: at least one message is needed", param="messages")
    _at_most("messages", len(messages), limits.max_messages, "messages")
    checked = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    return Conversation(checked, _template_options(options or {}))


def _message(message: Message, path: str) -> ChatMessage:
    if message.role in UNSUPPORTED_ROLES:
        raise UnsupportedError(f"{path}.role: messages of tools are not supported by this server", param=f"{path}.role")
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(f"{path}.role: must be one of {', '.join(_ROLES)}", param=f"{path}.role")
    _unknown_fields(message, UNSUPPORTED_IN_MESSAGE, HARMLESS_IN_MESSAGE, f"{path}.")
    content = message.content
    if content is None:
        raise RequestError(f"{path}.content: needed", param=f"{path}.content")
    if not isinstance(content, str):
        content = "\n".join(_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    return ChatMessage(role, content, message.name)


def _part_text(part: ContentPart, path: str) -> str:
    if part.type in UNSUPPORTED_PARTS:
        raise UnsupportedError(f"{path}: this server reads text only", param=path)
    if part.type != "text":
        raise RequestError(f"{path}.type: must be text", param=f"{path}.type")
    if part.text is None:
        raise RequestError(f"{path}.text: needed", param=f"{path}.text")
    return part.text


def _template_options(options: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
    param = "chat_template_kwargs"
    if not options.keys() <= TEMPLATE_OPTIONS:
        raise UnsupportedError(f"{param}: only {', '.join(sorted(TEMPLATE_OPTIONS))} can be set", param=param)
    if not all(isinstance(value, bool) for value in options.values()):
        raise RequestError(f"{param}: values must be true or false", param=param)
    return tuple(sorted(options.items()))


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    """A string, strings, token ids, or lists of token ids: one prompt or several."""
    if isinstance(prompt, str):
        return (prompt,)
    several: list[Prompt] = []
    ids: list[int] = []
    for item in prompt:
        if isinstance(item, int):
            ids.append(item)
        else:
            several.append(item if isinstance(item, str) else tuple(item))
    if ids:
        several.append(tuple(ids))
    if not several or () in several:
        raise RequestError("prompt: must not be empty", param="prompt")
    return tuple(several)


def _generate_call(
    kind: Kind,
    request: GenerateBody,
    prompts: tuple[Prompt, ...],
    num_logprobs: int | None,
    unknown_fields: Sequence[str],
    limits: LimitsConfig,
) -> GenerateCall:
    _at_most("n", request.n or 1, limits.max_n)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options: only with stream", param="stream_options")
    usage = request.stream_options or StreamOptions()
    asked = grammar_of(request, limits)

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return GenerateCall(
        kind=kind,
        model=request.model,
        prompts=prompts,
        max_tokens=_max_tokens(request),
        min_tokens=request.min_tokens or 0,
        temperature=given(request.temperature, 1.0),
        top_p=given(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),  # clients write 0 or -1 for "off"
        min_p=given(request.min_p, 0.0),
        presence_penalty=given(request.presence_penalty, 0.0),
        frequency_penalty=given(request.frequency_penalty, 0.0),
        repetition_penalty=given(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request.logit_bias or {}, limits),
        seed=request.seed,
        stop=_stop(request.stop, limits),
        stop_token_ids=_stop_token_ids(request.stop_token_ids or [], limits),
        include_stop=bool(request.include_stop_str_in_output),
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=request.skip_special_tokens is not False,
        n=request.n or 1,
        num_logprobs=num_logprobs,
        stream=bool(request.stream),
        include_usage=bool(usage.include_usage),
        continuous_usage=bool(usage.continuous_usage_stats),
        cache_salt=request.cache_salt or "",
        grammar=None if asked is None else asked.grammar,
        grammar_param="" if asked is None else asked.param,
        unknown_fields=tuple(dict.fromkeys(unknown_fields))[:_MAX_UNKNOWN_FIELDS],
    )


def _max_tokens(request: GenerateBody) -> int | None:
    """Some clients send both names; which of two values they mean can't be known."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError("max_tokens and max_completion_tokens differ", param="max_tokens")
    return old if new is None else new


def _stop(stop: str | list[str] | None, limits: LimitsConfig) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    _at_most("stop", len(strings), limits.max_stop_strings, "strings")
    _at_most("stop", max(map(len, strings), default=0), limits.max_stop_chars, "characters")
    if "" in strings:
        raise RequestError("stop: must not be empty", param="stop")
    return strings


def _stop_token_ids(ids: list[int], limits: LimitsConfig) -> tuple[int, ...]:
    _at_most("stop_token_ids", len(ids), limits.max_stop_token_ids, "ids")
    return tuple(ids)


def _logit_bias(bias: Mapping[str, float], limits: LimitsConfig) -> tuple[tuple[int, float], ...]:
    _at_most("logit_bias", len(bias), limits.max_logit_bias, "entries")
    if not all(map(_TOKEN_ID.fullmatch, bias)):
        raise RequestError("logit_bias: keys must be token ids", param="logit_bias")
    by_id = {int(token_id): value for token_id, value in bias.items()}
    if len(by_id) < len(bias):
        raise RequestError("logit_bias: two keys are the same token id", param="logit_bias")
    return tuple(by_id.items())
