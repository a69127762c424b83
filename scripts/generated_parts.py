"""Replaces the generated parts of the documents; the text around them is written by hand.

A generated part stands between two markers, which Markdown does not show:

    <!-- diagram: lease -->
    ... what a script writes ...
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping

END = "<!-- end -->"


def names_in(page: str, kind: str) -> list[str]:
    """The names of the generated parts of one kind, in the order of the page."""
    return re.findall(rf"^<!-- {re.escape(kind)}: (.+) -->$", page, re.MULTILINE)


def rendered(page: str, kind: str, texts: Mapping[str, str]) -> str:
    """The page with each text between the markers of its name; a text must end with a newline."""
    for name, text in texts.items():
        marked = re.compile(rf"(<!-- {re.escape(kind)}: {re.escape(name)} -->\n).*?({END})", re.DOTALL)
        page = marked.sub(lambda found, text=text: f"{found[1]}{text}{found[2]}", page)  # type: ignore[misc]
    return page
