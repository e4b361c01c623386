"""A request of ours in the words of vLLM's SamplingParams, as plain keyword arguments. No vLLM import."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicas.contract import GenerationRequest, GrammarKind, OutputGrammar, SamplingParams
from replicas.errors import RequestError, UnsupportedError

_GRAMMARS: Mapping[GrammarKind, Callable[[str], dict[str, Any]]] = {
    GrammarKind.JSON_OBJECT: lambda _: {"json_object": True},
    GrammarKind.JSON_SCHEMA: lambda spec: {"json": spec},
    GrammarKind.REGEX: lambda spec: {"regex": spec},
    GrammarKind.CHOICE: lambda spec: {"choice": _choices(spec)},
    GrammarKind.EBNF: lambda spec: {"grammar": spec},
}

GRAMMARS: tuple[str, ...] = tuple(kind.value for kind in _GRAMMARS)


def sampling_arguments(request: GenerationRequest, eos_token_ids: Sequence[int], *, can_seed: bool = True) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams; `structured_outputs` are those of StructuredOutputsParams.

    All ends are named, since vLLM knows one end-of-sequence id by itself where a model has several. `request` has passed
    replicas.engine.validate. Raises UnsupportedError for what would be computed differently here than elsewhere.

    A generator for each sequence slows every step down, so a seed that nobody asked for is left out. `can_seed` is whether
    vLLM can take one: its CPU build can't. Whenever a seeded prompt is computed in more than one step, it sets the generator
    back, which raises for CPU generators, and the core dies with all its requests (0.32, `_bookkeeping_sync`).
    """
    params = request.sampling
    _check_prior_output(request)
    if params.is_seeded and params.temperature > 0.0 and not can_seed:
        raise UnsupportedError("vLLM's CPU build can't draw by a seed; leave it out, or set temperature to 0", param="seed")
    stop_token_ids = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos_token_ids)
    return {
        "max_tokens": params.max_tokens,
        "min_tokens": max(params.min_tokens - request.num_prior_output_tokens, 0),
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": dict(params.logit_bias) or None,
        "seed": _seed(request) if params.is_seeded and params.temperature > 0.0 else None,
        "stop_token_ids": list(dict.fromkeys(stop_token_ids)),
        "ignore_eos": params.ignore_eos,
        "logprobs": params.num_logprobs,
        "structured_outputs": None if params.grammar is None else structured_output(params.grammar),
        "detokenize": False,
    }


def structured_output(grammar: OutputGrammar) -> dict[str, Any]:
    """Keyword arguments of StructuredOutputsParams."""
    return _GRAMMARS[grammar.kind](grammar.spec)


def _choices(spec: str) -> list[str]:
    try:
        choices = json.loads(spec)
    except ValueError:
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise RequestError("the choices must be a list of strings", param="structured_outputs")
    return choices


def _check_prior_output(request: GenerationRequest) -> None:
    """vLLM takes what another replica generated for a part of the prompt, which its penalties and grammars leave out."""
    params = request.sampling
    if request.num_prior_output_tokens and (_penalizes(params) or params.grammar is not None):
        raise UnsupportedError(
            "vLLM can't go on with an answer that another replica began under penalties or a grammar", param="prompt"
        )


def _penalizes(params: SamplingParams) -> bool:
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)


def _seed(request: GenerationRequest) -> int:
    """vLLM keeps one generator a sequence: choices, and parts of an answer, need seeds of their own."""
    seed, choice, position = request.sampling.seed, request.choice, request.num_prior_output_tokens
    if choice == 0 and position == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{choice}:{position}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
