"""Write a result as a page for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.bench.report.measured import read
from baton.bench.report.page import page
from baton.bench.results.result_file import write_text


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """One self-contained HTML file, all of it or nothing; raises InvalidRequest for what is no result, and OSError."""
    write_text(page(read(result)), path)
