"""Renders a result for programs: the page's contents as JSON, or every measurement as a line of CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from baton.bench.report.comparison import answer, capacities
from baton.bench.report.measured import MeasuredResult

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_json(measured: MeasuredResult) -> dict[str, Any]:
    """The answer, the goodput of each arrangement, and every summary with vLLM's keys."""
    found = answer(measured)
    best = {one.arrangement.name: one for one in capacities(measured)}
    return {
        "answer": _plain(found.headline),
        "detail": _plain(found.detail),
        "model": measured.model or None,
        "max_concurrency": measured.max_concurrency,
        "partial": measured.is_partial,
        "slo": measured.slo.to_json(),
        "attainment_target": measured.target,
        "goodput": {
            one.name: best[one.name].goodput if one.name in best else 0.0 if measured.slo else None
            for one in measured.arrangements
        },
        "measurements": [
            {
                "arrangement": arrangement.name,
                "engines": arrangement.engines,
                "rate": one.rate,
                **one.summary,
                "offered": one.offered,
                "failed": one.failed,
                **{f"ttft_{part}_ms": took for part, took in one.ttft_parts_ms.items()},
                "errors": dict(one.errors),
            }
            for arrangement in measured.arrangements
            for one in arrangement.measurements
        ],
    }


def to_csv(measured: MeasuredResult) -> str:
    """One line for each arrangement and rate, with one column for each figure that any of them has."""
    found = to_json(measured)
    named = {"model": found["model"], "max_concurrency": found["max_concurrency"]}
    rows = [row | named for row in found["measurements"]]
    for row in rows:
        del row["errors"]
    columns = list(dict.fromkeys(key for row in rows for key in row)) or ["arrangement", "engines", "rate", *named]
    written = io.StringIO()
    writer = csv.DictWriter(written, [*map(_cell, columns)], lineterminator="\n")
    writer.writeheader()
    writer.writerows({_cell(key): _cell(value) for key, value in row.items()} for row in rows)
    return written.getvalue()


def _cell(value: Any) -> Any:
    """Quotes a text that a spreadsheet would read as a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def _plain(text: str) -> str:
    return text.replace("\u00a0", " ")
