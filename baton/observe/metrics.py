"""Figures of a process as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

_PREFIX = "baton_"
_Key = TypeVar("_Key", bound=str)


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric's value now. A name that ends in _total is a counter's, any other one a gauge's."""

    name: str
    help: str
    value: float
    labels: Mapping[str, str]


def by_label(name: str, text: str, label: str, values: Mapping[_Key, float]) -> list[Figure]:
    """One metric with a value for each value of a label."""
    return [Figure(name, text, value, {label: key}) for key, value in values.items()]


def render(figures: Iterable[Figure], labels: Mapping[str, str]) -> bytes:
    """The page. `labels` are those of the process, on every figure."""
    return generate_latest(_Page(figures, labels))


class _Page(Collector):
    """What `generate_latest` wants to read from."""

    def __init__(self, figures: Iterable[Figure], labels: Mapping[str, str]) -> None:
        self._figures = figures
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for figure in self._figures:
            kind = CounterMetricFamily if figure.name.endswith("_total") else GaugeMetricFamily
            labels = {**self._labels, **figure.labels}
            family = families.setdefault(figure.name, kind(_PREFIX + figure.name, figure.help, labels=list(labels)))
            family.add_metric(list(labels.values()), figure.value)
        return families.values()
