"""Parses a result file into checked values, with correct types, finite numbers and equal lengths.

A result file is untrusted input; names in it may contain any characters. Missing values stay missing, and figures that
are not numbers are left out. Contradictory values, such as columns of different lengths, are refused with the field's
name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.bench.report.distribution import Distribution, of_histogram
from baton.bench.results.result_file import SCHEMA
from baton.bench.results.spread import Spread
from baton.bench.results.summary import Slo
from baton.errors import InvalidRequest

Values = npt.NDArray[np.float64]
TARGET = 0.9
"""Share of the offered requests that must meet the SLO, if the result does not say it; as in DistServe."""
_LARGEST = 1e15
"""Larger numbers are no measurements; they are dropped before they can overflow."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of each offered request in milliseconds; NaN where the request failed."""

    ttft_ms: Values
    tpot_ms: Values
    e2el_ms: Values

    def within(self, slo: Slo) -> float:
        """The share of offered requests that kept all limits."""
        kept = np.isfinite(self.e2el_ms) & slo.is_kept(self.ttft_ms, self.tpot_ms, self.e2el_ms)
        return float(kept.mean()) if kept.size else 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A step or transfer of a node, in seconds from the start; `size`: tokens of a step, bytes of a transfer."""

    start_s: float
    end_s: float
    kind: str
    size: float | None


@dataclass(frozen=True, slots=True)
class TenantSeries:
    """A tenant over time, a value for each window; NaN where nothing was measured."""

    name: str
    service: Values
    """Tokens per second, as the router counts what a tenant gets."""
    ttft_ms: Values
    """Median of the requests that were due in the window."""


@dataclass(frozen=True, slots=True)
class TenantPeriod:
    """What tenants got while the same ones sent."""

    begin_s: float
    end_s: float
    rows: Sequence[tuple[str, str, Mapping[str, float]]]
    """The name of each tenant, its class, and its figures by their keys in the file."""


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """What each tenant of a measurement got."""

    window_s: float
    windows_from_s: Values
    series: Sequence[TenantSeries]
    periods: Sequence[TenantPeriod]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement of one arrangement at one rate."""

    rate: float | None
    """Offered requests per second; None: as fast as possible."""
    summary: Mapping[str, float]
    """Figures by vLLM's keys."""
    offered: int
    failed: int
    errors: Mapping[str, int]
    ttft: Distribution
    itl: Distribution
    latencies: Latencies | None
    attainment_by_scale: Sequence[tuple[float, float]]
    ttft_parts_ms: Mapping[str, float]
    timeline: Mapping[str, Sequence[Interval]]
    is_common: bool
    """Whether all arrangements were measured at this rate for comparison."""
    bottleneck: str
    """Why the load generator could not keep up; empty if it could."""
    tenants: TenantFigures | None

    @property
    def attainment(self) -> float | None:
        """Share of offered requests that met the SLO."""
        return self.summary.get("attainment")


@dataclass(frozen=True, slots=True)
class Arrangement:
    """An arrangement of nodes, with its measurements; `engines`: the number of GPUs or cores."""

    name: str
    engines: float | None
    unit: str
    measurements: Sequence[Measurement]
    """Sorted by rate; a rate may occur more than once."""
    goodput: Spread | None
    """The highest rate within the SLO, as found by a search; None: there was no search."""


@dataclass(frozen=True, slots=True)
class MeasuredResult:
    """A checked result file."""

    kind: str
    model: str
    """The model's name, or several; empty if the result does not say it."""
    max_concurrency: int | None
    """The most requests that were open at once; None: as many as came, or the result does not say it."""
    is_open_loop: bool
    """Whether the result says that as many requests were open as came."""
    facts: Mapping[str, str]
    """Machine, versions, workload, command and seed, as text."""
    slo: Slo
    target: float
    is_partial: bool
    notes: Sequence[str]
    arrangements: Sequence[Arrangement]
    goodput_ratio: Spread | None
    unsettled: str
    """Why the result does not say which arrangement is better, and what would settle it; empty: it does."""
    gap_ratio: Spread | None
    """Ratios of the best disaggregated arrangement to the colocated one, measured in turn: goodput, and the P99 of the
    largest gap."""

    @property
    def measurements(self) -> list[tuple[Arrangement, Measurement]]:
        """All measurements, each with its arrangement."""
        return [(arrangement, measured) for arrangement in self.arrangements for measured in arrangement.measurements]

    @property
    def num_offered(self) -> int:
        """Requests of all measurements."""
        return sum(measured.offered for _, measured in self.measurements)

    @property
    def num_failed(self) -> int:
        return sum(measured.failed for _, measured in self.measurements)

    @property
    def subject(self) -> str:
        """The model and the load, as far as the result says them."""
        load = "any number of requests at once" if self.is_open_loop else ""
        if self.max_concurrency is not None:
            load = f"at most {self.max_concurrency:,} requests at once"
        return ", ".join(filter(None, (self.model, load)))


class _Fields:
    """An object of the file, and where it is. What is missing is empty; other kinds of values raise InvalidRequest."""

    __slots__ = ("raw", "where")

    def __init__(self, raw: Any, where: str = "") -> None:
        if not isinstance(raw, Mapping):
            raise InvalidRequest(where, "not an object")
        self.raw = raw
        self.where = where

    def path(self, name: str) -> str:
        return f"{self.where}.{name}".lstrip(".")

    def text(self, name: str) -> str:
        return str(self.raw.get(name) or "")

    def number(self, name: str) -> float | None:
        return _number(self.raw.get(name))

    def numbers(self) -> dict[str, float]:
        """All fields that are numbers."""
        return {str(name): number for name, value in self.raw.items() if (number := _number(value)) is not None}

    def fields(self, name: str) -> _Fields:
        value = self.raw.get(name)
        return _Fields({} if value is None else value, self.path(name))

    def values(self, name: str) -> Sequence[Any]:
        value = self.raw.get(name)
        _require(value is None or isinstance(value, list), self.path(name), "not a list")
        return value or []

    def objects(self, name: str) -> list[_Fields]:
        return [_Fields(value, f"{self.path(name)}[{index}]") for index, value in enumerate(self.values(name))]


def parse_result(result: Mapping[str, Any]) -> MeasuredResult:
    """Checks and converts a result; raises InvalidRequest, which names the field."""
    if not isinstance(result, Mapping) or result.get("schema") != SCHEMA:
        raise InvalidRequest("schema", f"not a result of `baton bench` ({SCHEMA})")
    fields = _Fields(result)
    listed = fields.objects("arrangements")
    targets = [fields.number("attainment"), *(arrangement.fields("goodput").number("target") for arrangement in listed)]
    most = fields.number("max_concurrency")
    return MeasuredResult(
        kind=str(result.get("kind", "benchmark")),
        model=_model(fields),
        max_concurrency=int(most) if most is not None and most >= 1 else None,
        is_open_loop="max_concurrency" in result and result["max_concurrency"] is None,
        facts={name: text for name in _FACTS if (text := _words(result.get(name), name))},
        slo=_slo(fields, listed),
        target=next((target for target in targets if target), TARGET),
        is_partial=result.get("is_complete") is False,
        notes=[str(note) for note in fields.values("notes")],
        arrangements=[_arrangement(arrangement) for arrangement in listed],
        goodput_ratio=_spread(fields, "goodput_ratio"),
        unsettled=_unsettled(fields.fields("verdict").raw if result.get("verdict") else {}),
        gap_ratio=_spread(fields, "p99_gap_ratio"),
    )


def _unsettled(verdict: Mapping[str, Any]) -> str:
    if verdict.get("is_settled") is not False:
        return ""
    return f"{verdict.get('finding', '')}. What would settle it: {verdict.get('remedy', '')}."


def _arrangement(fields: _Fields) -> Arrangement:
    gpus, goodput = fields.number("gpus"), fields.fields("goodput")
    # The goodput of several searches, or of a single search.
    goodputs = [*map(_number, goodput.values("rates")), goodput.number("rate")]
    known = [rate for rate in goodputs if rate is not None]
    measurements = map(_measurement, fields.objects("rates"))
    return Arrangement(
        name=fields.text("name") or "unnamed",
        engines=gpus or fields.number("cores") or None,
        unit="GPU" if gpus else "core",
        measurements=sorted(measurements, key=lambda run: math.inf if run.rate is None else run.rate),
        goodput=Spread.of(known) if known else None,
    )


def _spread(fields: _Fields, name: str) -> Spread | None:
    middle, spread = fields.number(name), fields.fields(f"{name}_spread")
    if middle is None:
        return None
    low, high = spread.number("p10"), spread.number("p90")
    return Spread(middle, middle if low is None else low, middle if high is None else high)


def _measurement(fields: _Fields) -> Measurement:
    summary, columns = fields.fields("summary"), fields.fields("outcomes")
    figures = summary.numbers()
    latencies = _latencies(columns) if columns.raw else None
    answered = round(figures.get("completed", 0) + figures.get("failed", 0))
    parts, timeline = fields.fields("ttft_parts").raw, fields.fields("timeline")
    return Measurement(
        rate=fields.number("rate"),
        summary=figures,
        offered=round(figures.get("offered", latencies.e2el_ms.size if latencies else answered)),
        failed=round(figures.get("failed", 0)),
        errors=_errors(summary.fields("errors"), columns),
        ttft=Distribution.of(latencies.ttft_ms) if latencies else _distribution(fields.fields("ttft_histogram")),
        itl=_distribution(fields.fields("itl_histogram")),
        latencies=latencies,
        attainment_by_scale=_pairs(fields.values("attainment_by_scale"), fields.path("attainment_by_scale")),
        ttft_parts_ms={str(part): max(0.0, _number(ms) or 0.0) for part, ms in parts.items()},
        timeline={str(node): _intervals(rows, f"{timeline.where}[{node!r}]") for node, rows in timeline.raw.items()},
        is_common=fields.raw.get("is_common") is True,
        bottleneck=fields.fields("generator").text("bottleneck"),
        tenants=_tenants(fields.fields("tenants")) if fields.raw.get("tenants") else None,
    )


def _tenants(fields: _Fields) -> TenantFigures:
    starts = _column(fields, "windows_from_s")
    series = [
        TenantSeries(each.text("name"), _column(each, "service_tokens_per_s"), _column(each, "median_ttft_ms"))
        for each in fields.objects("over_time")
    ]
    for each in series:
        is_even = starts.size == each.service.size == each.ttft_ms.size
        _require(is_even, fields.path("over_time"), "columns of different lengths")
    return TenantFigures(
        fields.number("window_s") or 0.0, starts, series, list(map(_period, fields.objects("periods")))
    )


def _period(fields: _Fields) -> TenantPeriod:
    rows = [(row.text("name"), row.text("class"), row.numbers()) for row in fields.objects("tenants")]
    return TenantPeriod(fields.number("begin_s") or 0.0, fields.number("end_s") or 0.0, rows)


def _latencies(columns: _Fields) -> Latencies:
    planned, first, finished, lengths = (
        _column(columns, name) for name in ("planned_s", "first_token_s", "finished_s", "output_length")
    )
    is_even = planned.size == first.size == finished.size == lengths.size
    _require(is_even, columns.where, "columns of different lengths")
    errors = columns.values("error") or [None] * planned.size
    _require(len(errors) == planned.size, columns.path("error"), "a column of another length")
    failed = np.array([error is not None for error in errors], dtype=bool)
    failed |= np.isnan(first)
    behind = lengths - 1
    tpot = np.where(behind > 0, (finished - first) / np.maximum(behind, 1), 0.0)
    return Latencies(
        *(np.where(failed, np.nan, seconds * 1e3) for seconds in (first - planned, tpot, finished - planned))
    )


def _errors(counts: _Fields, columns: _Fields) -> dict[str, int]:
    if counts.raw:
        return {str(error): round(_number(count) or 0) for error, count in counts.raw.items()}
    return dict(Counter(str(error) for error in columns.values("error") if error is not None))


def _distribution(histogram: _Fields) -> Distribution:
    try:
        return of_histogram(histogram.values("edges_s"), histogram.values("counts"))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(histogram.where, str(error)) from None


def _intervals(rows: Any, where: str) -> list[Interval]:
    _require(isinstance(rows, list), where, "not a list")
    return sorted((_interval(row, where) for row in rows), key=lambda interval: interval.start_s)


def _interval(row: Any, where: str) -> Interval:
    _require(isinstance(row, list) and len(row) >= 3, where, "a row is [start_s, end_s, kind, ...]")
    start, end = _number(row[0]), _number(row[1])
    if start is None or end is None or end < start:
        raise InvalidRequest(where, f"from {row[0]!r} to {row[1]!r} is not an interval of time")
    return Interval(start, end, str(row[2]), _number(row[3]) if len(row) > 3 else None)


def _slo(fields: _Fields, arrangements: Sequence[_Fields]) -> Slo:
    """The result's SLO, or that of the first summary that has one; all summaries of a file have the same."""
    summaries = (rate.fields("summary") for arrangement in arrangements for rate in arrangement.objects("rates"))
    for limits in (fields.fields("slo"), *(summary.fields("goodput_slo") for summary in summaries)):
        if slo := Slo(*map(limits.number, ("ttft_ms", "tpot_ms", "e2el_ms"))):
            return slo
    return Slo()


def _model(fields: _Fields) -> str:
    named = [fields.raw.get("model_id"), fields.raw.get("model")]
    if not any(named):
        named = [model.get("model") for model in fields.values("models") if isinstance(model, Mapping)]
    return ", ".join(dict.fromkeys(name for name in named if name and isinstance(name, str)))


_FACTS = ("machine", "versions", "workload", "command", "seed", "created")


def _words(raw: Any, name: str) -> str:
    if raw is None:
        return ""
    if isinstance(raw, Mapping):
        texts = {str(key): _words(value, str(key)) for key, value in raw.items()}
        labels = {key: key.removesuffix("_bytes").replace("_", " ") for key in texts}
        return ", ".join(f"{labels[key]} {text}" for key, text in texts.items() if text)
    if isinstance(raw, list | tuple):
        return " ".join(_words(value, name) for value in raw)
    if name.endswith("_bytes") and (number := _number(raw)):
        return f"{number / 2**30:.1f} GiB"
    return str(raw)


def _pairs(rows: Sequence[Any], where: str) -> list[tuple[float, float]]:
    pairs = []
    for row in rows:
        numbers = list(map(_number, row)) if isinstance(row, list) else []
        if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
            raise InvalidRequest(where, f"{row!r} is not a pair of numbers")
        pairs.append((numbers[0], numbers[1]))
    return sorted(pairs)


def _column(columns: _Fields, name: str) -> Values:
    try:
        values = np.array(columns.values(name), dtype=np.float64)
    except (ValueError, TypeError):
        raise InvalidRequest(columns.path(name), "not a list of numbers") from None
    _require(values.ndim == 1, columns.path(name), "not a list of numbers")
    return np.where(np.abs(values) <= _LARGEST, values, np.nan)


def _number(value: Any) -> float | None:
    """The value as a number; None if it is not a number or too large. Booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST else None


def _require(is_so: bool, field: str, reason: str) -> None:
    if not is_so:
        raise InvalidRequest(field, reason)
