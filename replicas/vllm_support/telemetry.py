"""vLLM's scheduler statistics and our own count of requests, as EngineStats and as samples of the step-time model.

vLLM reports after each step what its scheduler did; requests are known to us, who submit and receive. The two are a step
apart now and then, so what must add up (started = finished + running + waiting; free + cached + used = total) is derived
from our own count, and vLLM's figures only divide it. No vLLM import: vllm_engine passes plain values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from replicas.contract import EngineStats, FinishReason
from replicas.step_time import StepTimeModel


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, as vLLM's SchedulerStats, SchedulerIterationDetails and IterationStats tell it.

    `prefill_tokens` of prompts were computed for `prefill_sequences`, and `decode_tokens` for `decode_sequences`, in
    `duration_s`; all are 0 where a report follows no step.
    """

    num_running: int
    kv_usage: float  # share of the KV blocks that running sequences hold, 0 to 1
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    prefill_sequences: int = 0
    decode_tokens: int = 0
    decode_sequences: int = 0
    duration_s: float = 0.0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: Sequence[int] = ()


@dataclass(slots=True)
class _Sequence:
    num_prompt_tokens: int
    num_pending: int  # of the prompt, not computed yet, as far as can be known
    num_output_tokens: int = 0


@dataclass(slots=True)
class Telemetry:
    """Counts what a vLLM engine does. All methods belong to one thread. Blocks are vLLM's, of `block_size` tokens."""

    num_blocks: int
    step_time: StepTimeModel
    _sequences: dict[str, _Sequence] = field(default_factory=dict)
    _num_running: int = 0
    _kv_usage: float = 0.0
    _started: int = 0
    _finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    _prompt_tokens: int = 0
    _generation_tokens: int = 0
    _prefix_queries: int = 0
    _prefix_hits: int = 0
    _preemptions: int = 0
    _drafts: int = 0
    _draft_tokens: int = 0
    _accepted_tokens: int = 0
    _accepted_per_position: list[int] = field(default_factory=list)
    _steps: int = 0

    def on_submit(self, request_id: str, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """`num_cached_tokens` of the prompt are in the cache now, by what its events told."""
        self._started += 1
        num_pending = max(num_prompt_tokens - num_cached_tokens, 1)
        self._sequences[request_id] = _Sequence(num_prompt_tokens, num_pending)

    def on_tokens(self, request_id: str, num_tokens: int) -> None:
        """The sequence has `num_tokens` more; with the first of them its prompt is computed."""
        sequence = self._sequences[request_id]
        if not sequence.num_output_tokens:
            self._prompt_tokens += sequence.num_prompt_tokens
        sequence.num_pending = 0
        sequence.num_output_tokens += num_tokens
        self._generation_tokens += num_tokens

    def on_finish(self, request_id: str, reason: FinishReason) -> None:
        del self._sequences[request_id]
        self._finished[reason.value] += 1

    def on_step(self, report: StepReport) -> None:
        self._num_running = report.num_running
        self._kv_usage = report.kv_usage
        self._prefix_queries += report.prefix_queries
        self._prefix_hits += report.prefix_hits
        self._preemptions += report.preemptions
        self._drafts += report.drafts
        self._draft_tokens += report.draft_tokens
        self._accepted_tokens += report.accepted_tokens
        missing = len(report.accepted_per_position) - len(self._accepted_per_position)
        self._accepted_per_position += [0] * missing
        for position, num_accepted in enumerate(report.accepted_per_position):
            self._accepted_per_position[position] += num_accepted
        num_tokens = report.prefill_tokens + report.decode_tokens
        if num_tokens:
            self._steps += 1
            self._spread_prefill(report.prefill_tokens)
            self.step_time.observe(
                num_tokens, self._num_context_tokens(), report.prefill_sequences + report.decode_sequences, report.duration_s
            )

    def stats(self, num_cached_blocks: int) -> EngineStats:
        """`num_cached_blocks` hold named contents, in use or not. Which of them running sequences use isn't told: all that
        are in use count as named, which is wrong by the one unfilled block of each sequence."""
        num_requests = len(self._sequences)
        # Nothing is said after an abort that leaves nothing to do, but then nothing is held either.
        num_used = min(round(self._kv_usage * self.num_blocks), self.num_blocks) if num_requests else 0
        num_cached = min(max(num_cached_blocks - num_used, 0), self.num_blocks - num_used)
        num_running = min(self._num_running, num_requests)
        num_decoding = sum(1 for sequence in self._sequences.values() if sequence.num_output_tokens)
        return EngineStats(
            num_running=num_running,
            num_waiting=num_requests - num_running,
            num_pending_tokens=sum(sequence.num_pending for sequence in self._sequences.values()) + num_decoding,
            num_context_tokens=self._num_context_tokens(),
            num_blocks_total=self.num_blocks,
            num_blocks_free=self.num_blocks - num_used - num_cached,
            num_blocks_cached=num_cached,
            num_blocks_used=num_used,
            started_total=self._started,
            finished_total=dict(self._finished),
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            prefix_queries_total=self._prefix_queries,
            prefix_hits_total=self._prefix_hits,
            preemptions_total=self._preemptions,
            drafts_total=self._drafts,
            draft_tokens_total=self._draft_tokens,
            accepted_tokens_total=self._accepted_tokens,
            accepted_per_position_total=tuple(self._accepted_per_position),
            steps_total=self._steps,
            step_time=self.step_time.coefficients(),
        )

    def _spread_prefill(self, num_tokens: int) -> None:
        """vLLM says how many prompt tokens a step computed, not whose. Its scheduler serves first who came first, and the
        last token of a prompt is only known to be computed when an output comes."""
        for sequence in self._sequences.values():
            if num_tokens <= 0:
                break
            num_taken = min(max(sequence.num_pending - 1, 0), num_tokens)
            sequence.num_pending -= num_taken
            num_tokens -= num_taken

    def _num_context_tokens(self) -> int:
        """KV entries of sequences that have been computed on, which a step with all of them reads."""
        return sum(
            sequence.num_prompt_tokens + sequence.num_output_tokens - sequence.num_pending
            for sequence in self._sequences.values()
            if sequence.num_output_tokens or sequence.num_pending < sequence.num_prompt_tokens
        )
