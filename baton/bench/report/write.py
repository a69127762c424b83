"""Write a result as a page for people."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.bench.report.measured import read
from baton.bench.report.page import page


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """One self-contained HTML file, all of it or nothing; raises InvalidRequest for what is no result, and OSError."""
    write_text(page(read(result)), path)


def write_text(text: str, path: Path) -> None:
    """A file that is never seen half written; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        # A name in a result may hold half a surrogate pair, which JSON can say and UTF-8 can't.
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
