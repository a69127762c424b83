"""The section on tenants: what each of them got of the service, and how long it waited, over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from baton.bench.report.chart import Chart, Line, Mark, Point, draw, exact, linear, logarithmic
from baton.bench.report.comparison import rate_of
from baton.bench.report.html import Markup, Section, join, milliseconds, number, percent, table, tag
from baton.bench.report.measured import Arrangement, MeasuredResult, Measurement, TenantFigures, TenantSeries, Values

_MAX_TENANTS = 8
"""Largest number of lines in a plot; further tenants are only in the table."""
_MAX_MEASUREMENTS = 4
"""Largest number of measurements that are drawn."""


def tenants(measured: MeasuredResult) -> Section:
    """Shares of the service and times to first token, over time; and each tenant's figures in each period."""
    of_tenants = [
        (arrangement, measurement, measurement.tenants)
        for arrangement, measurement in measured.measurements
        if measurement.tenants is not None
    ]
    reading = (
        "Service is counted as the router counts it: tokens of prompts that were not cached, and twice the generated "
        "ones unless it was told otherwise. Dashed lines: a tenant begins to send, or ends."
    )
    drawn = [
        _plots(str(place), _heading(arrangement, measurement), figures)
        for place, (arrangement, measurement, figures) in enumerate(of_tenants[:_MAX_MEASUREMENTS])
    ]
    rows = [row for arrangement, _, figures in of_tenants for row in _rows(arrangement.name, figures)]
    columns = ["Measurement", "Seconds", "Tenant", "Class", "Weight", "Offered", "Served", "Refused", "TTFT p50"]
    columns += ["TTFT p99", "TPOT p50", "Tokens/s", "Share", "Share / weight"]
    figures_of_all = table(columns, rows, "What each tenant got while the same tenants sent")
    return Section("tenants", "What each tenant got", reading, join(*drawn), figures_of_all, is_wide=True)


def _heading(arrangement: Arrangement, measurement: Measurement) -> str:
    return f"{arrangement.name}, {rate_of(measurement)}"


def _plots(name: str, heading: str, figures: TenantFigures) -> Markup:
    starts = figures.windows_from_s
    x = exact("", 0.0, float(starts.max(initial=0.0)) + figures.window_s, "s")
    edges = sorted({edge for period in figures.periods for edge in (period.begin_s, period.end_s)})
    marks = [Mark("", x=edge) for edge in edges if x.low < edge < x.high]
    middles = starts + figures.window_s / 2
    total = np.sum([each.service for each in figures.series], axis=0)
    lines, late = [], []
    for colour, each in enumerate(figures.series[:_MAX_TENANTS]):
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = each.service / total
        lines.append(Line(each.name, colour, _points(middles, shares, each, percent)))
        late.append(Line(each.name, colour, _points(middles, each.ttft_ms, each, milliseconds), has_dots=True))
    share_title = f"share of the service, in windows of {number(figures.window_s)} s"
    charts = [
        Chart(f"plot-tenants-share-{name}", share_title, x, linear(share_title, 1.0, percent), lines, marks=marks)
    ]
    times = [point.y for line in late for point in line.points if point.y > 0]
    if times:
        y = logarithmic("median time to first token, by when a request was due", min(times), max(times), milliseconds)
        charts.append(Chart(f"plot-tenants-ttft-{name}", y.title, x, y, late, marks=marks, has_legend=False))
    return join(tag("h3", heading), *map(draw, charts))


def _points(middles: Values, values: Values, series: TenantSeries, text: Callable[[float], str]) -> Sequence[Point]:
    return [
        Point(float(at), float(value), f"{series.name}: {text(float(value))} at {number(float(at))} s")
        for at, value in zip(middles, values, strict=True)
        if np.isfinite(value)
    ]


def _rows(name: str, figures: TenantFigures) -> list[list[str]]:
    return [
        [
            name,
            f"{number(period.begin_s)} to {number(period.end_s)}",
            tenant,
            service_class,
            number(row.get("weight")),
            *(f"{row.get(key, 0):,.0f}" for key in ("offered", "completed", "refused")),
            *(milliseconds(row.get(key)) for key in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")),
            number(row.get("total_token_throughput")),
            percent(row.get("service_share")),
            number(row.get("service_share_per_weight")),
        ]
        for period in figures.periods
        for tenant, service_class, row in period.rows
        if row.get("offered") or row.get("service_share")
    ]
