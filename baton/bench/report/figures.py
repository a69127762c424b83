"""Formats numbers for people. Between a number and its unit is a no-break space."""

from __future__ import annotations

import math

_SPACE = "\u00a0"
NOTHING = "–"
"""Shown where there is no figure."""


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits and separated thousands: `0.0123`, `4.56`, `1,230`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def milliseconds(value: float | None) -> str:
    """A duration in milliseconds as `0.85 ms`, `120 ms` or `1.23 s`."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value >= 1000:
        return f"{number(value / 1000)}{_SPACE}s"
    return f"{number(value)}{_SPACE}ms"


def percent(share: float | None) -> str:
    """A share as `98.5 %`; never rounded to 100 % or 0 %."""
    if share is None or not math.isfinite(share):
        return NOTHING
    if 0.9995 <= share < 1:
        return f">{_SPACE}99.9{_SPACE}%"
    if 0 < share < 0.0005:
        return f"<{_SPACE}0.1{_SPACE}%"
    return f"{share * 100:.1f}".removesuffix(".0") + f"{_SPACE}%"


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 request`, `1,200 requests`."""
    return f"{count:,}{_SPACE}{noun}" + ("" if count == 1 else "s")


def per_second(rate: float | None) -> str:
    """A rate as `8.4 requests/s`."""
    return f"{number(rate)}{_SPACE}requests/s"
