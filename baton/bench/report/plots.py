"""The sections on rates, SLOs and latencies, each with plots and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from baton.bench.report.chart import (
    Axis,
    Bars,
    Chart,
    Line,
    Mark,
    Point,
    across,
    draw,
    legend,
    linear,
    logarithmic,
    work_colours,
)
from baton.bench.report.comparison import Capacity, Compared, capacities, compared, limits, rate_of
from baton.bench.report.distribution import Distribution
from baton.bench.report.html import NOTHING, Markup, Section, join, milliseconds, number, percent, plural, table, tag
from baton.bench.report.measured import Arrangement, MeasuredResult, Measurement
from baton.bench.results.summary import SLO_SCALES, limit_text

_HISTOGRAM_BARS = 48
_MAX_SERIES = 8
"""Largest number of lines in a plot; further arrangements are only in the tables."""
_NO_SLO = "This result has no SLO: give one with --goodput ttft:MS tpot:MS."


def overview(measured: MeasuredResult) -> Section:
    """All measurements as a table, a row for each arrangement and rate."""
    columns = ["Arrangement", "On", "Offered/s", "Good/s", "Meet SLO", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"]
    columns += ["Largest gap p99", "Tokens/s", "Requests", "Failed"]
    rows = [
        [arrangement.name, _engines(arrangement), *_row(measurement)]
        for arrangement, measurement in measured.measurements
    ]
    reading = "Times count from a request's planned time. Good: requests per second that kept all limits."
    if not rows:
        return Section("figures", "All figures", reading, None, None, "Nothing was measured.")
    return Section("figures", "All figures", reading, table(columns, rows, "Every measurement"), None, is_wide=True)


def goodput(measured: MeasuredResult) -> Section:
    """Good requests per second over offered ones."""
    title, name = "How much load it serves", "goodput"
    reading = (
        f"Requests per second that kept {limits(measured.slo)}, over the offered rate. While a line is on or above the "
        f"dashed one, at least {percent(measured.target)} of the offered requests are served in time."
    )
    coloured = [(arrangement, colour) for colour, arrangement in enumerate(measured.arrangements[:_MAX_SERIES])]
    lines = [
        Line(arrangement.name, colour, _goodput_points(arrangement), has_dots=True) for arrangement, colour in coloured
    ]
    lines = [line for line in lines if line.points]
    if not measured.slo or not lines:
        missing = _NO_SLO if not measured.slo else "The load had no rate: requests were sent as fast as possible."
        return Section(name, title, reading, None, None, missing)
    highest = max(point.x for line in lines for point in line.points)
    x = linear("offered, requests/s", highest, number)
    y = linear("good, requests/s", max(point.y for line in lines for point in line.points) or highest, number)
    mark = Mark(f"{percent(measured.target)} of the offered rate", slope=measured.target)
    chart = Chart("plot-goodput", "Good requests per second over offered ones", x, y, lines, marks=[mark])
    best = capacities(measured)
    spreads = {capacity.arrangement.name: spread for capacity in best if (spread := _spread_text(capacity))}
    rows = [_capacity_row(capacity, spreads) for capacity in best]
    shown = {capacity.arrangement.name for capacity in best}
    none = ["none", *(["none"] if spreads else []), "0"]
    rows += [[arrangement.name, *none] for arrangement in measured.arrangements if arrangement.name not in shown]
    columns = ["Arrangement", "Up to", *(["Repeated"] if spreads else []), f"Per {_unit(measured)}"]
    caption = "The highest rate within the SLO, requests/s"
    return Section(name, title, reading, draw(chart), table(columns, rows, caption))


def attainment(measured: MeasuredResult) -> Section:
    """The share of requests that meet stricter and laxer limits."""
    title, name = "Attainment with stricter and laxer limits", "attainment"
    chosen = compared(measured)
    reading = (
        f"The share of the offered requests that keep {limits(measured.slo)}, with all limits multiplied by the same "
        f"factor. {_rates_of(chosen)}"
    )
    if not measured.slo:
        return Section(name, title, reading, None, None, _NO_SLO)
    by_scale = [(choice, pairs) for choice in chosen if (pairs := _attainment_by_scale(choice.at, measured))]
    lines = [
        Line(
            choice.arrangement.name,
            choice.colour,
            [Point(scale, share, f"{percent(share)} at {number(scale)} x") for scale, share in pairs],
            has_dots=True,
        )
        for choice, pairs in by_scale[:_MAX_SERIES]
    ]
    if not lines:
        return Section(name, title, reading, None, None, "The result has no outcomes of single requests.")
    highest = max(point.x for line in lines for point in line.points)
    x = linear("multiple of the SLO (left: stricter)", highest, number, count=8)
    y = linear("share of requests that keep it", 1.0, percent)
    marks = [Mark("the SLO", x=1.0), Mark(percent(measured.target), y=measured.target)]
    chart = Chart("plot-attainment", "Share of requests that keep a multiple of the SLO", x, y, lines, marks=marks)
    shown = [scale for scale in (0.5, 1.0, 2.0, 4.0) if scale <= highest]
    rows = [
        [choice.arrangement.name, *(percent(_at_scale(pairs, scale)) for scale in shown)]
        for choice, pairs in by_scale
        if pairs
    ]
    columns = ["Arrangement", *(f"{number(scale)} x" for scale in shown)]
    return Section(name, title, reading, draw(chart), table(columns, rows, "Share that keeps a multiple of the SLO"))


def first_tokens(measured: MeasuredResult) -> Section:
    """Distribution of the time to first token."""
    return _distribution(
        measured,
        "ttft",
        "Time to first token",
        "Time from a request's planned time to its first token.",
        lambda measurement: measurement.ttft,
        measured.slo.ttft_ms,
    )


def token_gaps(measured: MeasuredResult) -> Section:
    """Distribution of the time between tokens."""
    return _distribution(
        measured,
        "itl",
        "Time between tokens",
        "Gaps between messages with tokens of a request. A reader notices the longest ones as stalls.",
        lambda measurement: measurement.itl,
        measured.slo.tpot_ms,
    )


def first_token_parts(measured: MeasuredResult) -> Section:
    """Mean time to first token by stage."""
    title, name = "Time to first token by stage", "parts"
    chosen = compared(measured)
    reading = f"Mean milliseconds of each stage before the first token. {_rates_of(chosen)}"
    split = [choice for choice in chosen if sum(choice.at.ttft_parts_ms.values()) > 0]
    if not split:
        return Section(name, title, reading, None, None, "The result has no durations of stages.")
    parts = work_colours(part for choice in split for part in choice.at.ttft_parts_ms)
    longest = max(sum(choice.at.ttft_parts_ms.values()) for choice in split)
    bars = [_stacked(choice, parts, longest) for choice in split]
    label = "Mean time to first token by stage: the table has the figures"
    plot = tag("div", *bars, class_="stacks", id="plot-parts", role="img", aria_label=label)
    rows = [
        [
            part,
            *(milliseconds(choice.at.ttft_parts_ms.get(part)) for choice in split),
        ]
        for part in parts
    ]
    rows.append(["sum", *(milliseconds(sum(choice.at.ttft_parts_ms.values())) for choice in split)])
    columns = ["Stage", *(choice.arrangement.name for choice in split)]
    return Section(name, title, reading, join(legend(parts), plot), table(columns, rows, "Mean time of each stage"))


def _distribution(
    measured: MeasuredResult,
    name: str,
    title: str,
    meaning: str,
    of: Callable[[Measurement], Distribution],
    limit_ms: float | None,
) -> Section:
    chosen = compared(measured)
    reading = f"{meaning} {_rates_of(chosen)}"
    distributions = [(choice, of(choice.at)) for choice in chosen]
    distributions = [(choice, distribution) for choice, distribution in distributions if distribution.count]
    if not distributions:
        return Section(name, title, reading, None, None, "Nothing was measured: no request got that far.")
    drawn = distributions[:_MAX_SERIES]
    x = _time_axis([distribution for _, distribution in drawn])
    marks = [Mark(f"SLO {limit_text(limit_ms)} ms", x=limit_ms)] if limit_ms and x.low <= limit_ms <= x.high else []
    lines = [_cumulative(choice, distribution) for choice, distribution in drawn]
    y = linear("share that took at most this long", 1.0, percent)
    cdf = Chart(f"plot-{name}-cdf", f"{title}: cumulative distribution", x, y, lines, marks=marks)
    figure = join(draw(cdf), *_histograms(drawn, x, name, marks))
    return Section(name, title, reading, figure, _quantiles(distributions, name, limit_ms))


def _histograms(
    drawn: Sequence[tuple[Compared, Distribution]], x: Axis, name: str, marks: Sequence[Mark]
) -> list[Markup]:
    """A low plot for each arrangement, one below the other, with the same axes."""
    series = [_bars(choice, distribution, x) for choice, distribution in drawn]
    highest = max(height for bars in series for _, _, height, _ in bars.bars)
    y = Axis("", 0.0, highest or 1.0, ())
    strips = [
        draw(
            Chart(
                f"plot-{name}-histogram-{bars.colour}",
                bars.name,
                x,
                y,
                bars=[bars],
                marks=marks,
                is_strip=True,
                has_legend=False,
            )
        )
        for bars in series
    ]
    title = tag("div", f"share of all; the same scale in each plot, up to {percent(highest)}", class_="axis-title")
    return [title, *strips, tag("div", tag("div", *across(x), class_="lane-axis"), class_="frame")]


def _cumulative(choice: Compared, distribution: Distribution) -> Line:
    points = [
        Point(reached.at_ms, reached.share, f"{percent(reached.share)} within {milliseconds(reached.at_ms)}")
        for reached in distribution.cumulative()
    ]
    return Line(choice.arrangement.name, choice.colour, points)


def _bars(choice: Compared, distribution: Distribution, x: Axis) -> Bars:
    name = choice.arrangement.name
    bars = []
    for bar in distribution.bars(x.low, x.high, _HISTOGRAM_BARS):
        tip = f"{name}: {percent(bar.share)} took {milliseconds(bar.low_ms)} to {milliseconds(bar.high_ms)}"
        bars.append((bar.low_ms, bar.high_ms, bar.share, tip))
    return Bars(name, choice.colour, bars)


def _quantiles(distributions: Sequence[tuple[Compared, Distribution]], name: str, limit_ms: float | None) -> Markup:
    columns = ["Arrangement", "mean", "p50", "p90", "p99"]
    columns += [f"≤ {limit_text(limit_ms)} ms"] if limit_ms else []
    rows = []
    for choice, distribution in distributions:
        summary = choice.at.summary
        median = summary.get(f"median_{name}_ms", distribution.quantile(0.5))
        last = summary.get(f"p99_{name}_ms", distribution.quantile(0.99))
        times = [summary.get(f"mean_{name}_ms"), median, distribution.quantile(0.9), last]
        kept = [percent(distribution.within(limit_ms))] if limit_ms else []
        rows.append([choice.arrangement.name, *map(milliseconds, times), *kept])
    return table(columns, rows, "Requests that were answered")


def _time_axis(distributions: Sequence[Distribution]) -> Axis:
    """An axis that contains 99.9 % of the values."""
    low = min(distribution.quantile(0.0005) or 1.0 for distribution in distributions)
    high = max(distribution.quantile(0.9995) or 1.0 for distribution in distributions)
    return logarithmic("", low, high, milliseconds)


def _stacked(choice: Compared, parts: Mapping[str, str], longest: float) -> Markup:
    total = sum(choice.at.ttft_parts_ms.values())
    pieces = []
    for part, colour in parts.items():
        if took := choice.at.ttft_parts_ms.get(part):
            tip = f"{part}: {milliseconds(took)}, {percent(took / total)}"
            width = f"width:{took / longest * 100:.3f}%"
            pieces.append(tag("span", class_=colour, style=width, data_tip=tip))
    name = tag("div", tag("b", choice.arrangement.name), f" {milliseconds(total)}", class_="stack-name")
    return join(name, tag("div", *pieces, class_="stack"))


def _goodput_points(arrangement: Arrangement) -> list[Point]:
    """A point for each rate: the median of repeated measurements."""
    by_rate: dict[float, list[Measurement]] = {}
    for measurement in arrangement.measurements:
        if measurement.rate is not None and "request_goodput" in measurement.summary:
            by_rate.setdefault(measurement.rate, []).append(measurement)
    points = []
    for rate, runs in by_rate.items():
        good = median(run.summary["request_goodput"] for run in runs)
        kept = median(run.attainment or 0.0 for run in runs)
        points.append(Point(rate, good, f"{number(good)} of {number(rate)} requests/s, {percent(kept)}"))
    return points


def _spread_text(capacity: Capacity) -> str:
    """The spread of repeated searches; empty if there was one search, or all found the same."""
    spread = capacity.arrangement.goodput
    return f"{number(spread.p10)} … {number(spread.p90)}" if spread and spread.p10 < spread.p90 else ""


def _capacity_row(capacity: Capacity, spreads: Mapping[str, str]) -> list[str]:
    """`spreads`: if any arrangement has one, there is a column for it."""
    goodput = f"≥ {number(capacity.goodput)}" if capacity.is_highest_tried else number(capacity.goodput)
    spread = [spreads.get(capacity.arrangement.name, "none")] if spreads else []
    return [capacity.arrangement.name, goodput, *spread, number(capacity.goodput_per_engine())]


def _unit(measured: MeasuredResult) -> str:
    units = {arrangement.unit for arrangement in measured.arrangements}
    return units.pop() if len(units) == 1 else "engine"


def _attainment_by_scale(at: Measurement, measured: MeasuredResult) -> Sequence[tuple[float, float]]:
    if at.attainment_by_scale or at.latencies is None:
        return at.attainment_by_scale
    return [(scale, at.latencies.within(measured.slo.scaled(scale))) for scale in SLO_SCALES]


def _at_scale(pairs: Sequence[tuple[float, float]], scale: float) -> float:
    return float(np.interp(scale, [known_scale for known_scale, _ in pairs], [share for _, share in pairs]))


def _row(measurement: Measurement) -> list[str]:
    figures = measurement.summary
    times = ["median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_largest_gap_ms"]
    return [
        "unpaced" if measurement.rate is None else number(measurement.rate),
        number(figures.get("request_goodput")),
        percent(measurement.attainment),
        *(milliseconds(figures.get(name)) for name in times),
        number(figures.get("output_throughput")),
        f"{measurement.offered:,}",
        f"{measurement.failed:,}",
    ]


def _engines(arrangement: Arrangement) -> str:
    return plural(round(arrangement.engines), arrangement.unit) if arrangement.engines else NOTHING


def _rates_of(chosen: Sequence[Compared]) -> str:
    rates = {choice.at.rate for choice in chosen}
    if not chosen:
        return ""
    if len(rates) == 1:
        return f"All at {rate_of(chosen[0].at)}." if len(chosen) > 1 else f"At {rate_of(chosen[0].at)}."
    return "At " + ", ".join(f"{rate_of(choice.at)} ({choice.arrangement.name})" for choice in chosen) + "."
