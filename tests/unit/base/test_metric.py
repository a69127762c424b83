"""Metrics that are declared at the fields that hold their values."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated

from baton.metric import Metric
from baton.observe.metrics import Distribution, Figure, Histogram, declared_figures


class Fruit(enum.Enum):
    APPLE = "apple"
    PEAR = "pear"


@dataclass(slots=True)
class Inner:
    age_s: Annotated[float, Metric("age_seconds", "Age of the oldest.")] = 1.5


@dataclass(slots=True)
class Counters:
    eaten: Annotated[int, Metric("eaten_total", "Eaten.")] = 0
    not_shown: int = 7
    by_fruit: Annotated[
        Counter[Fruit], Metric("fruits_total", "By fruit.", label="fruit", keys=Fruit, label_value=attrgetter("value"))
    ] = field(default_factory=Counter)
    by_word: Annotated[Counter[str], Metric("words_total", "By word.", label="word", label_value=str.upper)] = field(
        default_factory=Counter
    )
    inner: Inner = field(default_factory=Inner)
    num_open: Annotated[int, Metric("ones", "Ones, by state.", {"state": "open"})] = 3
    num_closed: Annotated[int, Metric("ones", "Ones, by state.", {"state": "closed"})] = 4


@dataclass(slots=True)
class Times:
    waited: Annotated[Histogram, Metric("wait_seconds", "Waited.")] = field(
        default_factory=lambda: Histogram((0.1, 1.0))
    )


Told = list[tuple[str, float, dict[str, str]]]


def told(counters: Counters | Inner, labels: Mapping[str, str] | None = None) -> Told:
    figures = [figure for figure in declared_figures(counters, labels) if isinstance(figure, Figure)]
    return [(figure.name, figure.value, dict(figure.labels)) for figure in figures]


def test_declared_fields_are_figures_in_their_order() -> None:
    counters = Counters()
    counters.eaten += 2
    counters.by_fruit[Fruit.PEAR] += 1
    counters.by_word["new"] += 5
    assert told(counters) == [
        ("eaten_total", 2, {}),
        ("fruits_total", 0, {"fruit": "apple"}),
        ("fruits_total", 1, {"fruit": "pear"}),
        ("words_total", 5, {"word": "NEW"}),
        ("age_seconds", 1.5, {}),
        ("ones", 3, {"state": "open"}),
        ("ones", 4, {"state": "closed"}),
    ]


def test_labels_are_added_to_every_figure() -> None:
    assert told(Inner(), {"peer": "p0"}) == [("age_seconds", 1.5, {"peer": "p0"})]
    assert all(labels["peer"] == "p0" for _, _, labels in told(Counters(), {"peer": "p0"}))


def test_a_histogram_is_a_distribution_with_the_labels() -> None:
    times = Times()
    times.waited.observe(0.5)
    (figure,) = declared_figures(times, {"peer": "p0"})
    assert isinstance(figure, Distribution)
    assert (figure.name, figure.total, figure.labels) == ("wait_seconds", 0.5, {"peer": "p0"})
