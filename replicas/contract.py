"""What crosses the line between an engine and everybody else: requests in, deltas, KV events and stats out.

An Engine turns token ids into token ids. It knows nothing of text, HTTP, Ray or other replicas. Stop *strings* are found
where text exists (cluster/), which then calls `abort(..., reason=STOP)`. All times are seconds, all sizes say their unit.

A step of any engine produces at most one StepOutput with deltas, handed to the `sink` that `start()` was given, from the
engine's own thread. KV events may come in a StepOutput of their own, a little later than the tokens of the step that caused
them. Sinks must not block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from replicas.blocks import BlockHash


class FinishReason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are OpenAI's words; the others never reach a client as a clean end."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class GrammarKind(StrEnum):
    """What an OutputGrammar's `spec` is written in."""

    JSON_OBJECT = "json_object"  # any JSON object; `spec` is empty
    JSON_SCHEMA = "json_schema"  # a JSON Schema as JSON text
    REGEX = "regex"
    CHOICE = "choice"  # a JSON array of strings, one of which is the answer
    EBNF = "grammar"  # a context-free grammar


@dataclass(frozen=True, slots=True)
class OutputGrammar:
    """What the text of an answer must match. Which kinds an engine enforces stands in `EngineInfo.grammars`."""

    kind: GrammarKind
    spec: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token. Order of effects: penalties and bias on logits, temperature, min_p, top_k, top_p, draw.

    `temperature == 0` is greedy. `seed` is always set: the ingress draws one when the client gave none, so that a sequence
    which continues on another replica samples the same tokens. The draw at output position i of choice c uses a
    counter-based generator keyed by (seed, c, i) and nothing else, in our own engines; vLLM has generators of its own, which
    repeat themselves but can't be set to a position.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    is_seeded: bool = True  # somebody asked for `seed`; otherwise an engine may draw as it likes
    min_tokens: int = 0  # no stop token may be drawn before this many output tokens
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end-of-sequence ids
    ignore_eos: bool = False  # the model's end-of-sequence ids don't stop; `stop_token_ids` still do
    num_logprobs: int | None = None  # None: none; 0: the sampled token's only; k: top k as well
    grammar: OutputGrammar | None = None  # only tokens that keep the answer within it may be drawn


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. A client's `n` choices are n of these, with `choice` 0..n-1 and ids of their own.

    `block_hashes` name the full blocks of `prompt_token_ids` (replicas.blocks, made with `hash_root`); the engine
    continues the chain over what it generates. The last `num_prior_output_tokens` of the prompt were generated elsewhere
    as this answer's beginning: they count for penalties, `min_tokens` and the position of the random draw, not for
    `max_tokens`. `adapter` is one of `EngineInfo.adapters`, or empty for the model itself; `hash_root` covers it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    hash_root: BlockHash
    block_hashes: tuple[BlockHash, ...] = ()
    choice: int = 0
    num_prior_output_tokens: int = 0
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities (natural) of the model's own distribution at one output position, before any sampling change."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error that crosses processes: see replicas.errors.rebuild."""

    name: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one sequence since its last Delta. `finish_reason` is set on the last one, always exactly one.

    A stop token is *not* among `token_ids`' text but is counted: it is the last id, and `stop_token_id` names it.
    `num_cached_tokens` and `queue_s` (submit to first schedule) are set on the first Delta and repeated never.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int | None = None
    queue_s: float | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class KVEvents:
    """What one step changed in the prefix cache: apply `removed`, then `stored`. `sequence` grows by 1 from 1.

    `cleared` (before the other two) empties the cache. A receiver that sees a gap must ask for a snapshot.
    """

    sequence: int
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class StepTimeCoefficients:
    """seconds(step) = base_s + per_token_s*tokens + per_context_s*context_tokens + per_sequence_s*sequences.

    `tokens` are computed in the step, `context_tokens` are KV entries read (sum over sequences of the context length that
    each *step* reads, once per sequence), `sequences` are those in the step. `relative_error` is the median of
    |predicted - measured| / measured over recent steps; `num_samples` says how much it rests on.
    """

    base_s: float
    per_token_s: float
    per_context_s: float
    per_sequence_s: float
    relative_error: float = 0.0
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A replica's state after a step. Counters only grow; gauges are now. A request is running or waiting or finished."""

    num_running: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0  # known tokens not yet computed, of running and waiting sequences
    num_context_tokens: int = 0  # KV entries that the running sequences hold
    num_blocks_total: int = 0
    num_blocks_free: int = 0  # neither used nor cached
    num_blocks_cached: int = 0  # kept for reuse, evictable
    num_blocks_used: int = 0  # referenced by running sequences
    started_total: int = 0
    finished_total: Mapping[str, int] = field(default_factory=dict)  # by FinishReason value
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_queries_total: int = 0  # prompt tokens looked up (vLLM counts tokens)
    prefix_hits_total: int = 0  # of them, served from the cache
    preemptions_total: int = 0
    drafts_total: int = 0  # sequences' steps in which draft tokens were verified
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0  # of the draft tokens
    accepted_per_position_total: tuple[int, ...] = ()  # how often the first, second, ... draft token was accepted
    steps_total: int = 0
    step_time: StepTimeCoefficients | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    deltas: tuple[Delta, ...]
    kv_events: KVEvents | None
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a client of the engine may rely on; fixed after `start`."""

    model_name: str
    model_revision: str
    vocab_size: int
    max_model_len: int  # tokens: prompt + output, never more than the whole KV cache holds
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    max_num_batched_tokens: int  # the chunked-prefill budget of a step
    max_num_seqs: int
    adapters: tuple[str, ...] = ()  # names of the LoRA adapters that a request may ask for
    grammars: tuple[str, ...] = ()  # GrammarKind values that the engine enforces
    num_recomputed_blocks: int = 0  # at the end of a cached prefix: what a drafter needs isn't in the cache


StepSink = Callable[[StepOutput], None]


class Engine(Protocol):
    """One model on one device. `submit` and `abort` may be called from any thread and return at once."""

    @property
    def info(self) -> EngineInfo: ...

    def start(self, sink: StepSink) -> None:
        """Begin stepping on a thread of the engine's own."""

    def submit(self, request: GenerationRequest) -> None:
        """Queue a sequence. Raises RequestError if it can never be served, OverloadedError if the queue is full."""

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a sequence within a step; its blocks are free then. Unknown ids are ignored. A last Delta follows."""

    def stats(self) -> EngineStats: ...

    def heartbeat_age_s(self) -> float:
        """Seconds since the engine last made progress; 0 while it has nothing to do."""

    def failure(self) -> str | None:
        """Why this engine will never serve again, as far as it knows; None while it may. Every request has ended then."""

    def clear_cache(self) -> None:
        """Forget all cached blocks that no running sequence uses; emits KVEvents(cleared or removed)."""

    def shutdown(self) -> None:
        """Stop stepping and end every sequence with ABORT. Idempotent."""
