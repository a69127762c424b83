"""Timelines of nodes, one lane for each node: as shares of time, or step by step.

Shares are drawn in a fixed number of columns, so a million steps take as much space as a hundred. Steps are in the
upper part of a lane, and transfers of KV in the lower part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from baton.bench.report import work
from baton.bench.report.axis import EXTENT, Axis
from baton.bench.report.chart import across, canvas
from baton.bench.report.figures import number, plural
from baton.bench.report.markup import Markup, join, tag
from baton.bench.report.measured import Interval

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
        seen = [one for one in intervals if one.end_s >= x.low and one.start_s <= x.high]
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
        if work.is_transfer(kind):
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
    spans = np.array([(one.start_s, one.end_s) for one in intervals if one.kind == kind]).reshape(-1, 2)
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
    return join(*(_step(one, x, kinds[one.kind]) for one in intervals))


def _step(one: Interval, x: Axis, colour: str) -> Markup:
    left, right = x.at(one.start_s), x.at(one.end_s)
    top, bottom = _TRANSFERS if work.is_transfer(one.kind) else _STEPS
    return tag(
        "rect",
        x=left,
        width=max(right - left, 1.0),
        y=top,
        height=bottom - top,
        class_=f"step {colour}",
        data_tip=_tip(one),
    )


def _tip(one: Interval) -> str:
    took = f"{one.kind}: {number((one.end_s - one.start_s) * 1e3)} ms at {one.start_s:.3f} s"
    if one.size is None:
        return took
    size = f"{number(one.size / 1e6)} MB" if work.is_transfer(one.kind) else plural(round(one.size), "token")
    return f"{took}, {size}"
