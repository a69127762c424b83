"""Replaces the generated parts of the documents, whose other text is written by hand, or says that they are old.

A generated part stands between two markers, which Markdown does not show:

    <!-- diagram: lease -->
    ... what a script writes ...
    <!-- end -->
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end -->"


def names_in(page: str, kind: str) -> list[str]:
    """The names of the generated parts of one kind, in the order of the page."""
    return re.findall(rf"^<!-- {re.escape(kind)}: (.+) -->$", page, re.MULTILINE)


def rendered(page: str, kind: str, texts: Mapping[str, str]) -> str:
    """The page with each text between the markers of its name; a text must end with a newline."""
    for name, text in texts.items():
        marked = re.compile(rf"(<!-- {re.escape(kind)}: {re.escape(name)} -->\n).*?({END})", re.DOTALL)
        page = marked.sub(lambda match, text=text: f"{match[1]}{text}{match[2]}", page)  # type: ignore[misc]
    return page


def keep(file: Path, text: str, *, only_compare: bool) -> int:
    """Writes a generated text, or compares it; returns 1, and says which script to run, if the file is out of date."""
    if not only_compare:
        file.write_text(text, encoding="utf-8")
    elif not file.exists() or file.read_text(encoding="utf-8") != text:
        script = f"scripts/{Path(sys.argv[0]).stem}"
        whole = file.resolve()
        name = whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else file
        print(f"{script}: {name} is out of date; run {script}", file=sys.stderr)
        return 1
    return 0
