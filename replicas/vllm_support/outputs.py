"""What vLLM hands out, as our values: outputs as deltas, statistics as reports, exceptions as errors.

No vLLM import: the values are read by their attributes' names, which replicas.vllm_support.installed lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from replicas.contract import Delta, ErrorInfo, FinishReason, GenerationRequest, SamplingParams, TokenLogprob
from replicas.errors import EngineError, ReplicaLostError, RequestError
from replicas.vllm_support.telemetry import StepReport

# vLLM's finish reasons. Repetition is an end that a request has to ask for, which ours don't.
_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
}
_PARAMS = {
    "structured_outputs": "response_format",
    "grammar": "response_format",
    "prompt_token_ids": "prompt",
    "max_new_tokens": "max_tokens",
}
_CLIENT_ERROR, _DEAD = "VLLMClientError", "EngineDeadError"


def to_delta(output: Any, request: GenerationRequest, eos_token_ids: Sequence[int], *, is_first: bool) -> Delta:
    """One vllm.RequestOutput of kind DELTA, of a request with one choice."""
    [choice] = output.outputs
    token_ids = tuple(choice.token_ids)
    reason = None if choice.finish_reason is None else _REASONS.get(choice.finish_reason, FinishReason.ERROR)
    metrics = output.metrics
    return Delta(
        output.request_id,
        token_ids,
        finish_reason=reason,
        logprobs=_logprobs(token_ids, choice.logprobs, request.sampling.num_logprobs),
        stop_token_id=_stop_token_id(token_ids, request, eos_token_ids) if reason is FinishReason.STOP else None,
        num_cached_tokens=(output.num_cached_tokens or 0) if is_first else None,
        queue_s=max(0.0, metrics.scheduled_ts - metrics.queued_ts) if is_first and metrics is not None else None,
        error=_error(EngineError("the engine failed on this request")) if reason is FinishReason.ERROR else None,
    )


def _stop_token_id(token_ids: Sequence[int], request: GenerationRequest, eos_token_ids: Sequence[int]) -> int | None:
    """A grammar can end an answer without a stop token, too."""
    params = request.sampling
    is_stop = token_ids and (
        token_ids[-1] in params.stop_token_ids or (token_ids[-1] in eos_token_ids and not params.ignore_eos)
    )
    return token_ids[-1] if is_stop else None


def _logprobs(
    token_ids: Sequence[int], logprobs: Sequence[Mapping[int, Any]] | None, num_top: int | None
) -> tuple[TokenLogprob, ...] | None:
    """vLLM adds the sampled token to the best ones, whatever its rank."""
    if logprobs is None or num_top is None:
        return None
    return tuple(
        TokenLogprob(
            token_id,
            found[token_id].logprob,
            tuple(
                (other, entry.logprob)
                for other, entry in sorted(found.items(), key=lambda item: (-item[1].logprob, item[1].rank))[:num_top]
            ),
        )
        for token_id, found in zip(token_ids, logprobs, strict=True)
    )


def step_report(scheduler: Any, iteration: Any) -> StepReport | None:
    """vllm's SchedulerStats and IterationStats of one step; None where the scheduler said nothing."""
    if scheduler is None:
        return None
    details, drafts, prefixes = scheduler.iteration_details, scheduler.spec_decoding_stats, scheduler.prefix_cache_stats
    return StepReport(
        num_running=scheduler.num_running_reqs,
        kv_usage=scheduler.kv_cache_usage,
        prefix_queries=prefixes.queries,
        prefix_hits=prefixes.hits,
        preemptions=0 if iteration is None else iteration.num_preempted_reqs,
        prefill_tokens=details.num_ctx_tokens if details else 0,
        prefill_sequences=details.num_ctx_requests if details else 0,
        decode_tokens=details.num_generation_tokens if details else 0,
        decode_sequences=details.num_generation_requests if details else 0,
        duration_s=details.elapsed_ms / 1e3 if details else 0.0,
        drafts=drafts.num_drafts if drafts else 0,
        draft_tokens=drafts.num_draft_tokens if drafts else 0,
        accepted_tokens=drafts.num_accepted_tokens if drafts else 0,
        accepted_per_position=tuple(drafts.num_accepted_tokens_per_pos) if drafts else (),
    )


def error_info(error: BaseException, request: GenerationRequest) -> ErrorInfo:
    """What ends a request that vLLM raised `error` on: the client's fault, the engine's death, or a bug.

    Messages of validation go out as they are but for the value, which may be the client's text.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if _DEAD in kinds:
        return _error(ReplicaLostError("the replica's engine died"))
    if _CLIENT_ERROR in kinds:
        return _error(_refusal(error, request))
    cause = error.__cause__
    if request.sampling.grammar is not None and isinstance(cause, ValueError):
        return _error(RequestError("vLLM can't make a grammar of this", param="response_format"))
    return _error(EngineError(f"the engine failed on this request ({type(cause or error).__name__})"))


def _refusal(error: BaseException, request: GenerationRequest) -> RequestError:
    # Further lines are the client's own words.
    message = (str(error.args[0]) if error.args else "").strip().partition("\n")[0] or "vLLM refuses this request"
    parameter: str | None = getattr(error, "parameter", None) or _parameter_in(message, request.sampling)
    if parameter is None and request.sampling.grammar is not None:
        parameter = "response_format"
    return RequestError(message, param=_PARAMS.get(parameter or "", parameter))


def _parameter_in(message: str, params: SamplingParams) -> str | None:
    """Which of the parameters that the request set is named in a message."""
    names = [each.name for each in fields(params) if each.default is not MISSING and getattr(params, each.name) != each.default]
    return next((name for name in names if re.search(rf"\b{name}\b", message)), None)


def _error(error: ReplicaLostError | RequestError | EngineError) -> ErrorInfo:
    return ErrorInfo(type(error).__name__, error.message, error.param, error.code)
