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


def parse_result(result: Mapping[str, Any]) -> MeasuredResult:
    """Checks and converts a result; raises InvalidRequest, which names the field."""
    if not isinstance(result, Mapping) or result.get("schema") != SCHEMA:
        raise InvalidRequest("schema", f"not a result of `baton bench` ({SCHEMA})")
    listed = _sequence(result, "arrangements")
    arrangements = [_arrangement(arrangement, f"arrangements[{index}]") for index, arrangement in enumerate(listed)]
    targets = [
        _number(result.get("attainment")),
        *(_number(_mapping(arrangement, "goodput").get("target")) for arrangement in listed),
    ]
    target = next((target for target in targets if target), TARGET)
    most = _number(result.get("max_concurrency"))
    return MeasuredResult(
        kind=str(result.get("kind", "benchmark")),
        model=_model(result),
        max_concurrency=int(most) if most is not None and most >= 1 else None,
        is_open_loop="max_concurrency" in result and result["max_concurrency"] is None,
        facts=_facts(result),
        slo=_slo(result),
        target=target,
        is_partial=result.get("is_complete") is False,
        notes=[str(note) for note in _sequence(result, "notes")],
        arrangements=arrangements,
        goodput_ratio=_spread(result, "goodput_ratio"),
        unsettled=_unsettled(_mapping(result, "verdict") if result.get("verdict") else {}),
        gap_ratio=_spread(result, "p99_gap_ratio"),
    )


def _unsettled(verdict: Mapping[str, Any]) -> str:
    if verdict.get("is_settled") is not False:
        return ""
    return f"{verdict.get('finding', '')}. What would settle it: {verdict.get('remedy', '')}."


def _arrangement(raw: Any, where: str) -> Arrangement:
    _require(isinstance(raw, Mapping), where, "not an object")
    gpus, cores = _number(raw.get("gpus")), _number(raw.get("cores"))
    measurements = [_measurement(rate, f"{where}.rates[{i}]") for i, rate in enumerate(_sequence(raw, "rates", where))]
    return Arrangement(
        name=str(raw.get("name", "")) or "unnamed",
        engines=gpus or cores or None,
        unit="GPU" if gpus else "core",
        measurements=sorted(
            measurements, key=lambda measurement: math.inf if measurement.rate is None else measurement.rate
        ),
        goodput=_goodput(_mapping(raw, "goodput", where), where),
    )


def _goodput(raw: Mapping[str, Any], where: str) -> Spread | None:
    """The goodput of one search or of several."""
    rates = [rate for number in _sequence(raw, "rates", f"{where}.goodput") if (rate := _number(number)) is not None]
    if (rate := _number(raw.get("rate"))) is not None:
        rates.append(rate)
    return Spread.of(rates) if rates else None


def _spread(result: Mapping[str, Any], name: str) -> Spread | None:
    middle = _number(result.get(name))
    if middle is None:
        return None
    spread = _mapping(result, f"{name}_spread")
    low, high = _number(spread.get("p10")), _number(spread.get("p90"))
    return Spread(middle, middle if low is None else low, middle if high is None else high)


def _measurement(raw: Any, where: str) -> Measurement:
    _require(isinstance(raw, Mapping), where, "not an object")
    summary = _mapping(raw, "summary", where)
    figures = {str(key): number for key, value in summary.items() if (number := _number(value)) is not None}
    columns = _mapping(raw, "outcomes", where)
    latencies = _latencies(columns, f"{where}.outcomes") if columns else None
    answered = round(figures.get("completed", 0) + figures.get("failed", 0))
    return Measurement(
        rate=_number(raw.get("rate")),
        summary=figures,
        offered=round(figures.get("offered", latencies.e2el_ms.size if latencies else answered)),
        failed=round(figures.get("failed", 0)),
        errors=_errors(summary, columns, where),
        ttft=Distribution.of(latencies.ttft_ms) if latencies else _distribution(raw, "ttft_histogram", where),
        itl=_distribution(raw, "itl_histogram", where),
        latencies=latencies,
        attainment_by_scale=_pairs(raw, "attainment_by_scale", where),
        ttft_parts_ms={
            str(part): max(0.0, _number(ms) or 0.0) for part, ms in _mapping(raw, "ttft_parts", where).items()
        },
        timeline={
            str(node): _intervals(rows, f"{where}.timeline[{node!r}]")
            for node, rows in _mapping(raw, "timeline", where).items()
        },
        is_common=raw.get("is_common") is True,
        bottleneck=str(_mapping(raw, "generator", where).get("bottleneck") or ""),
    )


def _latencies(columns: Mapping[str, Any], where: str) -> Latencies:
    planned, first, finished, lengths = (
        _column(columns, name, where) for name in ("planned_s", "first_token_s", "finished_s", "output_length")
    )
    _require(planned.size == first.size == finished.size == lengths.size, where, "columns of different lengths")
    errors = _sequence(columns, "error", where) or [None] * planned.size
    _require(len(errors) == planned.size, f"{where}.error", "a column of another length")
    failed = np.array([error is not None for error in errors], dtype=bool)
    failed |= np.isnan(first)
    behind = lengths - 1
    tpot = np.where(behind > 0, (finished - first) / np.maximum(behind, 1), 0.0)
    return Latencies(
        *(np.where(failed, np.nan, seconds * 1e3) for seconds in (first - planned, tpot, finished - planned))
    )


def _errors(summary: Mapping[str, Any], columns: Mapping[str, Any], where: str) -> dict[str, int]:
    counts = _mapping(summary, "errors", f"{where}.summary")
    if counts:
        return {str(error): round(_number(count) or 0) for error, count in counts.items()}
    return dict(Counter(str(error) for error in _sequence(columns, "error") if error is not None))


def _distribution(raw: Mapping[str, Any], name: str, where: str) -> Distribution:
    histogram = _mapping(raw, name, where)
    try:
        return of_histogram(_sequence(histogram, "edges_s"), _sequence(histogram, "counts"))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"{where}.{name}", str(error)) from None


def _intervals(rows: Any, where: str) -> list[Interval]:
    _require(isinstance(rows, list), where, "not a list")
    return sorted((_interval(row, where) for row in rows), key=lambda interval: interval.start_s)


def _interval(row: Any, where: str) -> Interval:
    _require(isinstance(row, list) and len(row) >= 3, where, "a row is [start_s, end_s, kind, ...]")
    start, end = _number(row[0]), _number(row[1])
    if start is None or end is None or end < start:
        raise InvalidRequest(where, f"from {row[0]!r} to {row[1]!r} is not an interval of time")
    return Interval(start, end, str(row[2]), _number(row[3]) if len(row) > 3 else None)


def _slo(result: Mapping[str, Any]) -> Slo:
    """The result's SLO, or that of the first summary that has one; all summaries of a file have the same."""
    if slo := _limits(_mapping(result, "slo")):
        return slo
    for arrangement in _sequence(result, "arrangements"):
        for rate in _sequence(arrangement, "rates"):
            if slo := _limits(_mapping(_mapping(rate, "summary"), "goodput_slo")):
                return slo
    return Slo()


def _limits(raw: Mapping[str, Any]) -> Slo:
    return Slo(*(_number(raw.get(name)) for name in ("ttft_ms", "tpot_ms", "e2el_ms")))


def _model(result: Mapping[str, Any]) -> str:
    named = [result.get("model_id"), result.get("model")]
    if not any(named):
        named = [model.get("model") for model in _sequence(result, "models") if isinstance(model, Mapping)]
    return ", ".join(dict.fromkeys(name for name in named if name and isinstance(name, str)))


_FACTS = ("machine", "versions", "workload", "command", "seed", "created")


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name in _FACTS if (text := _words(result.get(name), name))}


def _words(raw: Any, name: str) -> str:
    if raw is None:
        return ""
    if isinstance(raw, Mapping):
        texts = {str(key): _words(value, str(key)) for key, value in raw.items()}
        return ", ".join(f"{_label(key)} {text}" for key, text in texts.items() if text)
    if isinstance(raw, list | tuple):
        return " ".join(_words(value, name) for value in raw)
    if name.endswith("_bytes") and (number := _number(raw)):
        return f"{number / 2**30:.1f} GiB"
    return str(raw)


def _label(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ")


def _pairs(raw: Mapping[str, Any], name: str, where: str) -> list[tuple[float, float]]:
    pairs = []
    for row in _sequence(raw, name, where):
        numbers = [_number(number) for number in row] if isinstance(row, list) else []
        if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
            raise InvalidRequest(f"{where}.{name}", f"{row!r} is not a pair of numbers")
        pairs.append((numbers[0], numbers[1]))
    return sorted(pairs)


def _column(columns: Mapping[str, Any], name: str, where: str) -> Values:
    try:
        values = np.array(_sequence(columns, name, where), dtype=np.float64)
    except (ValueError, TypeError):
        raise InvalidRequest(f"{where}.{name}", "not a list of numbers") from None
    _require(values.ndim == 1, f"{where}.{name}", "not a list of numbers")
    return np.where(np.abs(values) <= _LARGEST, values, np.nan)


def _mapping(raw: Any, name: str, where: str = "") -> Mapping[str, Any]:
    value = raw.get(name) if isinstance(raw, Mapping) else None
    _require(value is None or isinstance(value, Mapping), f"{where}.{name}".lstrip("."), "not an object")
    return value or {}


def _sequence(raw: Any, name: str, where: str = "") -> Sequence[Any]:
    value = raw.get(name) if isinstance(raw, Mapping) else None
    _require(value is None or isinstance(value, list), f"{where}.{name}".lstrip("."), "not a list")
    return value or []


def _number(value: Any) -> float | None:
    """The value as a number; None if it is not a number or too large. Booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= _LARGEST else None


def _require(is_so: bool, field: str, reason: str) -> None:
    if not is_so:
        raise InvalidRequest(field, reason)
