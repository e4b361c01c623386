"""A replica's metrics: names that others rely on, sums that add up, durations that mean what they say."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ManualClock

from cluster import metrics as cluster_metrics
from replicas.contract import Delta, EngineStats, FinishReason, KVEvents, StepOutput, StepTimeCoefficients
from replicas.exposition import Kind, Metric, MetricStore
from replicas.metrics import METRICS, ReplicaMetrics
from replicas.metrics_http import serve_metrics

SHARED = {"model_name": "tiny", "engine": "r0"}


def values(metrics: ReplicaMetrics) -> dict[str, float]:
    """Series -> value, where a series is written name{label=value,...} without the labels that all share."""
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in SHARED}
            assert sample.labels.items() >= SHARED.items()
            inner = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            found[sample.name + (f"{{{inner}}}" if inner else "")] = sample.value
    return found


@pytest.fixture
def timer() -> ManualClock:
    return ManualClock()


@pytest.fixture
def metrics(timer: ManualClock) -> ReplicaMetrics:
    return ReplicaMetrics("tiny", "r0", timer, heartbeat_age_s=lambda: 0.25)


def step(*deltas: Delta, **stats: object) -> StepOutput:
    return StepOutput(deltas, None, replace(EngineStats(), **stats))


def test_names_types_and_labels_are_those_that_dashboards_and_scrapers_read(metrics: ReplicaMetrics) -> None:
    """cases MT02: a change of this list breaks somebody's dashboard; make it on purpose."""
    golden = {
        "vllm:num_requests_running": ("gauge", ()),
        "vllm:num_requests_waiting": ("gauge", ()),
        "vllm:kv_cache_usage_perc": ("gauge", ()),
        "vllm:cache_config_info": ("gauge", ("block_size", "num_gpu_blocks")),
        "vllm:prefix_cache_queries_total": ("counter", ()),
        "vllm:prefix_cache_hits_total": ("counter", ()),
        "vllm:prompt_tokens_total": ("counter", ()),
        "vllm:generation_tokens_total": ("counter", ()),
        "vllm:prompt_tokens_cached_total": ("counter", ()),
        "vllm:num_preemptions_total": ("counter", ()),
        "vllm:spec_decode_num_drafts_total": ("counter", ()),
        "vllm:spec_decode_num_draft_tokens_total": ("counter", ()),
        "vllm:spec_decode_num_accepted_tokens_total": ("counter", ()),
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": ("counter", ("position",)),
        "vllm:request_success_total": ("counter", ("finished_reason",)),
        "vllm:time_to_first_token_seconds": ("histogram", ()),
        "vllm:inter_token_latency_seconds": ("histogram", ()),
        "vllm:request_time_per_output_token_seconds": ("histogram", ()),
        "vllm:e2e_request_latency_seconds": ("histogram", ()),
        "vllm:request_queue_time_seconds": ("histogram", ()),
        "vllm:request_inference_time_seconds": ("histogram", ()),
        "vllm:request_prefill_time_seconds": ("histogram", ()),
        "vllm:request_decode_time_seconds": ("histogram", ()),
        "vllm:request_prompt_tokens": ("histogram", ()),
        "vllm:request_generation_tokens": ("histogram", ()),
        "vllm:request_params_max_tokens": ("histogram", ()),
        "vllm:request_prefill_kv_computed_tokens": ("histogram", ()),
        "trieserve:requests_started_total": ("counter", ()),
        "trieserve:requests_finished_total": ("counter", ("reason",)),
        "trieserve:pending_tokens": ("gauge", ()),
        "trieserve:kv_blocks": ("gauge", ("state",)),
        "trieserve:engine_steps_total": ("counter", ()),
        "trieserve:step_time_relative_error": ("gauge", ()),
        "trieserve:last_step_age_seconds": ("gauge", ()),
        "trieserve:engine_heartbeat_age_seconds": ("gauge", ()),
    }
    assert {m.name: (m.kind.value, m.labels) for m in METRICS} == golden
    model = StepTimeCoefficients(0.001, 0.0, 0.0, 0.0, relative_error=0.1)
    drafts = {"drafts_total": 1, "accepted_per_position_total": (0,)}
    metrics.observe(step(num_blocks_total=4, num_blocks_free=4, step_time=model, steps_total=1, **drafts), 100.0)
    exposed = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert family.samples, name
        exposed[name] = (family.type, set().union(*(sample.labels for sample in family.samples)) - {"le"})
    assert exposed == {name: (kind, {*SHARED, *labels}) for name, (kind, labels) in golden.items()}


def test_no_metric_name_means_two_things_in_replica_and_ingress() -> None:
    tables = (METRICS, cluster_metrics.METRICS, cluster_metrics.MERGE_METRICS)
    names = [metric.name for table in tables for metric in table]
    assert len(names) == len(set(names))
    assert all(metric.help.endswith(".") for table in tables for metric in table)


def test_what_no_step_has_told_is_absent_rather_than_zero(metrics: ReplicaMetrics) -> None:
    found = values(metrics)
    assert found["trieserve:requests_started_total"] == 0
    for name in ("vllm:kv_cache_usage_perc", "trieserve:last_step_age_seconds", "trieserve:step_time_relative_error"):
        assert name not in found
    assert not any(series.startswith(("vllm:cache_config_info", "vllm:spec_decode")) for series in found)


def test_gauges_and_counters_are_the_engines_own(metrics: ReplicaMetrics, timer: ManualClock) -> None:
    stats = {"num_blocks_total": 8, "num_blocks_used": 2, "prefix_hits_total": 32, "steps_total": 1}
    metrics.observe(step(num_running=2, num_waiting=1, **stats), 100.0)
    timer.now = 103.0
    found = values(metrics)
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:prefix_cache_hits_total"] == 32
    assert found["vllm:cache_config_info{block_size=16,num_gpu_blocks=8}"] == 1
    assert found["trieserve:last_step_age_seconds"] == 3
    assert found["trieserve:engine_heartbeat_age_seconds"] == 0.25


def test_cache_events_alone_are_no_step(metrics: ReplicaMetrics, timer: ManualClock) -> None:
    metrics.observe(step(steps_total=1), 100.0)
    metrics.observe(StepOutput((), KVEvents(1, cleared=True), EngineStats(steps_total=1)), 102.0)
    timer.now = 103.0
    assert values(metrics)["trieserve:last_step_age_seconds"] == 3


def test_an_engine_that_speculates_shows_its_drafts_under_vllms_names(metrics: ReplicaMetrics) -> None:
    drafts = {"drafts_total": 3, "draft_tokens_total": 6, "accepted_tokens_total": 4}
    metrics.observe(step(**drafts, accepted_per_position_total=(3, 1)), 100.0)
    found = {series: value for series, value in values(metrics).items() if series.startswith("vllm:spec_decode")}
    assert found == {
        "vllm:spec_decode_num_drafts_total": 3,
        "vllm:spec_decode_num_draft_tokens_total": 6,
        "vllm:spec_decode_num_accepted_tokens_total": 4,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=0}": 3,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=1}": 1,
    }


def test_an_engine_that_speculates_and_has_not_yet_shows_zeros(metrics: ReplicaMetrics) -> None:
    metrics.observe(step(accepted_per_position_total=(0, 0)), 100.0)
    found = {series: value for series, value in values(metrics).items() if series.startswith("vllm:spec_decode")}
    assert len(found) == 5
    assert set(found.values()) == {0}


def test_durations_of_one_request_add_up(metrics: ReplicaMetrics) -> None:
    metrics.on_submit("a", 10.0, num_prompt_tokens=7, max_tokens=8)
    metrics.observe(step(Delta("a", (1,), queue_s=0.5, num_cached_tokens=5)), 12.0)
    metrics.observe(step(Delta("a", (2, 3))), 12.5)
    metrics.observe(step(Delta("a", (4,), finish_reason=FinishReason.STOP)), 13.5)
    found = values(metrics)
    assert found["vllm:time_to_first_token_seconds_sum"] == 2.0
    assert found["vllm:request_queue_time_seconds_sum"] == 0.5
    assert found["vllm:request_prefill_time_seconds_sum"] == 1.5
    assert found["vllm:request_inference_time_seconds_sum"] == 3.0
    assert found["vllm:request_decode_time_seconds_sum"] == 1.5
    assert found["vllm:e2e_request_latency_seconds_sum"] == 3.5
    assert found["vllm:request_time_per_output_token_seconds_sum"] == 0.5
    assert found["vllm:request_prompt_tokens_sum"] == 7
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 2
    assert found["vllm:prompt_tokens_cached_total"] == 5
    assert found["vllm:request_generation_tokens_sum"] == 4
    assert found["vllm:request_params_max_tokens_sum"] == 8
    assert metrics.num_tracked == 0


def test_tokens_of_one_delta_share_the_gap_before_it(metrics: ReplicaMetrics) -> None:
    metrics.on_submit("a", 0.0, num_prompt_tokens=1, max_tokens=8)
    metrics.observe(step(Delta("a", (1, 2))), 1.0)  # the second came with the first: no gap
    metrics.observe(step(Delta("a", (3, 4, 5, 6))), 1.4)  # 0.1 s each
    found = values(metrics)
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:inter_token_latency_seconds_count"] == 5
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.4)
    assert found["vllm:inter_token_latency_seconds_bucket{le=0.005}"] == 1
    assert found["vllm:inter_token_latency_seconds_bucket{le=0.15}"] == 5


def test_a_value_equal_to_a_limit_is_within_it(metrics: ReplicaMetrics) -> None:
    metrics.on_submit("a", 0.0, num_prompt_tokens=1, max_tokens=8)
    metrics.observe(step(Delta("a", (1,))), 0.45)
    found = values(metrics)
    assert found["vllm:time_to_first_token_seconds_bucket{le=0.35}"] == 0
    assert found["vllm:time_to_first_token_seconds_bucket{le=0.45}"] == 1


def test_a_refused_request_leaves_nothing_behind(metrics: ReplicaMetrics) -> None:
    metrics.on_submit("a", 0.0, num_prompt_tokens=1, max_tokens=8)
    metrics.on_refused("a")
    metrics.observe(step(Delta("a", (1,))), 1.0)
    assert metrics.num_tracked == 0
    assert values(metrics)["vllm:time_to_first_token_seconds_count"] == 0


@dataclass
class EngineModel:
    """As much of an engine as metrics can see: requests wait, run, gain tokens and end."""

    waiting: list[str] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)  # tokens so far
    num_started: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    num_tokens: list[int] = field(default_factory=list)  # of every request that ended

    def submit(self) -> str:
        request_id = f"r{self.num_started}"
        self.num_started += 1
        self.waiting.append(request_id)
        return request_id

    def step(self, action: int, num_new: int, reason: FinishReason | None) -> StepOutput:
        deltas = []
        ids = [*self.waiting, *self.running]
        if ids:
            request_id = ids[action % len(ids)]
            first = request_id in self.waiting
            if first:
                self.waiting.remove(request_id)
            self.running[request_id] = self.running.get(request_id, 0) + num_new
            queue_s = 0.125 if first else None
            deltas.append(Delta(request_id, tuple(range(num_new)), reason, queue_s=queue_s))
            if reason is not None:
                self.finished[reason.value] += 1
                self.num_tokens.append(self.running.pop(request_id))
        return StepOutput(tuple(deltas), None, self.stats())

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            started_total=self.num_started,
            finished_total=dict(self.finished),
        )


actions = st.one_of(
    st.none(),
    st.tuples(st.integers(0, 50), st.integers(0, 4), st.sampled_from([None, None, *FinishReason]), st.integers(0, 1000)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(actions, max_size=40))
def test_metrics_add_up_whatever_an_engine_does(script: list[tuple[int, int, FinishReason | None, int] | None]) -> None:
    """cases MT01, MT04: at any scrape; and durations count what their help says."""
    now = 0.0
    engine, metrics = EngineModel(), ReplicaMetrics("tiny", "r0", lambda: now, heartbeat_age_s=lambda: 0.0)
    for action in script:
        if action is None:
            metrics.on_submit(engine.submit(), now, num_prompt_tokens=3, max_tokens=8)
            metrics.observe(StepOutput((), None, engine.stats()), now)
        else:
            now += action[3] / 1000
            metrics.observe(engine.step(*action[:3]), now)
        found = values(metrics)
        finished = {r.value: found[f"trieserve:requests_finished_total{{reason={r.value}}}"] for r in FinishReason}
        in_flight = found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]
        assert found["trieserve:requests_started_total"] == sum(finished.values()) + in_flight
        assert metrics.num_tracked == in_flight
        counts = [*engine.num_tokens, *engine.running.values()]
        assert found["vllm:time_to_first_token_seconds_count"] == sum(n > 0 for n in counts)
        assert found["vllm:request_prefill_time_seconds_count"] == sum(n > 0 for n in counts)
        assert found["vllm:inter_token_latency_seconds_count"] == sum(max(0, n - 1) for n in counts)
        assert found["vllm:e2e_request_latency_seconds_count"] == finished["stop"] + finished["length"]
        assert min(found.values()) >= 0


def test_buckets_are_cumulative_and_end_with_the_count(metrics: ReplicaMetrics) -> None:
    metrics.on_submit("a", 0.0, num_prompt_tokens=1_000_000, max_tokens=8)
    metrics.observe(step(Delta("a", (1,), FinishReason.STOP)), 1e6)  # beyond the last bucket
    for family in text_string_to_metric_families(metrics.render().decode()):
        if family.type == "histogram":
            buckets = [s.value for s in family.samples if s.name.endswith("_bucket")]
            (count,) = [s.value for s in family.samples if s.name.endswith("_count")]
            assert buckets == sorted(buckets)
            assert buckets[-1] == count


def test_a_store_counts_label_sets_beyond_its_limit_as_other() -> None:
    store = MetricStore([Metric("x_total", Kind.COUNTER, "X.", ("a", "b"), max_series=2)])
    for i in range(5):
        store.add("x_total", str(i), "b")
    assert store.snapshot()["x_total"] == {("0", "b"): 1, ("1", "b"): 1, ("other", "other"): 3}


def test_the_metrics_port_answers_metrics_and_nothing_else(metrics: ReplicaMetrics) -> None:
    port, close = serve_metrics(metrics.registry, "127.0.0.1")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert answer.read() == metrics.render()
        for path in ("/", "/metrics/", "/favicon.ico"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5)
    finally:
        close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
