"""The answer of a report in one sentence, and the choice of measurements that are compared in plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from baton.bench.report.html import milliseconds, number, per_second, percent, plural
from baton.bench.report.measured import Arrangement, MeasuredResult, Measurement
from baton.bench.results.spread import Spread
from baton.bench.results.summary import Slo


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate at which an arrangement meets the SLO for enough of the offered requests."""

    arrangement: Arrangement
    at: Measurement
    """The measurement that is nearest to this rate."""
    goodput: float
    """Requests per second that may be offered."""
    is_highest_tried: bool

    def goodput_per_engine(self) -> float | None:
        return self.goodput / self.arrangement.engines if self.arrangement.engines else None


@dataclass(frozen=True, slots=True)
class Answer:
    """The headline of the page, and its details."""

    headline: str
    detail: str
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class Compared:
    """An arrangement at the rate at which all are compared; `colour`: its number among all arrangements."""

    arrangement: Arrangement
    colour: int
    at: Measurement


def capacity(arrangement: Arrangement, target: float) -> Capacity | None:
    """The capacity; None if no rate that was tried met the target."""
    if not arrangement.measurements:
        return None
    met = [(rate, runs) for rate, runs in _by_rate(arrangement) if (_middle_attainment(runs) or 0.0) >= target]
    if arrangement.goodput is not None:
        rate, (_, runs) = arrangement.goodput.median, _nearest(met or _by_rate(arrangement), arrangement.goodput.median)
    elif met:
        rate, runs = met[-1]
    else:
        return None
    highest = max(
        (measurement.rate for measurement in arrangement.measurements if measurement.rate is not None), default=math.inf
    )
    if math.isinf(rate):
        rate = runs[0].summary.get("request_goodput", 0.0)
    return Capacity(arrangement, runs[0], rate, rate >= highest) if rate > 0 else None


def capacities(measured: MeasuredResult) -> list[Capacity]:
    """The capacities of all arrangements that have one, the best first."""
    all_reached = [one for arrangement in measured.arrangements if (one := capacity(arrangement, measured.target))]
    return sorted(all_reached, key=lambda reached: -(reached.goodput_per_engine() or reached.goodput))


def compared(measured: MeasuredResult) -> list[Compared]:
    """Every arrangement at the rate at which all were measured, or near to the best one's capacity."""
    best = capacities(measured)
    wanted = best[0].at.rate if best else _middle_rate(measured)
    chosen = []
    for colour, arrangement in enumerate(measured.arrangements):
        common = [measurement for measurement in arrangement.measurements if measurement.is_common]
        if common:
            chosen.append(Compared(arrangement, colour, common[0]))
        elif arrangement.measurements:
            _, runs = _nearest(_by_rate(arrangement), math.inf if wanted is None else wanted)
            chosen.append(Compared(arrangement, colour, runs[0]))
    return chosen


def answer(measured: MeasuredResult) -> Answer:
    """The main result, as a headline and details."""
    offered, failed = measured.num_offered, measured.num_failed
    if not offered:
        return Answer("Nothing was measured.", "The result contains no request.", is_bad=True)
    if failed >= offered:
        return Answer(f"All {plural(offered, 'request')} failed.", _most_frequent_error(measured), is_bad=True)
    if measured.kind == "validate":
        return _validated(measured)
    if measured.kind == "overload" and (found := _beside_flood(measured)) is not None:
        return found
    if not measured.slo:
        return _without_slo(measured)
    best = capacities(measured)
    if not best:
        return _none_meets(measured)
    if len(measured.arrangements) == 1:
        return _single(best[0], measured)
    if measured.unsettled:
        return _unsettled(best, measured)
    if len(best) == 1:
        text = f"Only {best[0].arrangement.name} keeps {limits(measured.slo)}: up to {per_second(best[0].goodput)}."
        return Answer(text, _sentence(_conditions(best[0], measured)))
    return _best_against(best[0], _baseline(best), measured)


def _unsettled(best: Sequence[Capacity], measured: MeasuredResult) -> Answer:
    """No headline with a ratio: the runs do not show that there is a difference."""
    goodputs = ", ".join(f"{reached.arrangement.name} {per_second(reached.goodput)}" for reached in best)
    headline = "It is not settled which arrangement has the higher goodput."
    return Answer(headline, f"{_sentence(measured.unsettled)} Goodput within {limits(measured.slo)}: {goodputs}.")


def _validated(measured: MeasuredResult) -> Answer:
    """The answer of a validation, whose arrangements are pairs: live and simulated nodes at the same rates."""
    ratios = [ratio for live, simulated in _pairs(measured) for ratio in _simulated_over_live(live, simulated)]
    if not ratios:
        return Answer("Nothing was simulated.", "The result has no live run with a simulated one.", is_bad=True)
    farthest, where = max(ratios, key=lambda ratio: abs(ratio[0] - 1))
    off = percent(abs(farthest - 1))
    headline = f"The simulator's mean TTFT and TPOT are within {off} of those of real nodes."
    detail = f"The largest deviation of {plural(len(ratios), 'mean')} is {number(farthest, 2)} times: {where}."
    return Answer(headline, detail)


def _beside_flood(measured: MeasuredResult) -> Answer | None:
    """The answer about the tenant that sends first, alone and beside another one; None: the result has no such."""
    texts, ratios, refused = [], [], 0.0
    for arrangement, measurement in measured.measurements:
        figures = measurement.tenants
        if figures is None or len(figures.periods) < 2 or not figures.periods[0].rows:
            continue
        name = figures.periods[0].rows[0][0]
        alone, beside = (
            next((row for tenant, _, row in period.rows if tenant == name), {}) for period in figures.periods[:2]
        )
        first, then = alone.get("median_ttft_ms"), beside.get("median_ttft_ms")
        if first and then:
            ratios.append((name, then / first))
        times = [
            f"{milliseconds(row.get('median_ttft_ms'))} (p99 {milliseconds(row.get('p99_ttft_ms'))})"
            for row in (alone, beside)
        ]
        refused += beside.get("refused", 0.0)
        texts.append(f"{arrangement.name}: {times[0]} alone, {times[1]} beside the flood")
    if not ratios:
        return None
    name, ratio = ratios[0]
    headline = f"Beside the flood {name} waited {number(ratio, 2)} times as long for its first tokens as alone."
    detail = f"{'; '.join(texts)}. {plural(round(refused), 'request')} of {name} were refused."
    return Answer(headline, detail, is_bad=refused > 0)


def _pairs(measured: MeasuredResult) -> list[tuple[Arrangement, Arrangement]]:
    by_name = {arrangement.name: arrangement for arrangement in measured.arrangements}
    named = [
        (arrangement, f"{name.removesuffix(' live')} simulated")
        for name, arrangement in by_name.items()
        if name.endswith(" live")
    ]
    return [(live, by_name[name]) for live, name in named if name in by_name]


def _simulated_over_live(live: Arrangement, simulated: Arrangement) -> list[tuple[float, str]]:
    """The ratio for each mean, and the mean's name."""
    return [
        (mine.summary.get(f"mean_{key}_ms", 0.0) / measured, f"{key.upper()} of {live.name} at {rate_of(theirs)}")
        for mine, theirs in zip(simulated.measurements, live.measurements, strict=False)
        for key in ("ttft", "tpot")
        if (measured := theirs.summary.get(f"mean_{key}_ms"))
    ]


def limits(slo: Slo) -> str:
    """The limits of an SLO, as `TTFT 250 ms and TPOT 100 ms`."""
    # Not rounded: a limit is what was asked for.
    words = [f"{'end to end' if name == 'E2EL' else name} {text}" for name, text in slo.texts().items()]
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1] if words else "no limit"


def rate_of(measurement: Measurement) -> str:
    """The offered rate, as `8.4 requests/s`."""
    return "as fast as possible" if measurement.rate is None else per_second(measurement.rate)


def _best_against(best: Capacity, other: Capacity, measured: MeasuredResult) -> Answer:
    mine, theirs, per = best.goodput, other.goodput, ""
    if best.arrangement.engines != other.arrangement.engines and best.arrangement.engines and other.arrangement.engines:
        mine, theirs = mine / best.arrangement.engines, theirs / other.arrangement.engines
        per = f" per {best.arrangement.unit}"
    headline = (
        f"{best.arrangement.name} serves {number(mine / theirs, 2)} times the requests{per} of "
        f"{other.arrangement.name} within {limits(measured.slo)}."
    )
    against = f"{number(best.goodput)} against {per_second(other.goodput)}"
    return Answer(headline, f"{against}: {_conditions(best, measured)}{_interleaved_ratios(best, other, measured)}")


def _interleaved_ratios(best: Capacity, other: Capacity, measured: MeasuredResult) -> str:
    """The ratios of interleaved measurements, if they are of these two arrangements."""
    text = ""
    is_colocated = "colocated" in other.arrangement.name.lower() and "colocated" not in best.arrangement.name.lower()
    if is_colocated and measured.goodput_ratio:
        text += f" Measured in turns: {_spread(measured.goodput_ratio)} times."
    if is_colocated and measured.gap_ratio:
        text += f" The P99 of its largest gap between tokens is {_spread(measured.gap_ratio)} times as long."
    return text


def _spread(ratio: Spread) -> str:
    return f"{number(ratio.median)} [{number(ratio.p10)}, {number(ratio.p90)}]"


def _single(best: Capacity, measured: MeasuredResult) -> Answer:
    if len(best.arrangement.measurements) == 1:
        at = best.at
        headline = (
            f"{best.arrangement.name} kept {limits(measured.slo)} for {percent(at.attainment)} of "
            f"{plural(at.offered, 'request')} at {rate_of(at)}."
        )
        good = per_second(at.summary.get("request_goodput"))
        return Answer(headline, f"{good} were good; other rates were not tried.")
    headline = f"{best.arrangement.name} serves up to {per_second(best.goodput)} within {limits(measured.slo)}."
    return Answer(headline, _sentence(_conditions(best, measured)))


def _conditions(best: Capacity, measured: MeasuredResult) -> str:
    text = f"at least {percent(measured.target)} of the offered requests keep all limits"
    engines = {(arrangement.engines, arrangement.unit) for arrangement in measured.arrangements}
    if len(engines) == 1 and best.arrangement.engines:
        text += f", on {plural(round(best.arrangement.engines), best.arrangement.unit)}"
        text += " each" if len(measured.arrangements) > 1 else ""
    if best.is_highest_tried and len(best.arrangement.measurements) > 1:
        text += f". {best.arrangement.name} kept them at the highest rate that was tried, so it may serve more"
    return text + "."


def _none_meets(measured: MeasuredResult) -> Answer:
    tried = [
        (measurement.attainment or 0.0, arrangement, measurement) for arrangement, measurement in measured.measurements
    ]
    share, arrangement, at = max(tried, key=lambda attempt: attempt[0])
    who = "No arrangement" if len(measured.arrangements) > 1 else arrangement.name
    negation = " keeps " if len(measured.arrangements) > 1 else " does not keep "
    headline = (
        f"{who}{negation}{limits(measured.slo)} for {percent(measured.target)} of the requests at any rate tried."
    )
    if not share:
        return Answer(headline, "Not one request kept all limits.", is_bad=True)
    nearest = f"The nearest was {arrangement.name} at {rate_of(at)}: {percent(share)} kept them."
    return Answer(headline, nearest, is_bad=True)


def _without_slo(measured: MeasuredResult) -> Answer:
    best = max(
        (
            (measurement.summary.get("request_throughput", 0.0), arrangement, measurement)
            for arrangement, measurement in measured.measurements
        ),
        key=lambda attempt: attempt[0],
    )
    throughput, arrangement, at = best
    first = milliseconds(at.summary.get("median_ttft_ms"))
    headline = f"{arrangement.name} answered {per_second(throughput)}, half of the first tokens within {first}."
    return Answer(headline, "No SLO was given with --goodput, so there is no goodput to compare.")


def _baseline(best: Sequence[Capacity]) -> Capacity:
    """The arrangement that the best one is compared with: the colocated one, or else the second best."""
    others = best[1:]
    return next((other for other in others if "colocated" in other.arrangement.name.lower()), others[0])


def _most_frequent_error(measured: MeasuredResult) -> str:
    errors: dict[str, int] = {}
    for _, measurement in measured.measurements:
        for error, count in measurement.errors.items():
            errors[error] = errors.get(error, 0) + count
    if not errors:
        return "The result does not say why."
    return f"Most often: {max(errors, key=lambda error: errors[error])}"


def _middle_rate(measured: MeasuredResult) -> float | None:
    rates = sorted(measurement.rate for _, measurement in measured.measurements if measurement.rate is not None)
    return rates[len(rates) // 2] if rates else None


def _by_rate(arrangement: Arrangement) -> list[tuple[float, list[Measurement]]]:
    """Groups repeated measurements by rate, in rising order; infinity: unpaced."""
    by_rate: dict[float, list[Measurement]] = {}
    for measurement in arrangement.measurements:
        by_rate.setdefault(math.inf if measurement.rate is None else measurement.rate, []).append(measurement)
    return sorted(by_rate.items())


def _middle_attainment(runs: Sequence[Measurement]) -> float | None:
    shares = [run.attainment for run in runs if run.attainment is not None]
    return median(shares) if shares else None


def _nearest(rates: Sequence[tuple[float, list[Measurement]]], wanted: float) -> tuple[float, list[Measurement]]:
    exact = [group for group in rates if group[0] == wanted]
    return exact[0] if exact else min(rates, key=lambda group: abs(group[0] - wanted))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
