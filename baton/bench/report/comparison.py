"""What the figures say, in one sentence; and which measurements are worth being drawn beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.report.figures import milliseconds, number, per_second, percent, plural
from baton.bench.report.measured import Arrangement, Measured, Measurement
from baton.bench.slo import Slo


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most that an arrangement serves while enough of the offered requests meet the SLO."""

    arrangement: Arrangement
    at: Measurement
    is_highest_tried: bool

    @property
    def goodput(self) -> float:
        """Requests per second that met the SLO."""
        said = self.at.summary.get("request_goodput")
        return said if said is not None else (self.at.rate or 0.0) * (self.at.attainment or 0.0)

    def goodput_per_engine(self) -> float | None:
        return self.goodput / self.arrangement.engines if self.arrangement.engines else None


@dataclass(frozen=True, slots=True)
class Answer:
    """The sentence on top of the page, and what belongs to it."""

    headline: str
    detail: str
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """One arrangement at the rate at which all are looked at; `colour`: its number among all arrangements."""

    arrangement: Arrangement
    colour: int
    at: Measurement


def capacity(arrangement: Arrangement, target: float) -> Capacity | None:
    """None: it met the target at no rate that was tried."""
    met = [one for one in arrangement.measurements if one.attainment is not None and one.attainment >= target]
    if not met:
        return None
    best = max(met, key=lambda one: one.rate or 0.0)
    return Capacity(arrangement, best, best is arrangement.measurements[-1])


def capacities(measured: Measured) -> list[Capacity]:
    """Of all that have one, the best first."""
    found = [one for arrangement in measured.arrangements if (one := capacity(arrangement, measured.target))]
    return sorted(found, key=lambda one: -(one.goodput_per_engine() or one.goodput))


def compared(measured: Measured) -> list[Compared]:
    """Every arrangement at the rate up to which the best one holds, or at the nearest that was measured."""
    best = capacities(measured)
    wanted = best[0].at.rate if best else _middle_rate(measured)
    return [
        Compared(arrangement, colour, _nearest(arrangement.measurements, wanted))
        for colour, arrangement in enumerate(measured.arrangements)
        if arrangement.measurements
    ]


def answer(measured: Measured) -> Answer:
    """What a reader came for."""
    all_measurements = [one for arrangement in measured.arrangements for one in arrangement.measurements]
    offered, failed = sum(one.offered for one in all_measurements), sum(one.failed for one in all_measurements)
    if not offered:
        return Answer("Nothing was measured.", "The result has no request in it.", is_bad=True)
    if failed >= offered:
        return Answer(f"All {plural(offered, 'request')} failed.", _most_frequent_error(all_measurements), is_bad=True)
    if not measured.slo:
        return _without_slo(measured)
    best = capacities(measured)
    if not best:
        return _nobody(measured)
    if len(measured.arrangements) == 1:
        return _one(best[0], measured)
    if len(best) == 1:
        text = f"Only {best[0].arrangement.name} keeps {limits(measured.slo)}: up to {per_second(best[0].goodput)}."
        return Answer(text, _conditions(best[0], measured))
    return _two(best[0], _baseline(best), measured)


def limits(slo: Slo) -> str:
    """`TTFT 250 ms and TPOT 100 ms`."""
    named = (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms), ("end to end", slo.e2el_ms))
    words = [f"{name} {milliseconds(limit)}" for name, limit in named if limit is not None]
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1] if words else "no limit"


def rate_of(measurement: Measurement) -> str:
    """`8.4 requests/s`, or that nobody paced them."""
    return "as fast as possible" if measurement.rate is None else per_second(measurement.rate)


def _two(best: Capacity, other: Capacity, measured: Measured) -> Answer:
    has_equal_engines = best.arrangement.engines == other.arrangement.engines
    mine, theirs = best.goodput_per_engine(), other.goodput_per_engine()
    if has_equal_engines or mine is None or theirs is None:
        mine, theirs, per = best.goodput, other.goodput, ""
    else:
        per = f" per {best.arrangement.unit}"
    ratio = mine / theirs if theirs else None
    headline = (
        f"{best.arrangement.name} serves {number(ratio, 2)} times the requests{per} of {other.arrangement.name} "
        f"within {limits(measured.slo)}."
    )
    against = f"{number(best.goodput)} against {per_second(other.goodput)}"
    return Answer(headline, f"{against}: {_conditions(best, measured)}")


def _one(best: Capacity, measured: Measured) -> Answer:
    if len(best.arrangement.measurements) == 1:
        at = best.at
        headline = (
            f"{best.arrangement.name} kept {limits(measured.slo)} for {percent(at.attainment)} of "
            f"{plural(at.offered, 'request')} at {rate_of(at)}."
        )
        return Answer(headline, f"{per_second(best.goodput)} were good; other rates were not tried.")
    headline = f"{best.arrangement.name} serves up to {per_second(best.goodput)} within {limits(measured.slo)}."
    return Answer(headline, _conditions(best, measured))


def _conditions(best: Capacity, measured: Measured) -> str:
    told = f"at least {percent(measured.target)} of the offered requests keep all limits"
    engines = {(one.engines, one.unit) for one in measured.arrangements}
    if len(engines) == 1 and best.arrangement.engines:
        told += f", on {plural(round(best.arrangement.engines), best.arrangement.unit)}"
        told += " each" if len(measured.arrangements) > 1 else ""
    if best.is_highest_tried and len(best.arrangement.measurements) > 1:
        told += f". {best.arrangement.name} kept them at the highest rate that was tried, so it may serve more"
    return told + "."


def _nobody(measured: Measured) -> Answer:
    tried = [
        (one.attainment or 0.0, arrangement, one)
        for arrangement in measured.arrangements
        for one in arrangement.measurements
    ]
    share, arrangement, at = max(tried, key=lambda one: one[0])
    who = "No arrangement" if len(measured.arrangements) > 1 else arrangement.name
    negation = " keeps " if len(measured.arrangements) > 1 else " does not keep "
    headline = (
        f"{who}{negation}{limits(measured.slo)} for {percent(measured.target)} of the requests at any rate tried."
    )
    if not share:
        return Answer(headline, "Not one request kept all limits.", is_bad=True)
    nearest = f"The nearest was {arrangement.name} at {rate_of(at)}: {percent(share)} kept them."
    return Answer(headline, nearest, is_bad=True)


def _without_slo(measured: Measured) -> Answer:
    best = max(
        ((one.summary.get("request_throughput", 0.0), arrangement, one) for arrangement, one in _each(measured)),
        key=lambda one: one[0],
    )
    throughput, arrangement, at = best
    first = milliseconds(at.summary.get("median_ttft_ms"))
    headline = f"{arrangement.name} answered {per_second(throughput)}, half of the first tokens within {first}."
    return Answer(headline, "No service level was asked for (--goodput), so there is no goodput to compare.")


def _each(measured: Measured) -> list[tuple[Arrangement, Measurement]]:
    return [(arrangement, one) for arrangement in measured.arrangements for one in arrangement.measurements]


def _baseline(best: Sequence[Capacity]) -> Capacity:
    """Whom the best one is held against: the colocated arrangement, or else the runner-up."""
    others = best[1:]
    return next((one for one in others if "colocated" in one.arrangement.name.lower()), others[0])


def _most_frequent_error(measurements: Sequence[Measurement]) -> str:
    errors: dict[str, int] = {}
    for one in measurements:
        for error, count in one.errors.items():
            errors[error] = errors.get(error, 0) + count
    if not errors:
        return "The result does not say why."
    return f"Most often: {max(errors, key=lambda error: errors[error])}"


def _middle_rate(measured: Measured) -> float | None:
    rates = sorted(one.rate for _, one in _each(measured) if one.rate is not None)
    return rates[len(rates) // 2] if rates else None


def _nearest(measurements: Sequence[Measurement], rate: float | None) -> Measurement:
    if rate is None:
        return measurements[-1]
    return min(measurements, key=lambda one: abs((one.rate if one.rate is not None else rate * 1e9) - rate))
