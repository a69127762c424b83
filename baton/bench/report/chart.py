"""Plots as SVG and HTML, without a library, for screens of any size.

Lines and bars are one SVG that is stretched to the available space. Text is HTML on top of it and keeps its size on
every screen. Colours are classes of the style sheet (`s0` to `s7`), so a plot works on dark and light pages. Elements
that a reader may point at have a tooltip (`data-tip`, or `data-points` for the nearest point of a line).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.bench.report.html import Markup, join, tag

# Axes of plots: positions of values, and the ticks.


EXTENT = 1000.0
"""Length of every axis in its plot's own units; the page scales plots to the available space."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled value. On narrow screens only major ticks are shown."""

    value: float
    text: str
    is_major: bool


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`."""

    title: str
    low: float
    high: float
    ticks: tuple[Tick, ...]
    is_logarithmic: bool = False

    def at(self, value: float) -> float:
        """The value's position, from 0 to EXTENT; values outside of the axis are moved to its end."""
        if self.is_logarithmic:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share)) * EXTENT


def linear(title: str, high: float, text: Callable[[float], str], low: float = 0.0, count: int = 5) -> Axis:
    """A linear axis from `low` to at least `high`, with about `count` ticks at round values."""
    high = high if math.isfinite(high) and high > low else low + 1.0
    step = _round_step((high - low) / count)
    last = math.ceil((high - low) / step - 1e-9)
    ticks = tuple(Tick(low + i * step, text(low + i * step), i % 2 == 0) for i in range(last + 1))
    return Axis(title, low, low + last * step, ticks)


def exact(title: str, low: float, high: float, unit: str, count: int = 6) -> Axis:
    """A linear axis from `low` to exactly `high`, with ticks at round values that have as many decimals as needed."""
    high = high if high > low else low + 1.0
    step = _round_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    values = [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
    decimals = next((digits for digits in range(9) if abs(round(step, digits) - step) < step * 1e-6), 9)
    ticks = (Tick(value, f"{value:,.{decimals}f}\u00a0{unit}", i % 2 == 0) for i, value in enumerate(values))
    return Axis(title, low, high, tuple(ticks))


def logarithmic(title: str, low: float, high: float, text: Callable[[float], str]) -> Axis:
    """A logarithmic axis that contains `low` and `high`, both above 0, with ticks at 1, 2 and 5 times powers of 10."""
    low, high = low / 1.1, high * 1.1
    if high / low < 4:
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    leads = (1, 2, 5) if high / low < 300 else (1,)
    values = [(lead, lead * 10.0**decade) for decade in decades for lead in leads]
    inside = [(lead, value) for lead, value in values if low <= value <= high]
    every = max(1, len(inside) // 5) if len(leads) == 1 else 1
    ticks = (
        Tick(value, text(value), high / low < 30 or (lead == 1 and index % every == 0))
        for index, (lead, value) in enumerate(inside)
    )
    return Axis(title, low, high, tuple(ticks), is_logarithmic=True)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(lead * power for lead in (1, 2, 2.5, 5, 10) if lead * power >= step * (1 - 1e-9))


COLOURS = 8
"""Number of different colours of series."""


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a line, with its tooltip."""

    x: float
    y: float
    tip: str


@dataclass(frozen=True, slots=True)
class Line:
    """A series that is drawn as a line. `colour`: its number, the same in every plot of a page."""

    name: str
    colour: int
    points: Sequence[Point]
    has_dots: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """A series that is drawn as a histogram. Bars are (from, to, height, tooltip), in the axes' values."""

    name: str
    colour: int
    bars: Sequence[tuple[float, float, float, str]]


@dataclass(frozen=True, slots=True)
class Mark:
    """A reference line: vertical at `x`, horizontal at `y`, or from (0, 0) with a slope."""

    text: str
    x: float | None = None
    slope: float | None = None
    y: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot. `name` is its id in the page, `label` its text for screen readers."""

    name: str
    label: str
    x: Axis
    y: Axis
    lines: Sequence[Line] = ()
    bars: Sequence[Bars] = ()
    marks: Sequence[Mark] = ()
    is_strip: bool = False
    """Whether it is one of several low plots with a common axis, which have no text except their name."""
    has_legend: bool = True


def draw(chart: Chart) -> Markup:
    """Renders the plot with its axes and legend."""
    shapes = [
        *_grid(chart),
        *(_histogram(chart, bars) for bars in chart.bars),
        *(_mark(chart, mark) for mark in chart.marks),
        *(_line(chart, line) for line in chart.lines),
    ]
    words = [*_labels(chart), *(_mark_text(chart, mark) for mark in chart.marks)]
    points = [_tooltips(chart, line) for line in chart.lines]
    plot = tag(
        "div",
        canvas(join(*shapes), "drawing"),
        *words,
        class_="plot strip" if chart.is_strip else "plot",
        id=chart.name,
        role="img",
        aria_label=chart.label,
        data_points=json.dumps(points, ensure_ascii=False) if points else None,
    )
    return join(
        legend(_names(chart)) if chart.has_legend else None,
        tag("div", chart.y.title, class_="axis-title") if chart.y.title else None,
        tag("div", plot, class_="frame"),
        tag("div", chart.x.title, class_="axis-title below") if chart.x.title else None,
    )


def canvas(shapes: Markup, class_: str) -> Markup:
    """An SVG of EXTENT by EXTENT units, stretched to the element around it."""
    extent = f"0 0 {EXTENT:g} {EXTENT:g}"
    return tag("svg", shapes, class_=class_, viewBox=extent, preserveAspectRatio="none", aria_hidden="true")


def legend(names: Mapping[str, str]) -> Markup:
    """A legend. `names`: the style sheet's class for each name."""
    items = (tag("li", tag("i", class_=colour), name) for name, colour in names.items())
    return tag("ul", *items, class_="legend")


def share(position: float) -> str:
    """A position on an axis as a CSS percentage."""
    return f"{position / EXTENT * 100:.3f}%"


def series_class(colour: int) -> str:
    """The style sheet's class for the series with this number."""
    return f"s{colour % COLOURS}"


def _names(chart: Chart) -> dict[str, str]:
    named = {line.name: series_class(line.colour) for line in chart.lines}
    named |= {bars.name: series_class(bars.colour) for bars in chart.bars}
    return named | {mark.text: "dashed" for mark in chart.marks if mark.x is None}


def _y(axis: Axis, value: float) -> float:
    return EXTENT - axis.at(value)


def _grid(chart: Chart) -> list[Markup]:
    level = [_segment(0, _y(chart.y, tick.value), EXTENT, _y(chart.y, tick.value), "grid") for tick in chart.y.ticks]
    up = [_segment(chart.x.at(tick.value), 0, chart.x.at(tick.value), EXTENT, "grid") for tick in chart.x.ticks]
    return [*level, *up]


def _segment(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def _path(chart: Chart, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{chart.x.at(point.x):.1f} {_y(chart.y, point.y):.1f}" for point in points)


def _line(chart: Chart, line: Line) -> Markup:
    if not line.points:
        return Markup()
    colour = series_class(line.colour)
    drawn = tag("path", d=_path(chart, line.points), class_=f"line {colour}")
    if not line.has_dots:
        return drawn
    # A line of length 0 with round ends is a dot that stays round when the plot is stretched.
    dots = "".join(f"M{chart.x.at(point.x):.1f} {_y(chart.y, point.y):.1f}h0" for point in line.points)
    return join(drawn, tag("path", d=dots, class_=f"dots {colour}"))


def _histogram(chart: Chart, series: Bars) -> Markup:
    """All bars as one path, and an invisible rectangle over each bar for its tooltip."""
    colour = series_class(series.colour)
    filled = [bar for bar in series.bars if bar[2] > 0]
    outline = "".join(
        f"M{chart.x.at(low):.1f} {EXTENT:g}V{_y(chart.y, height):.1f}H{chart.x.at(high):.1f}V{EXTENT:g}Z"
        for low, high, height, _ in filled
    )
    pointed = (
        tag(
            "rect",
            x=chart.x.at(low),
            width=chart.x.at(high) - chart.x.at(low),
            y=_y(chart.y, height),
            height=chart.y.at(height),
            class_="unseen",
            data_tip=tip,
        )
        for low, high, height, tip in filled
    )
    return join(tag("path", d=outline, class_=f"bars {colour}") if outline else None, *pointed)


def _mark(chart: Chart, mark: Mark) -> Markup:
    if mark.slope is not None:
        far = min(chart.x.high, chart.y.high / mark.slope) if mark.slope else chart.x.high
        return _segment(chart.x.at(0), _y(chart.y, 0), chart.x.at(far), _y(chart.y, far * mark.slope), "mark")
    if mark.y is not None:
        return _segment(0, _y(chart.y, mark.y), EXTENT, _y(chart.y, mark.y), "mark")
    x = chart.x.at(mark.x or 0.0)
    return _segment(x, 0, x, EXTENT, "mark")


def _mark_text(chart: Chart, mark: Mark) -> Markup | None:
    """The text beside a vertical mark; other marks are in the legend."""
    if mark.x is None or chart.is_strip:
        return None
    left = chart.x.at(mark.x)
    side = "before" if left > EXTENT / 2 else "after"
    return tag("span", mark.text, class_=f"mark-text {side}", style=f"left:{share(left)}")


def _labels(chart: Chart) -> list[Markup]:
    if chart.is_strip:
        return [tag("span", chart.label, class_="strip-name")]
    up = [tag("span", tick.text, class_="y", style=f"top:{share(_y(chart.y, tick.value))}") for tick in chart.y.ticks]
    return [*across(chart.x), *up]


def across(x: Axis) -> list[Markup]:
    """The labels below an axis."""
    return [
        tag("span", tick.text, class_="x" if tick.is_major else "x minor", style=f"left:{share(x.at(tick.value))}")
        for tick in x.ticks
    ]


def _tooltips(chart: Chart, line: Line) -> dict[str, object]:
    """The points of a line for the script: positions in percent, and tooltips."""
    return {
        "name": line.name,
        "colour": line.colour % COLOURS,
        "points": [
            [round(chart.x.at(point.x) / EXTENT * 100, 2), round(_y(chart.y, point.y) / EXTENT * 100, 2), point.tip]
            for point in line.points
        ],
    }


# Kinds of work of nodes and stages of requests; each has the same colour in every plot of every report.

_KNOWN = ("prefill", "decode", "mixed", "transfer", "queue")
_TRANSFERS = frozenset({"transfer", "pull", "read", "push"})


def work_colours(kinds: Iterable[str]) -> Mapping[str, str]:
    """The style sheet's class for each kind, in the order of the kinds; unknown kinds get the free colours."""
    given = list(dict.fromkeys(kinds))
    free = iter(range(len(given)))
    return {
        kind: f"w{_KNOWN.index(kind) if kind in _KNOWN else (len(_KNOWN) + next(free)) % COLOURS}" for kind in given
    }


def in_order(kinds: Iterable[str]) -> list[str]:
    """Sorts kinds: known ones first, in the order in which a request passes through them."""
    return sorted(set(kinds), key=lambda kind: (_KNOWN.index(kind) if kind in _KNOWN else len(_KNOWN), kind))


def has_prompt(kind: str) -> bool:
    """Whether the kind is a step that computes prompts or chunks of prompts."""
    return kind in ("prefill", "mixed")


def is_transfer(kind: str) -> bool:
    """Whether the kind transfers KV while steps are computed."""
    return kind in _TRANSFERS
