"""Declares a metric at the field that holds its value, so that a new metric is one field and the line that counts it:

    @dataclass(slots=True)
    class Counters:
        accepted: Annotated[int, Metric("requests_accepted_total", "Requests that passed every check.")] = 0

`baton.observe.metrics.declared_figures(counters)` makes the figures of all declared fields for the metrics page. This
module imports nothing of Baton, since engine and leases declare metrics too, and know nothing of any page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True)
class Metric:
    """How the value of one field is shown on the metrics page.

    The value is a number, a `baton.observe.metrics.Histogram`, or a mapping from keys to numbers.
    """

    name: str
    """The name without the prefix `baton_`. A number is a counter if its name ends in `_total`, else a gauge."""
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """The labels of this field, if several fields are one metric."""
    label: str = ""
    """The label that tells the keys of a mapping apart; empty: the value is no mapping."""
    keys: Iterable[Any] = ()
    """Keys of a mapping that are always shown, before all others: 0 where they have no value."""
    label_value: Callable[[Any], str] = str
    """Makes the value of `label` from a key of a mapping."""


@functools.cache
def declared_metrics(kind: type) -> Mapping[str, Metric | None]:
    """The metric of each field of a dataclass, in their order; None for a field that declares none."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: _metric_in(hint) for name, hint in hints.items()}


def _metric_in(hint: Any) -> Metric | None:
    metadata = getattr(hint, "__metadata__", ())
    return next((item for item in metadata if isinstance(item, Metric)), None)
