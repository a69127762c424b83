"""Plots a soak run: the memory of every process over time, one panel for each, as a self-contained SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import escape

_PANEL_WIDTH, _PANEL_HEIGHT = 460, 120
_LEFT, _TOP, _GAP = 62, 46, 34
_MIB = 1 << 20
_MIN_SPAN = 0.1
"""A panel's axis covers at least this share of the largest value, so that noise does not look like growth."""


@dataclass(frozen=True, slots=True)
class Panel:
    """The panel of one process. Points are (seconds, bytes); the line is interrupted where the process was killed."""

    title: str
    runs: Sequence[Sequence[tuple[float, float]]]
    quiet: Sequence[tuple[float, float]]
    kills: Sequence[float]


def render_svg(title: str, columns: Mapping[str, Sequence[Panel]], duration_s: float, warm_up_s: float) -> str:
    """Draws all panels, with one column for each cluster."""
    rows = max((len(panels) for panels in columns.values()), default=0)
    width = len(columns) * (_LEFT + _PANEL_WIDTH + _GAP // 2)
    height = _TOP + rows * (_PANEL_HEIGHT + _GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="8" y="18" font-size="14">{escape(title)}</text>',
    ]
    for column, (name, panels) in enumerate(columns.items()):
        x = column * (_LEFT + _PANEL_WIDTH + _GAP // 2) + _LEFT
        parts.append(f'<text x="{x}" y="36" font-weight="bold">{escape(name)}</text>')
        for row, panel in enumerate(panels):
            y = _TOP + row * (_PANEL_HEIGHT + _GAP) + 12
            parts += _panel(panel, x, y, duration_s, warm_up_s)
    legend = "resident MiB over minutes; dots: readings in quiet moments; red: the process was killed; grey: warm-up"
    parts.append(f'<text x="8" y="{height - 10}">{legend}</text></svg>')
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, x: float, y: float, duration_s: float, warm_up_s: float) -> list[str]:
    values = [value for run in panel.runs for _, value in run] or [1.0]
    top = max(values)
    # The axis contains all quiet readings; the steep rise of a start is clipped.
    bottom = min([top * (1 - _MIN_SPAN), *(value for _, value in panel.quiet)])
    top += (top - bottom) * 0.08

    def at(seconds: float, value: float) -> tuple[float, float]:
        return x + _PANEL_WIDTH * seconds / duration_s, y + _PANEL_HEIGHT * (
            1 - (max(value, bottom) - bottom) / (top - bottom)
        )

    parts = [
        f'<rect x="{x}" y="{y}" width="{_PANEL_WIDTH * min(1.0, warm_up_s / duration_s):.1f}" '
        f'height="{_PANEL_HEIGHT}" fill="#eee"/>',
        f'<rect x="{x}" y="{y}" width="{_PANEL_WIDTH}" height="{_PANEL_HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{x + 4}" y="{y - 4}">{escape(panel.title)}</text>',
    ]
    parts += [
        f'<text x="{x - 5}" y="{at(0, value)[1] + 4:.1f}" text-anchor="end">{value / _MIB:.1f}</text>'
        for value in (bottom, (bottom + top) / 2, top)
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        label = f"{duration_s * share / 60:.2g}"
        parts.append(
            f'<text x="{x + _PANEL_WIDTH * share:.1f}" y="{y + _PANEL_HEIGHT + 12}" text-anchor="middle">{label}</text>'
        )
    for kill in panel.kills:
        kill_x = at(kill, bottom)[0]
        parts.append(
            f'<line x1="{kill_x:.1f}" y1="{y}" x2="{kill_x:.1f}" y2="{y + _PANEL_HEIGHT}" stroke="#d33" '
            'stroke-dasharray="3 2"/>'
        )
    for run in panel.runs:
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(*point) for point in run))
        parts.append(f'<polyline points="{points}" fill="none" stroke="#36c" stroke-width="1.2"/>')
    for point in panel.quiet:
        px, py = at(*point)
        parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.2" fill="#163"/>')
    return parts
