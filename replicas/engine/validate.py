"""The engine's own check of a request, whoever sent it: nothing that passes may raise inside a step.

The ingress checks against the API's limits first; this is the second wall, against what the engine can compute. It also
gives the request its block names where the sender left them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from replicas.blocks import hash_block, hash_blocks
from replicas.contract import EngineInfo, GenerationRequest, SamplingParams
from replicas.errors import ContextLengthError, RequestError, UnsupportedError

# Inclusive. Sampling works in float32, where more extreme values overflow.
_FLOAT_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -100.0, 100.0),
    ("frequency_penalty", -100.0, 100.0),
    ("repetition_penalty", 0.01, 100.0),
)
_MAX_BIAS = 100.0
_NUM_IDS_SHOWN = 5


def validate(request: GenerationRequest, info: EngineInfo) -> GenerationRequest:
    """The request with its blocks named. Raises RequestError (with `param`) or ContextLengthError if it can't be served."""
    if not request.request_id or not isinstance(request.request_id, str):
        raise RequestError("the request needs an id", param="request_id")
    if not request.prompt_token_ids:
        raise RequestError("the prompt is empty", param="prompt")
    _check_token_ids(request.prompt_token_ids, info.vocab_size, "prompt")
    _check_int("choice", request.choice, 0, 2**31 - 1)
    _check_int("num_prior_output_tokens", request.num_prior_output_tokens, 0, len(request.prompt_token_ids) - 1)
    _check_sampling(request.sampling, request.num_prior_output_tokens, info)
    _check_abilities(request, info)
    _check_length(request, info)
    return _with_block_hashes(request, info.block_size)


def _check_sampling(params: SamplingParams, num_prior_output_tokens: int, info: EngineInfo) -> None:
    _check_int("max_tokens", params.max_tokens, 1, 2**63 - 1)
    _check_int("min_tokens", params.min_tokens, 0, params.max_tokens + num_prior_output_tokens)
    _check_int("top_k", params.top_k, 0, 2**31 - 1)
    _check_int("seed", params.seed, -(2**63), 2**63 - 1)
    if params.num_logprobs is not None:
        _check_int("logprobs", params.num_logprobs, 0, info.vocab_size)
    for name, low, high in _FLOAT_RANGES:
        _check_float(name, getattr(params, name), low, high)
    if params.top_p == 0:
        raise RequestError("top_p must be more than 0", param="top_p")
    _check_token_ids(params.stop_token_ids, info.vocab_size, "stop_token_ids")
    _check_token_ids(tuple(token_id for token_id, _ in params.logit_bias), info.vocab_size, "logit_bias")
    for _, bias in params.logit_bias:
        _check_float("logit_bias", bias, -_MAX_BIAS, _MAX_BIAS)


def _check_abilities(request: GenerationRequest, info: EngineInfo) -> None:
    grammar = request.sampling.grammar
    if grammar is not None and grammar.kind not in info.grammars:
        raise UnsupportedError(f"this model's engine can't keep answers within a {grammar.kind}", param="response_format")
    if request.adapter and request.adapter not in info.adapters:
        raise UnsupportedError("this model's engine has no such adapter", param="model")


def _check_length(request: GenerationRequest, info: EngineInfo) -> None:
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt + max_tokens > info.max_model_len:
        raise ContextLengthError(
            f"at most {info.max_model_len} tokens fit, prompt and output together; this request has {num_prompt} in the "
            f"prompt and asks for {max_tokens} more",
            param="prompt" if num_prompt >= info.max_model_len else "max_tokens",
        )


def _with_block_hashes(request: GenerationRequest, block_size: int) -> GenerationRequest:
    num_blocks = len(request.prompt_token_ids) // block_size
    hashes = request.block_hashes
    if not set(map(type, (request.hash_root, *hashes))) <= {bytes}:
        raise RequestError("block names must be bytes", param="block_hashes")
    if not hashes:
        return replace(request, block_hashes=hash_blocks(request.hash_root, request.prompt_token_ids, block_size))
    if len(hashes) != num_blocks:
        raise RequestError(f"the prompt has {num_blocks} full blocks, not {len(hashes)}", param="block_hashes")
    # The chain's two ends are enough to notice a foreign root, other tokens or another block size.
    parent = hashes[-2] if num_blocks > 1 else request.hash_root
    first = hash_block(request.hash_root, request.prompt_token_ids[:block_size])
    last = hash_block(parent, request.prompt_token_ids[(num_blocks - 1) * block_size : num_blocks * block_size])
    if first != hashes[0] or last != hashes[-1]:
        raise RequestError("the names of the prompt's blocks don't belong to it", param="block_hashes")
    return request


def _check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if not set(map(type, token_ids)) <= {int}:
        raise RequestError("token ids must be integers", param=param)
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        shown = ", ".join(str(token_id) for token_id in wrong[:_NUM_IDS_SHOWN] if abs(token_id) < 2**63)
        raise RequestError(f"{len(wrong)} token ids outside the vocabulary (0 to {vocab_size - 1}): {shown}", param=param)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}", param=name)


def _check_float(name: str, value: float, low: float, high: float) -> None:
    if type(value) not in (int, float) or not low <= value <= high:  # which NaN isn't
        raise RequestError(f"{name} must be a finite number from {low:g} to {high:g}", param=name)
