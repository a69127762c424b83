"""A section of the page: a title, a plot, and the same figures as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.bench.report.markup import Markup, join, tag


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
