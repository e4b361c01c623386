"""What an ingress measures, and the public /metrics: one exposition made of those of all replicas and ingresses.

Requests add up at any scrape of one ingress, for each route:

    requests_received = requests{ok} + {client_error} + {shed} + {error} + {cancelled} + requests_in_flight

Label values that a client can choose are bounded: model names are the served ones or `unknown` (cases NS10), methods the
usual ones or `other`, and no metric gets more series than its row in METRICS allows.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

from prometheus_client import generate_latest

from replicas.errors import OverloadedError, RequestError
from replicas.exposition import E2E_BUCKETS_S, TTFT_BUCKETS_S, Kind, Metric, MetricStore, make_registry

SHARED_LABELS = ("ingress",)

_LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_DECIDE_BUCKETS_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")

_COUNTER, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

METRICS: tuple[Metric, ...] = (
    Metric("trieserve:http_requests_total", _COUNTER, "HTTP answers.", ("route", "method", "status")),
    Metric("trieserve:requests_received_total", _COUNTER, "Requests that reached a route.", ("route",)),
    Metric("trieserve:requests_total", _COUNTER, "Requests ended, by what became of them.", ("route", "model_name", "outcome")),
    Metric("trieserve:requests_in_flight", _GAUGE, "Requests started and not ended.", ("route",)),
    Metric(
        "trieserve:request_ttft_seconds",
        _HISTOGRAM,
        "Arrival to first token of requests that got one, by the ingress's clock.",
        ("route", "model_name"),
        TTFT_BUCKETS_S,
    ),
    Metric(
        "trieserve:request_e2e_seconds",
        _HISTOGRAM,
        "Arrival to end of requests that ended ok, by the ingress's clock.",
        ("route", "model_name"),
        E2E_BUCKETS_S,
    ),
    Metric("trieserve:stream_events_total", _COUNTER, "Server-sent events written."),
    Metric("trieserve:router_decisions_total", _COUNTER, "Routing decisions, by reason.", ("reason",)),
    Metric("trieserve:router_fallback_total", _COUNTER, "Decisions made without the policy, by cause.", ("cause",)),
    Metric("trieserve:router_decide_seconds", _HISTOGRAM, "Time of a routing decision.", buckets=_DECIDE_BUCKETS_S),
    Metric("trieserve:router_prompt_tokens_total", _COUNTER, "Prompt tokens of routed requests."),
    Metric("trieserve:router_matched_tokens_total", _COUNTER, "Of them, predicted to be cached on the chosen replica."),
    Metric("trieserve:router_predicted_match_total", _COUNTER, "Predictions compared with what the engine found cached."),
    Metric("trieserve:router_predicted_match_errors_total", _COUNTER, "Of them, those that were not exactly right."),
    Metric("trieserve:trie_blocks", _GAUGE, "Blocks in the router's trie."),
    Metric("trieserve:trie_bytes", _GAUGE, "Memory of the router's trie."),
    Metric(
        "trieserve:unknown_fields_total", _COUNTER, "Request fields that were ignored, by name.", ("field",), max_series=100
    ),
    Metric("trieserve:retries_total", _COUNTER, "Requests sent to a second replica before their first byte."),
    Metric("trieserve:replica_lost_total", _COUNTER, "Requests whose replica died or could not be reached any more."),
    Metric("trieserve:event_loop_lag_seconds", _HISTOGRAM, "How late the event loop ran a timer.", buckets=_LAG_BUCKETS_S),
)

MERGE_METRICS: tuple[Metric, ...] = (
    Metric("trieserve:scrape_up", _GAUGE, "1 if the source's metrics are included here, 0 if they are unknown.", ("source",)),
    Metric("trieserve:scrape_duplicate_series", _GAUGE, "Series left out because an earlier source has the same.", ("source",)),
)


class Outcome(StrEnum):
    OK = "ok"
    CLIENT_ERROR = "client_error"
    SHED = "shed"
    ERROR = "error"
    CANCELLED = "cancelled"


def outcome_of(error: BaseException) -> Outcome:
    """What an exception that ends a request makes of it. A closed generator means that the client went away."""
    if isinstance(error, RequestError):
        return Outcome.CLIENT_ERROR
    if isinstance(error, OverloadedError):
        return Outcome.SHED
    if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
        return Outcome.CANCELLED
    return Outcome.ERROR


class TrackedRequest:
    """One request from arrival to end; a context manager, so that the in-flight gauge can't leak.

    Set `model` when it is known, and `outcome` where an error is answered rather than raised. An exception that leaves the
    block decides the outcome by its type, whatever was set.
    """

    __slots__ = ("_metrics", "_route", "_started_at_s", "_ttft_s", "model", "outcome")

    def __init__(self, metrics: IngressMetrics, route: str) -> None:
        self._metrics = metrics
        self._route = route
        self._started_at_s = 0.0
        self._ttft_s: float | None = None
        self.model = ""
        self.outcome = Outcome.OK

    def on_first_token(self) -> None:
        """Calls after the first change nothing."""
        if self._ttft_s is None:
            self._ttft_s = self._metrics.clock() - self._started_at_s

    def __enter__(self) -> Self:
        self._started_at_s = self._metrics.clock()
        self._metrics.store.add("trieserve:requests_received_total", self._route)
        self._metrics.store.add("trieserve:requests_in_flight", self._route)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.outcome = outcome_of(error)
        store, model_name = self._metrics.store, self._metrics.model_label(self.model)
        store.add("trieserve:requests_in_flight", self._route, amount=-1)
        store.add("trieserve:requests_total", self._route, model_name, self.outcome.value)
        if self._ttft_s is not None:
            store.observe("trieserve:request_ttft_seconds", self._ttft_s, self._route, model_name)
        if self.outcome is Outcome.OK:
            e2e_s = self._metrics.clock() - self._started_at_s
            store.observe("trieserve:request_e2e_seconds", e2e_s, self._route, model_name)


class IngressMetrics:
    """Counts what one ingress does. All calls, `render` too, belong on its event loop.

    `route` is always the route's template ("/v1/models/{model}"), never a path that a client wrote.
    """

    def __init__(
        self, ingress_label: str, *, model_names: Iterable[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.store = MetricStore(METRICS)
        self._model_names = frozenset(model_names)
        self.registry = make_registry(METRICS, dict(zip(SHARED_LABELS, (ingress_label,), strict=True)), self.store.snapshot)

    def render(self) -> bytes:
        """The exposition in Prometheus' text format 0.0.4."""
        return generate_latest(self.registry)

    def model_label(self, model: str) -> str:
        return model if model in self._model_names else "unknown"

    def track(self, route: str) -> TrackedRequest:
        return TrackedRequest(self, route)

    def on_http(self, route: str, method: str, status: int) -> None:
        self.store.add("trieserve:http_requests_total", route, method if method in _METHODS else "other", str(status))

    def on_stream_events(self, num_events: int = 1) -> None:
        self.store.add("trieserve:stream_events_total", amount=num_events)

    def on_decision(self, reason: str, *, num_prompt_tokens: int, num_matched_tokens: int, decide_s: float) -> None:
        """`num_matched_tokens`: what the router expects the chosen replica to find in its cache."""
        self.store.add("trieserve:router_decisions_total", reason)
        self.store.add("trieserve:router_prompt_tokens_total", amount=num_prompt_tokens)
        self.store.add("trieserve:router_matched_tokens_total", amount=num_matched_tokens)
        self.store.observe("trieserve:router_decide_seconds", decide_s)

    def on_fallback(self, cause: str) -> None:
        self.store.add("trieserve:router_fallback_total", cause)

    def on_cached_tokens(self, *, num_predicted: int, num_cached: int) -> None:
        """The engine's first delta told how many prompt tokens it really found cached."""
        self.store.add("trieserve:router_predicted_match_total")
        if num_predicted != num_cached:
            self.store.add("trieserve:router_predicted_match_errors_total")

    def on_trie_size(self, *, num_blocks: int, num_bytes: int) -> None:
        self.store.set("trieserve:trie_blocks", num_blocks)
        self.store.set("trieserve:trie_bytes", num_bytes)

    def on_unknown_field(self, name: str) -> None:
        """`name` is the client's: what doesn't look like a field's name is counted as `other`, and so are too many."""
        self.store.add("trieserve:unknown_fields_total", name if _PLAIN_NAME.fullmatch(name) else "other")

    def on_retry(self) -> None:
        self.store.add("trieserve:retries_total")

    def on_replica_lost(self) -> None:
        self.store.add("trieserve:replica_lost_total")

    def on_loop_lag(self, lag_s: float) -> None:
        self.store.observe("trieserve:event_loop_lag_seconds", lag_s)


_NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
_HEADER = re.compile(rf"# (?:HELP ({_NAME})(?: .*)?|TYPE ({_NAME}) (?:counter|gauge|histogram|summary|untyped))")
_SAMPLE = re.compile(
    rf"({_NAME})"
    r'(\{(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\]|\\.)*"(?:,|(?=\})))*\})?'  # labels
    r"[ \t]+([-+]?(?:[-+.0-9eE]+|Inf|NaN))(?:[ \t]+-?[0-9]+)?[ \t]*"  # value, and perhaps a time in milliseconds
)
_SUFFIXES = ("_bucket", "_sum", "_count")


@dataclass(slots=True)
class _Family:
    header: dict[str, str] = field(default_factory=dict)  # "HELP" and "TYPE" -> the line
    samples: list[tuple[str, str]] = field(default_factory=list)  # (name and labels, line) in the source's order


def _parse(text: bytes) -> dict[str, _Family]:
    """Families by name. Raises ValueError if anything in it isn't text format 0.0.4."""
    families: dict[str, _Family] = {}
    for line in text.decode().split("\n"):
        if line.startswith(("# HELP ", "# TYPE ")):
            header = _HEADER.fullmatch(line)
            if header is None:
                raise ValueError(f"not a header of text format 0.0.4: {line[:200]!r}")
            families.setdefault(header[1] or header[2], _Family()).header.setdefault(line[2:6], line)
        elif line and not line.startswith("#"):
            sample = _SAMPLE.fullmatch(line)
            if sample is None:
                raise ValueError(f"not a sample of text format 0.0.4: {line[:200]!r}")
            name, labels, value = sample.groups(default="")
            float(value)
            families.setdefault(_family_name(name, families), _Family()).samples.append((name + labels, line))
    return families


def _family_name(sample_name: str, families: Mapping[str, _Family]) -> str:
    """A histogram's or summary's samples carry suffixes; its header, which comes first, has the bare name."""
    if sample_name not in families:
        for suffix in _SUFFIXES:
            stem = sample_name.removesuffix(suffix)
            if stem != sample_name and stem in families:
                return stem
    return sample_name


def merge(texts: Mapping[str, bytes | None]) -> bytes:
    """One exposition of many: `texts` by source name, None for a source that couldn't be fetched.

    The answer depends on `texts` alone, not on its order: families by name, in each the sources by name. A series keeps
    its own labels (`engine`, `ingress`); where two sources write the same one, the first is kept and the others are counted.
    A source that is missing or malformed is `trieserve:scrape_up` 0 and adds nothing: unknown is not 0.
    """
    merged: dict[str, _Family] = {}
    seen: set[str] = set()
    up: dict[tuple[str, ...], float] = {}
    duplicates: dict[tuple[str, ...], float] = {}
    for source, text in sorted(texts.items()):
        try:
            families = _parse(text) if text is not None else None
        except ValueError:
            families = None
        up[(source,)] = 0 if families is None else 1
        duplicates[(source,)] = 0
        for name, family in (families or {}).items():
            target = merged.setdefault(name, _Family())
            target.header = {**family.header, **target.header}
            for series, line in family.samples:
                if series in seen:
                    duplicates[(source,)] += 1
                else:
                    seen.add(series)
                    target.samples.append((series, line))
    own = make_registry(MERGE_METRICS, {}, lambda: dict(zip((m.name for m in MERGE_METRICS), (up, duplicates), strict=True)))
    merged.update(_parse(generate_latest(own)))
    lines: list[str] = []
    for _, family in sorted(merged.items()):
        lines += [line for _, line in sorted(family.header.items())]
        lines += [line for _, line in family.samples]
    return "\n".join([*lines, ""]).encode()
