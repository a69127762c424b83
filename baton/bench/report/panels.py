"""Panels: small plots of values over time, in columns, as a self-contained SVG for documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import escape

_LEFT, _TOP, _GAP = 62, 46, 40
_BLUE = "#36c"

Points = Sequence[tuple[float, float]]
"""Seconds and values."""


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The time that all panels show, in seconds, and the size of a panel in pixels."""

    begin: float
    end: float
    labels: Mapping[float, str]
    shaded: tuple[float, float]
    """A part that is marked, such as an overload or a warm-up."""
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot with an axis from `low` to `high`; values outside of it are moved to its end."""

    title: str
    low: float
    high: float
    text: Callable[[float], str]
    lines: Sequence[Points] = ()
    dots: Points = ()
    levels: Sequence[float] = ()
    """Values for reference."""
    moments: Sequence[float] = ()
    """Times at which something happened."""


def draw_panels(title: str, columns: Mapping[str, Sequence[Panel]], time: TimeAxis, legend: str = "") -> str:
    """Draws the panels of each column below each other, under the column's name."""
    rows = max((len(panels) for panels in columns.values()), default=0)
    pitch = _LEFT + time.width + _GAP // 2
    width, height = pitch * len(columns), _TOP + rows * (time.height + _GAP) + (30 if legend else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="8" y="18" font-size="14">{escape(title)}</text>',
        *([f'<text x="8" y="{height - 10}">{escape(legend)}</text>'] if legend else []),
    ]
    for column, (name, panels) in enumerate(columns.items()):
        x = column * pitch + _LEFT
        parts += [f'<text x="{x}" y="36" font-weight="bold">{escape(name)}</text>'] if name else []
        for row, panel in enumerate(panels):
            parts += _panel(panel, time, x, _TOP + row * (time.height + _GAP) + 12)
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Panel, time: TimeAxis, x: float, y: float) -> list[str]:
    def at(seconds: float, value: float) -> tuple[float, float]:
        share = (min(max(value, panel.low), panel.high) - panel.low) / ((panel.high - panel.low) or 1.0)
        return x + time.width * (seconds - time.begin) / (time.end - time.begin), y + time.height * (1 - share)

    def dashed(begin: tuple[float, float], end: tuple[float, float], colour: str) -> str:
        places = f'x1="{begin[0]:.1f}" y1="{begin[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
        return f'<line {places} stroke="{colour}" stroke-dasharray="4 3"/>'

    left, right = (at(min(seconds, time.end), 0.0)[0] for seconds in time.shaded)
    parts = [
        f'<rect x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="{time.height}" fill="#eee"/>',
        f'<rect x="{x}" y="{y}" width="{time.width}" height="{time.height}" fill="none" stroke="#999"/>',
        f'<text x="{x}" y="{y - 5}">{escape(panel.title)}</text>',
    ]
    for value in (panel.low, (panel.low + panel.high) / 2, panel.high):
        down = at(time.begin, value)[1]
        parts.append(f'<text x="{x - 6}" y="{down + 4:.1f}" text-anchor="end">{escape(panel.text(value))}</text>')
    for seconds, label in time.labels.items():
        across, down = at(seconds, panel.low)
        parts.append(f'<text x="{across:.1f}" y="{down + 14:.1f}" text-anchor="middle">{escape(label)}</text>')
    parts += [dashed(at(time.begin, level), at(time.end, level), "#888") for level in panel.levels]
    parts += [dashed(at(moment, panel.low), at(moment, panel.high), "#d33") for moment in panel.moments]
    for line in panel.lines:
        points = " ".join(f"{across:.1f},{down:.1f}" for across, down in (at(*point) for point in line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{_BLUE}" stroke-width="1.5"/>')
    for across, down in (at(*point) for point in panel.dots):
        parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="2" fill="{_BLUE}"/>')
    return parts
