"""HTML and SVG elements as `markupsafe.Markup`, sections and tables of a page, and numbers as text.

Every text that is put into an element is escaped, unless it is `Markup` itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from markupsafe import Markup as Markup  # for all who put elements together

Child: TypeAlias = "str | None"
_EMPTY = frozenset({"meta", "br", "line", "path", "rect"})


def tag(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """One element. An attribute `class_` is written `class`, `aria_label` `aria-label`; None and False are left out."""
    written = join(
        *(
            _attribute(key.rstrip("_").replace("_", "-"), value)
            for key, value in attributes.items()
            if value is not None and value is not False
        )
    )
    if name in _EMPTY:
        return Markup("<{0}{1}/>").format(name, written)
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, join(*children))


def join(*children: Child) -> Markup:
    """Concatenates the children; None is left out."""
    return Markup().join(child for child in children if child is not None)


def _attribute(name: str, value: str | float) -> Markup:
    if value is True:
        return Markup(" {}").format(name)
    return Markup(' {}="{}"').format(name, f"{value:.6g}" if isinstance(value, float) else value)


def unbroken(text: str) -> list[str]:
    """The words of a text, those of which are kept in one line that a browser would break, such as addresses."""
    parts: list[str] = []
    for word in text.split(" "):
        parts += [" "] if parts else []
        parts.append(tag("span", word, class_="word") if any(mark in word for mark in "-/:.") else word)
    return parts


# A section of the page: a title, a plot, and the same figures as a table.


@dataclass(frozen=True, slots=True)
class Section:
    """The contents of a section. `plots`: None if there is nothing to draw; then `missing` says why."""

    name: str
    title: str
    reading: str
    """How to read the plot, in a sentence or two."""
    plots: Markup | None
    table: Markup | None
    missing: str = ""
    is_wide: bool = False
    """Whether the plot needs the whole width; then the table is below it."""


def render(section: Section) -> Markup:
    """Renders the section as HTML."""
    figure = tag("figure", section.plots) if section.plots is not None else None
    return tag(
        "section",
        tag("h2", section.title, id=f"{section.name}-title"),
        tag("p", section.reading, class_="reading"),
        tag("p", section.missing, class_="missing") if section.missing else None,
        tag("div", figure, section.table, class_="wide" if section.is_wide else "beside"),
        id=section.name,
        aria_labelledby=f"{section.name}-title",
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Markup:
    """Renders a table; the first cell of a row is its header. A table that is wider than the screen scrolls."""
    head = tag("tr", *(tag("th", name, scope="col") for name in columns))
    body = (tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows)
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption) if caption else None,
            tag("thead", head),
            tag("tbody", join(*body)),
        ),
        class_="figures",
        tabindex="0",
        role="region",
        aria_label=caption or "Figures",
    )


# Formats numbers for people. Between a number and its unit is a no-break space.

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
