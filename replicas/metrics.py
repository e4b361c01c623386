"""What a replica measures, under vLLM's names where vLLM has one, so that its dashboards and scrapers work unchanged.

Counters and gauges are the engine's own (the latest EngineStats), all of the same step, so that at any scrape

    started = finished{stop} + {length} + {abort} + {error} + running + waiting

Durations are measured here, from the deltas, by the clock that gives `now`:

    submit ---- queue ----> scheduled ---- prefill ----> first token ---- decode ----> last token, finish
    |------------- time to first token ----------------|
    |------------------------------- end to end (to the last delta) -----------------------------------|

- TTFT and prefill count requests with at least one token, whatever became of them (cases MT01).
- End to end, inference, decode, time per output token and the histograms of tokens count complete answers (STOP, LENGTH):
  aborted and failed ones end early and would make the replica look fast. Time per output token needs two tokens.
- Inter-token latency has one observation per token after a request's first. The k tokens of one delta share the gap
  before it, gap/k each; those that come along with the first token have no gap and count as 0 s. So the sum of the
  histogram is the time between first and last tokens, and speculation shows as what it is to a client: faster tokens.

What vLLM has beyond this would have to be made up here: `iteration_tokens_total` (no counter tells which step computed a
prompt's chunk), `request_num_preemptions`, `request_params_n` and `request_max_num_generation_tokens` (an engine sees each
choice as a request of its own), `lora_requests_info` and `num_requests_waiting_by_reason` (which requests wait, and why, only
the engine knows), sleep states, and what belongs to multi-modal models, KV connectors and sampled lifetimes of blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import generate_latest

from replicas.blocks import BLOCK_SIZE
from replicas.contract import EngineStats, FinishReason, StepOutput
from replicas.exposition import (
    E2E_BUCKETS_S,
    ITL_BUCKETS_S,
    TOKEN_BUCKETS,
    TTFT_BUCKETS_S,
    Distribution,
    Kind,
    Metric,
    Series,
    Snapshot,
    make_registry,
)

SHARED_LABELS = ("model_name", "engine")

_COUNTER, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

METRICS: tuple[Metric, ...] = (
    Metric("vllm:num_requests_running", _GAUGE, "Requests in the engine's current batch."),
    Metric("vllm:num_requests_waiting", _GAUGE, "Requests queued in the engine."),
    Metric("vllm:kv_cache_usage_perc", _GAUGE, "Share of KV blocks that running requests hold; 1 is all."),
    Metric(
        "vllm:cache_config_info", _GAUGE, "Always 1; the KV cache's layout is in the labels.", ("block_size", "num_gpu_blocks")
    ),
    Metric("vllm:prefix_cache_queries_total", _COUNTER, "Prompt tokens looked up in the prefix cache."),
    Metric("vllm:prefix_cache_hits_total", _COUNTER, "Prompt tokens found in the prefix cache."),
    Metric("vllm:prompt_tokens_total", _COUNTER, "Prompt tokens of scheduled requests."),
    Metric("vllm:generation_tokens_total", _COUNTER, "Tokens generated."),
    Metric("vllm:prompt_tokens_cached_total", _COUNTER, "Prompt tokens found cached, of requests that got a token."),
    Metric("vllm:num_preemptions_total", _COUNTER, "Times that a running request gave its KV blocks up."),
    Metric("vllm:spec_decode_num_drafts_total", _COUNTER, "Drafts verified; one per sequence and step."),
    Metric("vllm:spec_decode_num_draft_tokens_total", _COUNTER, "Draft tokens verified."),
    Metric("vllm:spec_decode_num_accepted_tokens_total", _COUNTER, "Draft tokens accepted."),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        _COUNTER,
        "Draft tokens accepted, by their place in the draft; the first is 0.",
        ("position",),
    ),
    Metric("vllm:request_success_total", _COUNTER, "Requests ended, by reason.", ("finished_reason",)),
    Metric("vllm:time_to_first_token_seconds", _HISTOGRAM, "Submit to first token.", buckets=TTFT_BUCKETS_S),
    Metric("vllm:inter_token_latency_seconds", _HISTOGRAM, "Gap before each token but the first.", buckets=ITL_BUCKETS_S),
    Metric(
        "vllm:request_time_per_output_token_seconds",
        _HISTOGRAM,
        "A complete request's mean gap between tokens.",
        buckets=ITL_BUCKETS_S,
    ),
    Metric("vllm:e2e_request_latency_seconds", _HISTOGRAM, "Submit to end of complete requests.", buckets=E2E_BUCKETS_S),
    Metric("vllm:request_queue_time_seconds", _HISTOGRAM, "Submit to first schedule.", buckets=TTFT_BUCKETS_S),
    Metric(
        "vllm:request_inference_time_seconds",
        _HISTOGRAM,
        "First schedule to last token of complete requests.",
        buckets=E2E_BUCKETS_S,
    ),
    Metric("vllm:request_prefill_time_seconds", _HISTOGRAM, "First schedule to first token.", buckets=TTFT_BUCKETS_S),
    Metric("vllm:request_decode_time_seconds", _HISTOGRAM, "First to last token of complete requests.", buckets=E2E_BUCKETS_S),
    Metric("vllm:request_prompt_tokens", _HISTOGRAM, "Prompt length of complete requests.", buckets=TOKEN_BUCKETS),
    Metric("vllm:request_generation_tokens", _HISTOGRAM, "Output length of complete requests.", buckets=TOKEN_BUCKETS),
    Metric("vllm:request_params_max_tokens", _HISTOGRAM, "Most tokens that a complete request allowed.", buckets=TOKEN_BUCKETS),
    Metric(
        "vllm:request_prefill_kv_computed_tokens",
        _HISTOGRAM,
        "Prompt tokens of a complete request that were not found cached.",
        buckets=TOKEN_BUCKETS,
    ),
    Metric("trieserve:requests_started_total", _COUNTER, "Requests that the engine accepted."),
    Metric("trieserve:requests_finished_total", _COUNTER, "Requests ended, by reason.", ("reason",)),
    Metric("trieserve:pending_tokens", _GAUGE, "Known tokens not yet computed, of running and waiting requests."),
    Metric("trieserve:kv_blocks", _GAUGE, "KV blocks; free + cached + used are all.", ("state",)),
    Metric("trieserve:engine_steps_total", _COUNTER, "Steps of the engine."),
    Metric("trieserve:step_time_relative_error", _GAUGE, "Median error of the step-time model over recent steps."),
    Metric("trieserve:last_step_age_seconds", _GAUGE, "Since the engine's last step; grows while there is nothing to do."),
    Metric("trieserve:engine_heartbeat_age_seconds", _GAUGE, "Since a busy engine last made progress; 0 while idle."),
)


def _one(value: float) -> Series:
    return {(): value}


def _by_reason(stats: EngineStats) -> Series:
    return {(reason.value,): stats.finished_total.get(reason.value, 0) for reason in FinishReason}


def _kv_blocks(stats: EngineStats) -> Series:
    return {
        ("free",): stats.num_blocks_free,
        ("cached",): stats.num_blocks_cached,
        ("used",): stats.num_blocks_used,
    }


def _speculates(stats: EngineStats) -> bool:
    """An engine that doesn't has no such series; one that only hasn't yet knows its positions and shows zeros."""
    return stats.drafts_total > 0 or bool(stats.accepted_per_position_total)


_FROM_STATS: dict[str, Callable[[EngineStats], Series]] = {
    "vllm:num_requests_running": lambda s: _one(s.num_running),
    "vllm:num_requests_waiting": lambda s: _one(s.num_waiting),
    "vllm:kv_cache_usage_perc": lambda s: _one(s.num_blocks_used / s.num_blocks_total) if s.num_blocks_total else {},
    "vllm:prefix_cache_queries_total": lambda s: _one(s.prefix_queries_total),
    "vllm:prefix_cache_hits_total": lambda s: _one(s.prefix_hits_total),
    "vllm:prompt_tokens_total": lambda s: _one(s.prompt_tokens_total),
    "vllm:generation_tokens_total": lambda s: _one(s.generation_tokens_total),
    "vllm:num_preemptions_total": lambda s: _one(s.preemptions_total),
    "vllm:spec_decode_num_drafts_total": lambda s: _one(s.drafts_total) if _speculates(s) else {},
    "vllm:spec_decode_num_draft_tokens_total": lambda s: _one(s.draft_tokens_total) if _speculates(s) else {},
    "vllm:spec_decode_num_accepted_tokens_total": lambda s: _one(s.accepted_tokens_total) if _speculates(s) else {},
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": lambda s: {
        (str(position),): count for position, count in enumerate(s.accepted_per_position_total)
    },
    "vllm:request_success_total": _by_reason,
    "trieserve:requests_started_total": lambda s: _one(s.started_total),
    "trieserve:requests_finished_total": _by_reason,
    "trieserve:pending_tokens": lambda s: _one(s.num_pending_tokens),
    "trieserve:kv_blocks": _kv_blocks,
    "trieserve:engine_steps_total": lambda s: _one(s.steps_total),
    "trieserve:step_time_relative_error": lambda s: _one(s.step_time.relative_error) if s.step_time else {},
}


@dataclass(slots=True)
class _Timing:
    """A request between submit and its last delta."""

    submitted_at_s: float
    num_prompt_tokens: int
    max_tokens: int
    num_cached_tokens: int = 0
    queue_s: float | None = None
    first_token_at_s: float = 0.0
    last_token_at_s: float = 0.0
    num_tokens: int = 0


class ReplicaMetrics:
    """Counts what an engine does. `on_*` and `observe` may be called from any thread, `render` and `registry` as well.

    `clock` must be the one whose readings are passed as `now`. Hand the engine's stats in once before serving
    (`observe(StepOutput((), None, engine.stats()), now)`), and the layout of the KV cache shows before the first request.
    `heartbeat_age_s` is the engine's, asked at each scrape.
    """

    def __init__(
        self,
        model_name: str,
        engine_label: str,
        clock: Callable[[], float],
        *,
        heartbeat_age_s: Callable[[], float],
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self._clock = clock
        self._heartbeat_age_s = heartbeat_age_s
        self._block_size = str(block_size)
        self._lock = threading.Lock()  # held for microseconds: sinks must not block
        self._stats = EngineStats()
        self._last_step_at_s: float | None = None
        self._num_cached_tokens = 0
        self._timings: dict[str, _Timing] = {}
        self._histograms = {m.name: Distribution(m.buckets) for m in METRICS if m.kind is Kind.HISTOGRAM}
        self._ttft = self._histograms["vllm:time_to_first_token_seconds"]
        self._itl = self._histograms["vllm:inter_token_latency_seconds"]
        self._tpot = self._histograms["vllm:request_time_per_output_token_seconds"]
        self._e2e = self._histograms["vllm:e2e_request_latency_seconds"]
        self._queue = self._histograms["vllm:request_queue_time_seconds"]
        self._inference = self._histograms["vllm:request_inference_time_seconds"]
        self._prefill = self._histograms["vllm:request_prefill_time_seconds"]
        self._decode = self._histograms["vllm:request_decode_time_seconds"]
        self._prompt_tokens = self._histograms["vllm:request_prompt_tokens"]
        self._generation_tokens = self._histograms["vllm:request_generation_tokens"]
        self._max_tokens = self._histograms["vllm:request_params_max_tokens"]
        self._computed_tokens = self._histograms["vllm:request_prefill_kv_computed_tokens"]
        shared = dict(zip(SHARED_LABELS, (model_name, engine_label), strict=True))
        self.registry = make_registry(METRICS, shared, self._snapshot)

    @property
    def num_tracked(self) -> int:
        """Requests between submit and their last delta; 0 when the engine is idle."""
        return len(self._timings)

    def on_submit(self, request_id: str, now: float, *, num_prompt_tokens: int, max_tokens: int) -> None:
        """Call before `engine.submit`, whose first delta may come at once."""
        with self._lock:
            self._timings[request_id] = _Timing(now, num_prompt_tokens, max_tokens)

    def on_refused(self, request_id: str) -> None:
        """`engine.submit` raised: no delta will ever come."""
        with self._lock:
            self._timings.pop(request_id, None)

    def observe(self, output: StepOutput, now: float) -> None:
        """Take one output in: a step's, or cache events alone, which are no step. Deltas of requests that were not announced
        by `on_submit` are not timed."""
        with self._lock:
            if output.stats.steps_total != self._stats.steps_total:
                self._last_step_at_s = now
            self._stats = output.stats
            for delta in output.deltas:
                timing = self._timings.get(delta.request_id)
                if timing is None:
                    continue
                if delta.queue_s is not None:
                    timing.queue_s = delta.queue_s
                    self._queue.observe(delta.queue_s)
                if delta.num_cached_tokens is not None:
                    timing.num_cached_tokens = delta.num_cached_tokens
                if delta.token_ids:
                    self._on_tokens(timing, len(delta.token_ids), now)
                if delta.finish_reason is not None:
                    del self._timings[delta.request_id]
                    if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                        self._on_complete(timing, now)

    def render(self) -> bytes:
        """The exposition in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)

    def _on_tokens(self, timing: _Timing, num_new: int, now: float) -> None:
        if timing.num_tokens:
            self._itl.observe((now - timing.last_token_at_s) / num_new, num_new)
        else:
            ttft_s = now - timing.submitted_at_s
            self._ttft.observe(ttft_s)
            self._num_cached_tokens += timing.num_cached_tokens
            # The engine measured queue_s with a clock of its own: a difference below 0 is only that.
            self._prefill.observe(max(0.0, ttft_s - (timing.queue_s or 0.0)))
            self._itl.observe(0.0, num_new - 1)
            timing.first_token_at_s = now
        timing.last_token_at_s = now
        timing.num_tokens += num_new

    def _on_complete(self, timing: _Timing, now: float) -> None:
        self._e2e.observe(now - timing.submitted_at_s)
        self._prompt_tokens.observe(timing.num_prompt_tokens)
        self._generation_tokens.observe(timing.num_tokens)
        self._max_tokens.observe(timing.max_tokens)
        self._computed_tokens.observe(timing.num_prompt_tokens - timing.num_cached_tokens)
        decode_s = timing.last_token_at_s - timing.first_token_at_s
        self._decode.observe(decode_s)
        self._inference.observe(max(0.0, timing.last_token_at_s - timing.submitted_at_s - (timing.queue_s or 0.0)))
        if timing.num_tokens > 1:
            self._tpot.observe(decode_s / (timing.num_tokens - 1))

    def _snapshot(self) -> Snapshot:
        with self._lock:
            stats, last_step_at_s, num_cached_tokens = self._stats, self._last_step_at_s, self._num_cached_tokens
            histograms = {name: histogram.copy() for name, histogram in self._histograms.items()}
        series: dict[str, Series] = {name: read(stats) for name, read in _FROM_STATS.items()}
        series.update({name: {(): histogram} for name, histogram in histograms.items()})
        series["vllm:prompt_tokens_cached_total"] = _one(num_cached_tokens)
        series["trieserve:engine_heartbeat_age_seconds"] = _one(self._heartbeat_age_s())
        if stats.num_blocks_total:
            series["vllm:cache_config_info"] = {(self._block_size, str(stats.num_blocks_total)): 1}
        if last_step_at_s is not None:
            series["trieserve:last_step_age_seconds"] = _one(max(0.0, self._clock() - last_step_at_s))
        return series
