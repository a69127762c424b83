"""Writes a result as an HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.bench.report.measured import parse_result
from baton.bench.report.page import page
from baton.bench.results.result_file import write_text


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """Writes one self-contained HTML file atomically; raises InvalidRequest for an invalid result, and OSError."""
    write_text(page(parse_result(result)), path)
