"""The section that shows what every node did: the whole run, and an excerpt step by step.

The excerpt is around the longest step that computes a prompt, since other requests waited for it, and is so short that
single steps can be seen. Many steps that only decode may be one interval: the simulator executes them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.bench.report import axis, work
from baton.bench.report.chart import legend
from baton.bench.report.comparison import Compared, compared, rate_of
from baton.bench.report.figures import number, percent, plural
from baton.bench.report.lanes import Rows, draw_shares, draw_steps
from baton.bench.report.markup import Markup, join, tag
from baton.bench.report.measured import Interval, MeasuredResult
from baton.bench.report.section import Section, table

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
    chosen = [one for one in compared(measured) if any(one.at.timeline.values())]
    if not chosen:
        return Section(name, title, reading, None, None, "The result has no timelines.", is_wide=True)
    found = (interval.kind for one in chosen for rows in one.at.timeline.values() for interval in rows)
    kinds = work.colours(work.in_order(found))
    count = max(2, _MAX_NODES // len(chosen))
    shown = [_busiest(one.at.timeline, count) for one in chosen]
    plots = [_arrangement(one, rows, kinds) for one, rows in zip(chosen, shown, strict=True)]
    columns = ["Node", "Arrangement", *(f"{kind}, of the time" for kind in kinds), "Longest step with a prompt"]
    rows = [row for one, rows in zip(chosen, shown, strict=True) for row in _table_rows(one, rows, kinds)]
    figures = table(columns, rows, "Shares of the run")
    return Section(name, title, reading, join(legend(kinds), *plots), figures, is_wide=True)


def _arrangement(one: Compared, rows: Rows, kinds: Mapping[str, str]) -> Markup:
    hidden = sum(map(bool, one.at.timeline.values())) - len(rows)
    selection = f", the busiest {len(rows)} of {plural(len(rows) + hidden, 'node')}" if hidden else ""
    begin, end = _span(rows)
    whole = axis.exact("", begin, end, "s")
    excerpt = axis.exact("", *_excerpt(rows), "s", count=5)
    return join(
        tag("h3", f"{one.arrangement.name} at {rate_of(one.at)}{selection}"),
        draw_shares(f"plot-timeline-{one.colour}", "the whole run", whole, kinds, rows),
        draw_steps(
            f"plot-moment-{one.colour}", "the excerpt around the longest step with a prompt", excerpt, kinds, rows
        ),
    )


def _span(rows: Rows) -> tuple[float, float]:
    """The time from the first start to the last end; never empty."""
    begin = min(one.start_s for intervals in rows.values() for one in intervals)
    end = max(one.end_s for intervals in rows.values() for one in intervals)
    return begin, max(end, begin + 1e-6)


def _excerpt(rows: Rows) -> tuple[float, float]:
    """Start and end of an excerpt with so few intervals that each can be seen."""
    everything = [one for intervals in rows.values() for one in intervals]
    longest = max(everything, key=lambda one: (work.has_prompt(one.kind), one.end_s - one.start_s))
    begin, end = _span(rows)
    middle, half = (longest.start_s + longest.end_s) / 2, end - begin
    least = (longest.end_s - longest.start_s) * 0.75
    while half / 2 > least and any(_overlap(intervals, middle, half) > _MAX_STEPS for intervals in rows.values()):
        half /= 2
    return max(begin, middle - half), min(end, middle + half)


def _overlap(intervals: Sequence[Interval], middle: float, half: float) -> int:
    return sum(one.end_s > middle - half and one.start_s < middle + half for one in intervals)


def _busiest(timeline: Rows, count: int) -> Rows:
    """The nodes that worked most of the time, in the order of the result."""
    named = {node: intervals for node, intervals in timeline.items() if intervals}
    ranked = sorted(named, key=lambda node: -sum(one.end_s - one.start_s for one in named[node]))
    kept = set(ranked[:count])
    return {node: intervals for node, intervals in named.items() if node in kept}


def _table_rows(one: Compared, rows: Rows, kinds: Mapping[str, str]) -> list[list[str]]:
    begin, end = _span(rows)
    written = []
    for node, intervals in rows.items():
        spent = dict.fromkeys(kinds, 0.0)
        for interval in intervals:
            spent[interval.kind] += interval.end_s - interval.start_s
        steps = [interval.end_s - interval.start_s for interval in intervals if work.has_prompt(interval.kind)]
        longest = f"{number(max(steps) * 1e3)} ms" if steps else "none"
        shares = [percent(min(1.0, took / (end - begin))) for took in spent.values()]
        written.append([node, one.arrangement.name, *shares, longest])
    return written
