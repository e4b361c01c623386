"""OpenAI's API as plain values: what a checked request asks for, and how it becomes sampling parameters.

bytes -> openai_parse.parse_* -> GenerateCall -> prompt_token_ids, to_sampling -> GenerationRequest (ingress)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from replicas.chat_template import ChatMessage
from replicas.contract import OutputGrammar, SamplingParams
from replicas.errors import ContextLengthError, RequestError, UnsupportedError
from replicas.tokenizer import Tokenizer

_MAX_IDS_LISTED = 10


class Kind(StrEnum):
    CHAT = "chat"
    COMPLETION = "completion"

    @property
    def prompt_param(self) -> str:
        return "messages" if self is Kind.CHAT else "prompt"


@dataclass(frozen=True, slots=True)
class Conversation:
    """`template_options` are the variables of the chat template that a request may set, by name."""

    messages: tuple[ChatMessage, ...]
    template_options: tuple[tuple[str, bool], ...] = ()


TokenIds = tuple[int, ...]
Prompt = Conversation | str | TokenIds


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked request for text. `prompts` is never empty; None means that the client left it to us.

    `unknown_fields`: names in the body that mean nothing to us, made safe for logs.
    """

    kind: Kind
    model: str
    prompts: tuple[Prompt, ...]
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: TokenIds = ()
    include_stop: bool = False  # leave the stop string in the text
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1  # choices per prompt
    num_logprobs: int | None = None  # as in SamplingParams
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    cache_salt: str = ""  # narrows the tenant's own salt further
    grammar: OutputGrammar | None = None
    grammar_param: str = ""  # the field that asked for it
    unknown_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    model: str | None
    prompt: Prompt
    add_special_tokens: bool
    add_generation_prompt: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class DetokenizeCall:
    model: str | None
    tokens: TokenIds


def require_grammar(call: GenerateCall, kinds: Collection[str]) -> None:
    """Raises UnsupportedError where the answer is to keep within a grammar that the model's engine can't enforce."""
    if call.grammar is not None and call.grammar.kind not in kinds:
        raise UnsupportedError(
            f"{call.grammar_param} is not supported by this model's engine; engine.kind vllm has it", param=call.grammar_param
        )


def prompt_token_ids(
    prompt: Prompt,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    max_model_len: int | None = None,
    add_special_tokens: bool = True,
    add_generation_prompt: bool = True,
) -> list[int]:
    """What the model reads. CPU-heavy for long prompts: not for an event loop. Raises RequestError, ContextLengthError.

    With `max_model_len`, megabytes of text that can't possibly fit are refused without being tokenized.
    Special tokens written in a client's text stay text: only token ids and the chat template name special tokens.
    """
    if max_model_len is not None:
        _check_length(prompt, max_model_len, tokenizer.max_token_bytes)
    if isinstance(prompt, Conversation):
        ids = tokenizer.render_chat(
            prompt.messages, add_generation_prompt=add_generation_prompt, options=dict(prompt.template_options)
        )
    elif isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    else:
        _check_in_vocabulary(prompt, vocab_size, "prompt")
        ids = list(prompt)
    if not ids:
        raise RequestError("the prompt is empty", param="messages" if isinstance(prompt, Conversation) else "prompt")
    return ids


def _check_length(prompt: Prompt, max_model_len: int, max_token_bytes: int) -> None:
    texts = [message.content for message in prompt.messages] if isinstance(prompt, Conversation) else [prompt]
    num_characters = sum(len(text) for text in texts if isinstance(text, str))
    if num_characters > max_model_len * max_token_bytes:
        raise ContextLengthError(
            f"the model's context length is {max_model_len} tokens; {num_characters} characters can't fit",
            param="messages" if isinstance(prompt, Conversation) else "prompt",
        )


def to_sampling(
    call: GenerateCall, *, num_prompt_tokens: int, max_model_len: int, vocab_size: int, default_seed: int
) -> SamplingParams:
    """Raises ContextLengthError if prompt and answer don't fit into `max_model_len`, RequestError for ids out of range.

    Without `max_tokens` the answer may fill the rest of the context.
    """
    num_left = max_model_len - num_prompt_tokens
    if num_left < 1:
        raise ContextLengthError(
            f"the model's context length is {max_model_len} tokens, but the prompt has {num_prompt_tokens}, "
            "and the answer needs at least 1",
            param=call.kind.prompt_param,
        )
    if call.max_tokens is not None and call.max_tokens > num_left:
        raise ContextLengthError(
            f"the model's context length is {max_model_len} tokens, but {num_prompt_tokens + call.max_tokens} are asked for: "
            f"{num_prompt_tokens} in the prompt and {call.max_tokens} for the answer",
            param="max_tokens",
        )
    max_tokens = num_left if call.max_tokens is None else call.max_tokens
    if call.min_tokens > max_tokens:
        raise RequestError(f"min_tokens is {call.min_tokens}, but only {max_tokens} tokens are possible", param="min_tokens")
    _check_in_vocabulary((token_id for token_id, _ in call.logit_bias), vocab_size, "logit_bias")
    _check_in_vocabulary(call.stop_token_ids, vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=call.temperature,
        top_k=call.top_k,
        top_p=call.top_p,
        min_p=call.min_p,
        presence_penalty=call.presence_penalty,
        frequency_penalty=call.frequency_penalty,
        repetition_penalty=call.repetition_penalty,
        logit_bias=call.logit_bias,
        seed=default_seed if call.seed is None else call.seed,
        is_seeded=call.seed is not None,
        min_tokens=call.min_tokens,
        stop_token_ids=call.stop_token_ids,
        ignore_eos=call.ignore_eos,
        num_logprobs=call.num_logprobs,
        grammar=call.grammar,
    )


def detokenize(call: DetokenizeCall, tokenizer: Tokenizer) -> str:
    """Raises RequestError for ids outside the vocabulary."""
    _check_in_vocabulary(call.tokens, tokenizer.vocab_size, "tokens")
    return tokenizer.decode(call.tokens, skip_special_tokens=False)


def _check_in_vocabulary(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    wrong = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if wrong:
        # A client may send integers of thousands of digits.
        shown = ", ".join(str(i) if -(2**63) <= i < 2**63 else "a huge number" for i in wrong[:_MAX_IDS_LISTED])
        more = f" and {len(wrong) - _MAX_IDS_LISTED} more" if len(wrong) > _MAX_IDS_LISTED else ""
        raise RequestError(f"{param}: token ids out of range, the vocabulary has {vocab_size}: {shown}{more}", param=param)
