"""Plots a run of `baton bench overload`: goodput and latency over time, as a self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import escape

from baton.bench.overload import TARGET_GOODPUT, WINDOW_S, OverloadReport

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 760, 180, 60, 40, 60


def render_svg(report: OverloadReport) -> str:
    """Draws two panels with the same time axis."""
    config = report.config
    begin, end = -config.before_s, config.overload_s + config.after_s
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _LEFT + 20} {2 * (_HEIGHT + _GAP) + _TOP}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="8" y="18" font-size="14">{config.factor:g} times the capacity of {report.capacity:.1f} requests/s '
        f"from 0 to {config.overload_s:g} s</text>",
    ]
    good = [(WINDOW_S * (number + 0.5), rate) for number, rate in enumerate(report.windows)]
    lines = (report.peak, report.peak * TARGET_GOODPUT)
    parts += _panel(
        f"good requests per second, in windows of {WINDOW_S:g} s", _TOP, begin, end, config.overload_s, good, lines
    )
    late = [(at, took * 1e3) for at, took in report.probe]
    title = "the probe: milliseconds to the first token"
    parts += _panel(
        title, _TOP + _HEIGHT + _GAP, begin, end, config.overload_s, late, (report.normal_ttft_s * 1e3,), is_line=False
    )
    return "\n".join([*parts, "</svg>\n"])


def _panel(
    title: str,
    y: float,
    begin: float,
    end: float,
    overload_s: float,
    points: Sequence[tuple[float, float]],
    marks: Sequence[float],
    *,
    is_line: bool = True,
) -> Iterator[str]:
    top = max([value for _, value in points] + list(marks), default=1.0) * 1.1 or 1.0

    def at(seconds: float, value: float) -> tuple[float, float]:
        return _LEFT + _WIDTH * (seconds - begin) / (end - begin), y + _HEIGHT * (1 - value / top)

    left, right = at(0, 0)[0], at(overload_s, 0)[0]
    yield f'<rect x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="{_HEIGHT}" fill="#fdeee6"/>'
    yield f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#999"/>'
    yield f'<text x="{_LEFT}" y="{y - 6}">{escape(title)}</text>'
    for share in (0.0, 0.5, 1.0):
        value = top * share
        yield f'<text x="{_LEFT - 6}" y="{at(0, value)[1] + 4:.1f}" text-anchor="end">{_number(value)}</text>'
    step = 20 if end - begin > 60 else 5
    for second in range(int(begin // step + 1) * step, int(end) + 1, step):
        yield f'<text x="{at(second, 0)[0]:.1f}" y="{y + _HEIGHT + 16}" text-anchor="middle">{second}</text>'
    for value in marks:
        (x1, height), (x2, _) = at(begin, value), at(end, value)
        yield (
            f'<line x1="{x1:.1f}" y1="{height:.1f}" x2="{x2:.1f}" y2="{height:.1f}" stroke="#888" '
            'stroke-dasharray="4 3"/>'
        )
    if is_line and points:
        joined = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(*point) for point in points))
        yield f'<polyline points="{joined}" fill="none" stroke="#36c" stroke-width="1.5"/>'
    for point in points:
        px, py = at(*point)
        yield f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2" fill="#36c"/>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
