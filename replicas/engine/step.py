"""What the scheduler asks of the runner for one step, and what comes back. No torch here.

A step computes, for each of its sequences, the known tokens [start, start + len(token_ids)):

    known tokens   |##### computed #####|---- this chunk ----|.... later ....|
                   0                  start         start+len            num_known

A prompt chunk and a decode token are the same thing. When the chunk ends at the last known token, `sample` says how to
choose the next one; otherwise it is None. Draft tokens may follow the last known one (replicas.engine.speculate):

    known tokens   |##### computed #####|---- this chunk ----| d1 | d2 |          draft_samples: how to draw after d1, after d2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replicas.contract import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to draw the token at output position `position` (counted over the whole answer, from 0) of choice `choice`."""

    params: SamplingParams
    choice: int
    position: int
    prompt_token_ids: Sequence[int]  # without prior output; for the repetition penalty
    output_token_ids: Sequence[int]  # everything generated so far, prior output included; for penalties
    forbidden_token_ids: tuple[int, ...] = ()  # stop tokens, while `min_tokens` isn't reached


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """`block_table[i]` is the pool block of positions [i*block_size, (i+1)*block_size); it covers start + len(token_ids).

    The last len(draft_samples) of `token_ids` are draft tokens, computed like the others.

    The table is the scheduler's own list: the runner reads it during the step and keeps no reference.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None
    draft_samples: tuple[SampleSpec, ...] = ()

    @property
    def draft_token_ids(self) -> Sequence[int]:
        return self.token_ids[len(self.token_ids) - len(self.draft_samples) :]


@dataclass(frozen=True, slots=True)
class StepPlan:
    chunks: tuple[SequenceChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_context_tokens(self) -> int:
        """KV entries read: each sequence's context once."""
        return sum(chunk.start + len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class DrawnToken:
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """`token_id` is None where nothing was to be sampled or `error` is set (that sequence ends; the others go on).

    `further` are the tokens drawn after it, one for each draft token that was accepted.
    """

    request_id: str
    token_id: int | None = None
    logprob: TokenLogprob | None = None
    error: str | None = None
    further: tuple[DrawnToken, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One ChunkResult per chunk, in the plan's order. `duration_s` is the runner's own time for the step."""

    chunks: tuple[ChunkResult, ...]
    duration_s: float
