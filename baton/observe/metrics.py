"""The metrics of a process, and their rendering as Prometheus text."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from baton.metric import Metric, declared_metrics

CONTENT_TYPE = CONTENT_TYPE_LATEST

FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""vLLM's buckets for times until a request's first token."""
_PREFIX = "baton_"
_Key = TypeVar("_Key", bound=str)


@dataclass(frozen=True, slots=True)
class Figure:
    """The value of a counter, if its name ends in _total, or else of a gauge."""

    name: str
    help: str
    value: float
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Distribution:
    """The state of a histogram."""

    name: str
    help: str
    buckets: Sequence[tuple[float, int]]
    """Pairs of an upper bound, of which the last is infinite, and the number of values up to it."""
    total: float
    labels: Mapping[str, str]


class Histogram:
    """Counts values in buckets."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the upper bounds of the buckets, ascending, without the infinite one."""
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self.total = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The upper bounds of the buckets, the infinite one last."""
        return self._bounds

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of values in each bucket."""
        return tuple(self._counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self.total += value * count

    def now(self, name: str, text: str, labels: Mapping[str, str] | None = None) -> Distribution:
        """The histogram's state, for the metrics page."""
        buckets = list(zip(self._bounds, itertools.accumulate(self._counts), strict=True))
        return Distribution(name, text, buckets, self.total, labels or {})


def by_label(name: str, text: str, label: str, values: Mapping[_Key, float]) -> list[Figure]:
    """The figures of one metric that has a label: one for each of the label's values."""
    return [Figure(name, text, value, {label: key}) for key, value in values.items()]


def declared_figures(counters: object, labels: Mapping[str, str] | None = None) -> Iterator[Figure | Distribution]:
    """The figures of all fields of a dataclass that declare a metric (`baton.metric`), in the order of the fields.

    A field that declares none and holds another dataclass has that one's figures. `labels` are added to every figure.
    """
    kind: type = type(counters)
    for name, metric in declared_metrics(kind).items():
        value = getattr(counters, name)
        if metric is not None:
            yield from _figures_of(metric, value, {**(labels or {}), **metric.labels})
        elif is_dataclass(value):
            yield from declared_figures(value, labels)


def _figures_of(
    metric: Metric, value: float | Histogram | Mapping[object, float], labels: Mapping[str, str]
) -> Iterator[Figure | Distribution]:
    if isinstance(value, Histogram):
        yield value.now(metric.name, metric.help, labels)
    elif isinstance(value, Mapping):
        for key, number in {**dict.fromkeys(metric.keys, 0.0), **value}.items():
            yield Figure(metric.name, metric.help, number, {**labels, metric.label: metric.label_value(key)})
    else:
        yield Figure(metric.name, metric.help, value, labels)


def render(figures: Iterable[Figure | Distribution], labels: Mapping[str, str]) -> bytes:
    """Render the metrics page. `labels` are added to every figure."""
    return generate_latest(_Page(figures, labels))


class _Page(Collector):
    """A collector, from which `generate_latest` reads the figures."""

    def __init__(self, figures: Iterable[Figure | Distribution], labels: Mapping[str, str]) -> None:
        self._figures = figures
        self._labels = labels

    def collect(self) -> Iterable[MetricFamily]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        histograms: dict[str, HistogramMetricFamily] = {}
        for figure in self._figures:
            labels = {**self._labels, **figure.labels}
            name, values = _PREFIX + figure.name, list(labels.values())
            if isinstance(figure, Distribution):
                histogram = HistogramMetricFamily(name, figure.help, labels=list(labels))
                histograms.setdefault(name, histogram).add_metric(values, _named(figure.buckets), figure.total)
                continue
            kind = CounterMetricFamily if figure.name.endswith("_total") else GaugeMetricFamily
            family = families.setdefault(name, kind(name, figure.help, labels=list(labels)))
            family.add_metric(values, figure.value)
        yield from (*histograms.values(), *families.values())


def _named(buckets: Sequence[tuple[float, int]]) -> list[tuple[str, int]]:
    return [("+Inf" if bound == math.inf else str(bound), count) for bound, count in buckets]
