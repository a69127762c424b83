"""The section that shows what every node did: the whole run, and an excerpt step by step.

The excerpt is around the longest step that computes a prompt, since other requests waited for it, and is so short that
single steps can be seen. Many steps that only decode may be one interval: the simulator executes them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from baton.bench.report.chart import (
    EXTENT,
    Axis,
    across,
    canvas,
    exact,
    has_prompt,
    in_order,
    is_transfer,
    legend,
    work_colours,
)
from baton.bench.report.comparison import Compared, compared, rate_of
from baton.bench.report.html import Markup, Section, join, number, percent, plural, table, tag
from baton.bench.report.measured import Interval, MeasuredResult

# Timelines of nodes, one lane for each node: as shares of time, or step by step.
#
# Shares are drawn in a fixed number of columns, so a million steps take as much space as a hundred. Steps are in the
# upper part of a lane, and transfers of KV in the lower part.


Values = npt.NDArray[np.float64]
Rows = Mapping[str, Sequence[Interval]]
"""Intervals by node. The parameter `kinds` of functions here is the colour of each kind of work."""

_COLUMNS = 240
_MAX_SHAPES = 400
"""More steps in one lane can't be distinguished."""
_STEPS = (0.0, 720.0)
_TRANSFERS = (780.0, EXTENT)
"""Upper and lower end of the two parts of a lane."""


def draw_shares(name: str, label: str, x: Axis, kinds: Mapping[str, str], rows: Rows) -> Markup:
    """Draws the share of time that each kind of work took."""
    return _lanes(name, label, x, {node: _shares(intervals, x, kinds) for node, intervals in rows.items()})


def draw_steps(name: str, label: str, x: Axis, kinds: Mapping[str, str], rows: Rows) -> Markup:
    """Draws each step; a lane with too many steps is drawn as shares."""
    lanes = {}
    for node, intervals in rows.items():
        seen = [interval for interval in intervals if interval.end_s >= x.low and interval.start_s <= x.high]
        lanes[node] = _steps(seen, x, kinds) if len(seen) <= _MAX_SHAPES else _shares(seen, x, kinds)
    return _lanes(name, label, x, lanes)


def _lanes(name: str, label: str, x: Axis, lanes: Mapping[str, Markup]) -> Markup:
    idle = tag("rect", x=0, y=0, width=EXTENT, height=EXTENT, class_="idle")
    drawn = (
        join(tag("div", node, class_="node"), canvas(join(idle, shapes), "lane")) for node, shapes in lanes.items()
    )
    return tag(
        "div",
        tag("div", label, class_="axis-title"),
        *drawn,
        tag("div", *across(x), class_="lane-axis"),
        class_="lanes",
        id=name,
        role="img",
        aria_label=f"Timeline of nodes: {label}",
    )


def _shares(intervals: Sequence[Interval], x: Axis, kinds: Mapping[str, str]) -> Markup:
    shapes = []
    filled = np.zeros(_COLUMNS)
    for kind, colour in kinds.items():
        busy = busy_shares(intervals, kind, x)
        if is_transfer(kind):
            shapes.append(_columns(np.minimum(busy, 1.0), np.zeros(_COLUMNS), colour, _TRANSFERS))
            continue
        busy = np.minimum(busy, 1.0 - filled)
        shapes.append(_columns(busy, filled, colour, _STEPS))
        filled = filled + busy
    return join(*shapes)


def _columns(shares: Values, below: Values, colour: str, part: tuple[float, float]) -> Markup:
    """Columns of heights `shares`, on top of columns of heights `below`."""
    width, (top, bottom) = EXTENT / _COLUMNS, part
    tall = bottom - top
    outline = "".join(
        f"M{at * width:.1f} {bottom - tall * under:.0f}h{width:.2f}v{-tall * height:.0f}h-{width:.2f}Z"
        for at, (height, under) in enumerate(zip(shares.tolist(), below.tolist(), strict=True))
        if height > 0.002
    )
    return tag("path", d=outline, class_=f"solid {colour}") if outline else Markup()


def busy_shares(intervals: Sequence[Interval], kind: str, x: Axis) -> Values:
    """The share of each column's time that this kind of work took."""
    spans = np.array([(interval.start_s, interval.end_s) for interval in intervals if interval.kind == kind]).reshape(
        -1, 2
    )
    edges = np.linspace(x.low, x.high, _COLUMNS + 1)
    # Busy time before an edge: time since each interval's start, minus time since each interval's end.
    spent = _passed(edges, np.sort(spans[:, 0])) - _passed(edges, np.sort(spans[:, 1]))
    return np.asarray(np.diff(spent) / (edges[1] - edges[0]), dtype=np.float64)


def _passed(edges: Values, times: Values) -> Values:
    """For each edge, the sum of the time that has passed since each of the earlier times."""
    sums = np.concatenate((np.zeros(1), np.cumsum(times)))
    before = np.searchsorted(times, edges)
    return np.asarray(before * edges - sums[before], dtype=np.float64)


def _steps(intervals: Sequence[Interval], x: Axis, kinds: Mapping[str, str]) -> Markup:
    return join(*(_step(interval, x, kinds[interval.kind]) for interval in intervals))


def _step(interval: Interval, x: Axis, colour: str) -> Markup:
    left, right = x.at(interval.start_s), x.at(interval.end_s)
    top, bottom = _TRANSFERS if is_transfer(interval.kind) else _STEPS
    return tag(
        "rect",
        x=left,
        width=max(right - left, 1.0),
        y=top,
        height=bottom - top,
        class_=f"step {colour}",
        data_tip=_tip(interval),
    )


def _tip(interval: Interval) -> str:
    took = f"{interval.kind}: {number((interval.end_s - interval.start_s) * 1e3)} ms at {interval.start_s:.3f} s"
    if interval.size is None:
        return took
    size = f"{number(interval.size / 1e6)} MB" if is_transfer(interval.kind) else plural(round(interval.size), "token")
    return f"{took}, {size}"


_MAX_NODES = 16
_MAX_STEPS = 60
"""Largest number of intervals of a node in the excerpt."""


def timelines(measured: MeasuredResult) -> Section:
    """The timelines of the nodes of every arrangement."""
    title, name = "What the nodes did", "timeline"
    reading = (
        "The whole run: the share of time that each kind of work took; the rest was idle. Then an excerpt around the "
        "longest step with a prompt, step by step. Transfers of KV are in the narrow lane under a node's steps."
    )
    chosen = [choice for choice in compared(measured) if any(choice.at.timeline.values())]
    if not chosen:
        return Section(name, title, reading, None, None, "The result has no timelines.", is_wide=True)
    all_kinds = (interval.kind for choice in chosen for rows in choice.at.timeline.values() for interval in rows)
    kinds = work_colours(in_order(all_kinds))
    count = max(2, _MAX_NODES // len(chosen))
    shown = [_busiest(choice.at.timeline, count) for choice in chosen]
    plots = [_arrangement(choice, rows, kinds) for choice, rows in zip(chosen, shown, strict=True)]
    columns = ["Node", "Arrangement", *(f"{kind}, of the time" for kind in kinds), "Longest step with a prompt"]
    rows = [row for choice, rows in zip(chosen, shown, strict=True) for row in _table_rows(choice, rows, kinds)]
    figures = table(columns, rows, "Shares of the run")
    return Section(name, title, reading, join(legend(kinds), *plots), figures, is_wide=True)


def _arrangement(choice: Compared, rows: Rows, kinds: Mapping[str, str]) -> Markup:
    hidden = sum(map(bool, choice.at.timeline.values())) - len(rows)
    selection = f", the busiest {len(rows)} of {plural(len(rows) + hidden, 'node')}" if hidden else ""
    begin, end = _span(rows)
    whole = exact("", begin, end, "s")
    excerpt = exact("", *_excerpt(rows), "s", count=5)
    return join(
        tag("h3", f"{choice.arrangement.name} at {rate_of(choice.at)}{selection}"),
        draw_shares(f"plot-timeline-{choice.colour}", "the whole run", whole, kinds, rows),
        draw_steps(
            f"plot-moment-{choice.colour}", "the excerpt around the longest step with a prompt", excerpt, kinds, rows
        ),
    )


def _span(rows: Rows) -> tuple[float, float]:
    """The time from the first start to the last end; never empty."""
    begin = min(interval.start_s for intervals in rows.values() for interval in intervals)
    end = max(interval.end_s for intervals in rows.values() for interval in intervals)
    return begin, max(end, begin + 1e-6)


def _excerpt(rows: Rows) -> tuple[float, float]:
    """Start and end of an excerpt with so few intervals that each can be seen."""
    everything = [interval for intervals in rows.values() for interval in intervals]
    longest = max(everything, key=lambda interval: (has_prompt(interval.kind), interval.end_s - interval.start_s))
    begin, end = _span(rows)
    middle, half = (longest.start_s + longest.end_s) / 2, end - begin
    least = (longest.end_s - longest.start_s) * 0.75
    while half / 2 > least and any(_overlap(intervals, middle, half) > _MAX_STEPS for intervals in rows.values()):
        half /= 2
    return max(begin, middle - half), min(end, middle + half)


def _overlap(intervals: Sequence[Interval], middle: float, half: float) -> int:
    return sum(interval.end_s > middle - half and interval.start_s < middle + half for interval in intervals)


def _busiest(timeline: Rows, count: int) -> Rows:
    """The nodes that worked most of the time, in the order of the result."""
    named = {node: intervals for node, intervals in timeline.items() if intervals}
    ranked = sorted(named, key=lambda node: -sum(interval.end_s - interval.start_s for interval in named[node]))
    kept = set(ranked[:count])
    return {node: intervals for node, intervals in named.items() if node in kept}


def _table_rows(choice: Compared, rows: Rows, kinds: Mapping[str, str]) -> list[list[str]]:
    begin, end = _span(rows)
    written = []
    for node, intervals in rows.items():
        spent = dict.fromkeys(kinds, 0.0)
        for interval in intervals:
            spent[interval.kind] += interval.end_s - interval.start_s
        steps = [interval.end_s - interval.start_s for interval in intervals if has_prompt(interval.kind)]
        longest = f"{number(max(steps) * 1e3)} ms" if steps else "none"
        shares = [percent(min(1.0, took / (end - begin))) for took in spent.values()]
        written.append([node, choice.arrangement.name, *shares, longest])
    return written
