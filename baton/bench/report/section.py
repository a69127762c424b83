"""One part of the page: what is asked, the plot that answers, and the same figures as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.report.markup import Markup, join, tag


@dataclass(frozen=True, slots=True)
class Section:
    """`plots`: None when there is nothing to draw; `missing` says why."""

    name: str
    title: str
    reading: str
    """How to read it, in a sentence or two."""
    plots: Markup | None
    table: Markup | None
    missing: str = ""
    is_wide: bool = False
    """The plot needs the whole width; the table goes below."""


def render(section: Section) -> Markup:
    """The section as HTML."""
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
    """Figures; the first cell of a row names it. May be wider than the screen: it scrolls by itself."""
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
