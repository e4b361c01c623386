"""An ingress's metrics and the public exposition that is merged from everybody's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ManualClock

from cluster.metrics import METRICS, IngressMetrics, Outcome, merge, outcome_of
from replicas.contract import Delta, EngineStats, FinishReason, StepOutput
from replicas.errors import (
    ContextLengthError,
    DeadlineError,
    EngineError,
    NoReplicaError,
    OverloadedError,
    ReplicaLostError,
    RequestError,
)
from replicas.metrics import ReplicaMetrics

CHAT = "/v1/chat/completions"


def samples(text: bytes, name: str) -> dict[tuple[str, ...], float]:
    """Label values, in the order of the label names and without the ingress's, -> value."""
    return {
        tuple(value for key, value in sorted(sample.labels.items()) if key != "ingress"): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
    }


def value(text: bytes, name: str) -> float:
    return samples(text, name)[()]


@pytest.fixture
def timer() -> ManualClock:
    clock = ManualClock()
    clock.now = 5.0
    return clock


@pytest.fixture
def metrics(timer: ManualClock) -> IngressMetrics:
    return IngressMetrics("i0", model_names=["tiny"], clock=timer)


def test_names_types_and_labels_of_the_ingress_are_fixed() -> None:
    """cases MT02: a change of this list breaks somebody's dashboard; make it on purpose."""
    assert {m.name: (m.kind.value, m.labels) for m in METRICS} == {
        "trieserve:http_requests_total": ("counter", ("route", "method", "status")),
        "trieserve:requests_received_total": ("counter", ("route",)),
        "trieserve:requests_total": ("counter", ("route", "model_name", "outcome")),
        "trieserve:requests_in_flight": ("gauge", ("route",)),
        "trieserve:request_ttft_seconds": ("histogram", ("route", "model_name")),
        "trieserve:request_e2e_seconds": ("histogram", ("route", "model_name")),
        "trieserve:stream_events_total": ("counter", ()),
        "trieserve:router_decisions_total": ("counter", ("reason",)),
        "trieserve:router_fallback_total": ("counter", ("cause",)),
        "trieserve:router_decide_seconds": ("histogram", ()),
        "trieserve:router_prompt_tokens_total": ("counter", ()),
        "trieserve:router_matched_tokens_total": ("counter", ()),
        "trieserve:router_predicted_match_total": ("counter", ()),
        "trieserve:router_predicted_match_errors_total": ("counter", ()),
        "trieserve:trie_blocks": ("gauge", ()),
        "trieserve:trie_bytes": ("gauge", ()),
        "trieserve:unknown_fields_total": ("counter", ("field",)),
        "trieserve:retries_total": ("counter", ()),
        "trieserve:replica_lost_total": ("counter", ()),
        "trieserve:event_loop_lag_seconds": ("histogram", ()),
    }


def test_every_series_says_which_ingress_it_is_from(metrics: IngressMetrics) -> None:
    metrics.on_http(CHAT, "POST", 200)
    for family in text_string_to_metric_families(metrics.render().decode()):
        assert all(sample.labels["ingress"] == "i0" for sample in family.samples)


def test_a_request_is_timed_by_the_ingress_clock(metrics: IngressMetrics, timer: ManualClock) -> None:
    with metrics.track(CHAT) as request:
        request.model = "tiny"
        timer.now += 0.5
        request.on_first_token()
        timer.now += 1.0
        request.on_first_token()
    text = metrics.render()
    assert samples(text, "trieserve:request_ttft_seconds_sum") == {("tiny", CHAT): 0.5}
    assert samples(text, "trieserve:request_e2e_seconds_sum") == {("tiny", CHAT): 1.5}
    assert samples(text, "trieserve:requests_total") == {("tiny", "ok", CHAT): 1}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (RequestError("x"), Outcome.CLIENT_ERROR),
        (ContextLengthError("x"), Outcome.CLIENT_ERROR),
        (OverloadedError("x"), Outcome.SHED),
        (NoReplicaError("x"), Outcome.SHED),
        (DeadlineError("x"), Outcome.SHED),
        (ReplicaLostError("x"), Outcome.ERROR),
        (EngineError("x"), Outcome.ERROR),
        (ValueError("x"), Outcome.ERROR),
        (asyncio.CancelledError(), Outcome.CANCELLED),
        (GeneratorExit(), Outcome.CANCELLED),
    ],
)
def test_an_exception_decides_the_outcome(metrics: IngressMetrics, error: BaseException, outcome: Outcome) -> None:
    def serve() -> None:
        with metrics.track(CHAT) as request:
            request.outcome = Outcome.OK  # what was set before doesn't count
            raise error

    assert outcome_of(error) is outcome
    with pytest.raises(type(error)):
        serve()
    assert samples(metrics.render(), "trieserve:requests_total") == {("unknown", outcome.value, CHAT): 1}


def test_a_client_that_leaves_a_stream_leaves_no_request_in_flight(metrics: IngressMetrics) -> None:
    def stream() -> Iterator[int]:
        with metrics.track(CHAT) as request:
            request.on_first_token()
            yield from range(10)

    events = stream()
    next(events)
    assert samples(metrics.render(), "trieserve:requests_in_flight") == {(CHAT,): 1}
    events.close()
    text = metrics.render()
    assert samples(text, "trieserve:requests_in_flight") == {(CHAT,): 0}
    assert samples(text, "trieserve:requests_total") == {("unknown", "cancelled", CHAT): 1}
    assert samples(text, "trieserve:request_e2e_seconds_count") == {}


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([None, *Outcome]), st.integers(0, 9)), max_size=30))
def test_requests_add_up_whatever_becomes_of_them(script: list[tuple[str, Outcome | None, int]]) -> None:
    metrics = IngressMetrics("i0", clock=lambda: 0.0)
    in_flight = []
    for route, outcome, which in script:
        if outcome is None or not in_flight:
            in_flight.append(metrics.track(route).__enter__())
        else:
            request = in_flight.pop(which % len(in_flight))
            request.outcome = outcome
            request.__exit__(None, None, None)
        text = metrics.render()
        ended = samples(text, "trieserve:requests_total")
        open_now = samples(text, "trieserve:requests_in_flight")
        for (name,), num_received in samples(text, "trieserve:requests_received_total").items():
            assert num_received == sum(n for labels, n in ended.items() if labels[-1] == name) + open_now[(name,)]
        assert sum(open_now.values()) == len(in_flight)
        assert min(open_now.values()) >= 0


def test_junk_model_names_add_one_series(metrics: IngressMetrics) -> None:
    """cases NS10."""
    for i in range(2000):
        with metrics.track(CHAT) as request:
            request.model = f"junk-{i}"
            request.outcome = Outcome.CLIENT_ERROR
    assert samples(metrics.render(), "trieserve:requests_total") == {("unknown", "client_error", CHAT): 2000}


def test_junk_methods_paths_and_fields_add_few_series(metrics: IngressMetrics) -> None:
    """cases NS10, for the other words that a client chooses."""
    for i in range(2000):
        metrics.on_http(f"/{i}", f"M{i}", 404)
        metrics.on_unknown_field(f"field_{i}")
    metrics.on_unknown_field("x" * 1000)
    metrics.on_unknown_field('a"}\n')
    text = metrics.render()
    assert len(samples(text, "trieserve:http_requests_total")) == 201
    fields = samples(text, "trieserve:unknown_fields_total")
    assert len(fields) == 101
    assert fields[("other",)] == 1902


def test_router_figures_tell_how_good_predictions_are(metrics: IngressMetrics) -> None:
    metrics.on_decision("prefix", num_prompt_tokens=100, num_matched_tokens=64, decide_s=0.0001)
    metrics.on_decision("soonest", num_prompt_tokens=50, num_matched_tokens=0, decide_s=0.0002)
    metrics.on_cached_tokens(num_predicted=64, num_cached=64)
    metrics.on_cached_tokens(num_predicted=0, num_cached=16)
    metrics.on_fallback("policy_failed")
    text = metrics.render()
    assert samples(text, "trieserve:router_decisions_total") == {("prefix",): 1, ("soonest",): 1}
    assert value(text, "trieserve:router_prompt_tokens_total") == 150
    assert value(text, "trieserve:router_matched_tokens_total") == 64
    assert value(text, "trieserve:router_predicted_match_total") == 2
    assert value(text, "trieserve:router_predicted_match_errors_total") == 1
    assert value(text, "trieserve:router_decide_seconds_count") == 2
    assert samples(text, "trieserve:router_fallback_total") == {("policy_failed",): 1}


def test_plain_counters_start_at_zero_and_unmeasured_gauges_are_absent(metrics: IngressMetrics) -> None:
    assert value(metrics.render(), "trieserve:retries_total") == 0
    assert samples(metrics.render(), "trieserve:trie_bytes") == {}
    metrics.on_retry()
    metrics.on_replica_lost()
    metrics.on_stream_events(3)
    metrics.on_loop_lag(0.004)
    metrics.on_trie_size(num_blocks=2, num_bytes=300)
    text = metrics.render()
    assert value(text, "trieserve:retries_total") == 1
    assert value(text, "trieserve:replica_lost_total") == 1
    assert value(text, "trieserve:stream_events_total") == 3
    assert value(text, "trieserve:event_loop_lag_seconds_count") == 1
    assert value(text, "trieserve:trie_bytes") == 300


def replica_text(engine: str) -> bytes:
    replica = ReplicaMetrics('a "quoted} {model\\', engine, lambda: 0.0, heartbeat_age_s=lambda: 0.0)
    replica.on_submit("a", 0.0, num_prompt_tokens=4, max_tokens=8)
    finished = {"stop": 1}
    stats = EngineStats(started_total=1, finished_total=finished, num_blocks_total=4, num_blocks_free=4)
    replica.observe(StepOutput((Delta("a", (1, 2), FinishReason.STOP),), None, stats), 0.3)
    return replica.render()


def test_a_merged_exposition_holds_every_series_under_one_header_each(metrics: IngressMetrics) -> None:
    metrics.on_http(CHAT, "POST", 200)
    texts = {"replica:1": replica_text("r1"), "replica:0": replica_text("r0"), "ingress:0": metrics.render()}
    text = merge(texts)
    lines = text.decode().split("\n")
    headers = [line for line in lines if line.startswith("# TYPE ")]
    assert len(headers) == len(set(headers))
    assert headers == sorted(headers)
    assert {line for source in texts.values() for line in source.decode().split("\n")} <= set(lines)

    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    ttft = families["vllm:time_to_first_token_seconds"]
    assert ttft.type == "histogram"
    counts = {sample.labels["engine"]: sample.value for sample in ttft.samples if sample.name.endswith("_count")}
    assert counts == {"r0": 1, "r1": 1}
    bounds = [float(s.labels["le"]) for s in ttft.samples if s.name.endswith("_bucket") and s.labels["engine"] == "r0"]
    assert bounds == sorted(bounds)
    assert samples(text, "trieserve:scrape_up") == {("ingress:0",): 1, ("replica:0",): 1, ("replica:1",): 1}


def test_every_ingress_merges_to_the_same_text() -> None:
    texts = {f"replica:{i}": replica_text(f"r{i}") for i in range(3)}
    assert merge(texts) == merge(dict(reversed(texts.items())))


@pytest.mark.parametrize(
    "broken",
    [
        None,
        b"<html>502 Bad Gateway</html>",
        b"vllm:x 1\nvllm:num_requests_running{engine=} 3\n",
        b"vllm:x one\n",
        b"vllm:x 1_0\n",
        b'vllm:x{a="b} 1\n',
        b"# TYPE vllm:x bogus\n",
        b"\xff\xfe 1\n",
    ],
)
def test_a_source_without_an_answer_is_unknown_rather_than_zero(broken: bytes | None) -> None:
    text = merge({"replica:0": replica_text("r0"), "replica:1": broken})
    assert samples(text, "trieserve:scrape_up") == {("replica:0",): 1, ("replica:1",): 0}
    assert len(samples(text, "vllm:num_requests_running")) == 1
    assert "vllm:x" not in text.decode()


def test_nothing_to_merge_is_an_exposition_still() -> None:
    assert samples(merge({}), "trieserve:scrape_up") == {}
    assert samples(merge({"a": b""}), "trieserve:scrape_up") == {("a",): 1}


def test_a_series_that_two_sources_claim_is_kept_once_and_reported() -> None:
    text = merge({"a": b"x_total 1\n", "b": b"x_total 2\ny_total 3\ny_total 4\n"})
    assert samples(text, "x_total") == {(): 1}
    assert samples(text, "y_total") == {(): 3}
    assert samples(text, "trieserve:scrape_duplicate_series") == {("a",): 0, ("b",): 2}


def test_what_the_text_format_permits_is_merged() -> None:
    source = b'# a comment\n# TYPE s summary\ns{quantile="0.5",} 1e-3 1700000000000\ns_sum NaN\ns_count +Inf\nlone -2\n'
    lines = merge({"a": source}).decode().split("\n")
    start = lines.index("# TYPE s summary")
    assert lines[start + 1 : start + 4] == ['s{quantile="0.5",} 1e-3 1700000000000', "s_sum NaN", "s_count +Inf"]
    assert "lone -2" in lines
