"""Metric tables, bucket counts and their Prometheus form: what replicas and ingresses have in common.

A table of `Metric` says once what exists (name, type, help, labels, buckets); docs, golden tests and the exposition read
it. Our own counters stand in for prometheus_client's metric objects because a scrape has to be one moment (its Counters
are locked one by one, so sums over several don't add up), because it can't count k equal observations at once, and
because its `_created` series can only be switched off for the whole process. Formatting and escaping are prometheus_client's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.utils import floatToGoString

# A bucket ends exactly at each limit in common use (MLPerf Inference: 0.45, 0.5, 2 and 6 s to the first token; 15, 20, 30,
# 40, 80, 100 and 200 ms per token): the share of requests within a limit can't be computed from any other bucket.
TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.35, 0.45, 0.5, 0.75, 1, 1.5, 2, 3, 4.5, 6, 10, 20, 40, 80, 160)
ITL_BUCKETS_S = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 40)
E2E_BUCKETS_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of a metric table. `labels` come in addition to those that all series of an exposition share.

    `max_series` bounds a metric in a `MetricStore`: label sets beyond it are counted as one whose labels are all `other`.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    max_series: int = 200

    def __post_init__(self) -> None:
        assert (self.kind is Kind.COUNTER) == self.name.endswith("_total"), self.name
        assert (self.kind is Kind.HISTOGRAM) == bool(self.buckets), self.name
        assert list(self.buckets) == sorted(set(self.buckets)), self.name


class Distribution:
    """How many values fell at or below each bound and above the one before; the last count is what exceeds all bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value` `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def copy(self) -> Distribution:
        twin = Distribution(self.bounds)
        twin.counts = self.counts.copy()
        twin.sum = self.sum
        return twin


Labels = tuple[str, ...]  # values, in the order of Metric.labels
Series = Mapping[Labels, float | Distribution]
Snapshot = Mapping[str, Series]  # by Metric.name; a metric whose value isn't known has no series


def to_family(metric: Metric, series: Series, shared: Mapping[str, str]) -> Family:
    """`metric` in prometheus_client's terms; each series carries the `shared` labels and its own."""
    names = (*shared, *metric.labels)
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=names)
        upper_bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        for labels, value in series.items():
            assert isinstance(value, Distribution), metric.name
            cumulative = list(zip(upper_bounds, accumulate(value.counts), strict=True))
            histogram.add_metric((*shared.values(), *labels), cumulative, sum_value=value.sum)
        return histogram
    of_kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = of_kind(metric.name, metric.help, labels=names)
    for labels, value in series.items():
        assert not isinstance(value, Distribution), metric.name
        family.add_metric((*shared.values(), *labels), value)
    return family


class TableCollector:
    """A prometheus_client collector that shows `table` as `snapshot()` has it at the time of the scrape."""

    def __init__(self, table: Sequence[Metric], shared: Mapping[str, str], snapshot: Callable[[], Snapshot]) -> None:
        self._table = table
        self._shared = shared
        self._snapshot = snapshot

    def collect(self) -> Iterable[Family]:
        snapshot = self._snapshot()
        return [to_family(metric, snapshot.get(metric.name, {}), self._shared) for metric in self._table]


def make_registry(table: Sequence[Metric], shared: Mapping[str, str], snapshot: Callable[[], Snapshot]) -> CollectorRegistry:
    """A registry of its own, so that nothing that other libraries count in this process gets mixed in."""
    registry = CollectorRegistry()
    registry.register(TableCollector(table, shared, snapshot))
    return registry


class MetricStore:
    """Values of a table's metrics, changed from one thread (the event loop's).

    Metrics without labels start at 0, gauges excepted: what was never measured is absent, not 0.
    """

    def __init__(self, table: Sequence[Metric]) -> None:
        self._metrics = {metric.name: metric for metric in table}
        self._numbers: dict[str, dict[Labels, float]] = {m.name: {} for m in table if m.kind is not Kind.HISTOGRAM}
        self._distributions: dict[str, dict[Labels, Distribution]] = {m.name: {} for m in table if m.kind is Kind.HISTOGRAM}
        for metric in table:
            if metric.kind is Kind.COUNTER and not metric.labels:
                self._numbers[metric.name][()] = 0
            elif metric.kind is Kind.HISTOGRAM and not metric.labels:
                self._distributions[metric.name][()] = Distribution(metric.buckets)

    def add(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add to a counter, or to a gauge (which then starts at 0)."""
        series = self._numbers[name]
        if labels not in series:
            labels = self._admit(name, labels, series)
            series.setdefault(labels, 0)
        series[labels] += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        series = self._numbers[name]
        if labels not in series:
            labels = self._admit(name, labels, series)
        series[labels] = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        series = self._distributions[name]
        distribution = series.get(labels)
        if distribution is None:
            labels = self._admit(name, labels, series)
            distribution = series.setdefault(labels, Distribution(self._metrics[name].buckets))
        distribution.observe(value)

    def snapshot(self) -> Snapshot:
        """The live values, not a copy: read them before anything else runs on this thread."""
        return {**self._numbers, **self._distributions}

    def _admit(self, name: str, labels: Labels, series: Series) -> Labels:
        metric = self._metrics[name]
        assert len(labels) == len(metric.labels), (name, labels)
        return labels if len(series) < metric.max_series else ("other",) * len(labels)
