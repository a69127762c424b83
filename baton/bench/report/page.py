"""A result as a page: one HTML file that loads nothing, as its Content-Security-Policy says; or as JSON and CSV."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from baton.bench.report import plots
from baton.bench.report.comparison import answer, capacities, rate_of
from baton.bench.report.html import Markup, Section, join, percent, plural, render, table, tag, unbroken
from baton.bench.report.measured import MeasuredResult, parse_result
from baton.bench.report.tenants import tenants
from baton.bench.report.timeline import timelines
from baton.bench.results.result_file import write_text

_KINDS = {
    "serve": "Benchmark of a running endpoint",
    "compare": "Comparison of arrangements",
    "nodes": "Benchmark of several nodes",
    "simulate": "Simulation",
    "validate": "Simulation beside real processes",
    "overload": "A tenant beside a flood of another one's requests",
}


def page(measured: MeasuredResult) -> str:
    """Renders a result as HTML."""
    style, script = Markup(_asset("page.css")), Markup(_asset("page.js"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"Baton: {': '.join(filter(None, (measured.model, answer(measured).headline)))}"),
        tag("style", style),
    )
    sections = [
        *([tenants(measured)] if any(each.tenants for _, each in measured.measurements) else []),
        plots.goodput(measured),
        plots.attainment(measured),
        plots.first_tokens(measured),
        plots.token_gaps(measured),
        plots.first_token_parts(measured),
        timelines(measured),
        plots.overview(measured),
        *([_errors(measured)] if any(measurement.errors for _, measurement in measured.measurements) else []),
    ]
    shown = [section for section in sections if section.plots is not None or section.table is not None]
    left_out = [f"{section.title}: {section.missing}" for section in sections if section not in shown]
    body = tag(
        "body",
        _header(measured),
        tag("main", *(render(section) for section in shown)),
        tag("footer", _conditions(measured, left_out)),
        tag("script", script),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _header(measured: MeasuredResult) -> Markup:
    answered = answer(measured)
    return tag(
        "header",
        tag("p", ": ".join(filter(None, (_KINDS.get(measured.kind, measured.kind), measured.subject))), class_="kind"),
        tag("h1", answered.headline),
        tag("p", answered.detail, class_="detail"),
        *(tag("p", notice, class_="notice", role="note") for notice in _notices(measured)),
        class_="bad" if answered.is_bad else None,
    )


def _notices(measured: MeasuredResult) -> list[str]:
    """Warnings that a reader needs before the figures."""
    notices = []
    if measured.is_partial:
        notices.append("The run was interrupted: these are the results until then.")
    offered, failed = measured.num_offered, measured.num_failed
    if 0 < failed < offered:
        notices.append(
            f"{plural(failed, 'request')} of {offered:,} failed ({percent(failed / offered)}). They count as offered, "
            "so they lower goodput; times are of those that were answered."
        )
    if empty := [arrangement.name for arrangement in measured.arrangements if not arrangement.measurements]:
        notices.append(f"Nothing was measured of {', '.join(empty)}.")
    late = sorted({measurement.bottleneck for _, measurement in measured.measurements} - {""})
    return [*notices, *(f"In some runs the load generator was late: {reason}" for reason in late), *measured.notes]


def _errors(measured: MeasuredResult) -> Section:
    rows = [
        [arrangement.name, rate_of(measurement), f"{count:,}", error]
        for arrangement, measurement in measured.measurements
        for error, count in measurement.errors.items()
    ]
    columns = ["Arrangement", "Offered", "Requests", "Error"]
    figures = table(columns, rows, "Requests that failed, by error")
    return Section("errors", "What failed", "Errors as the client received them.", None, figures, is_wide=True)


def _conditions(measured: MeasuredResult, left_out: Sequence[str]) -> Markup:
    """The conditions of the measurement, how to repeat it, and which sections have no content."""
    rows = [tag("div", tag("dt", name), tag("dd", *unbroken(text))) for name, text in measured.facts.items()]
    if left_out:
        rows.append(tag("div", tag("dt", "Not shown"), tag("dd", *(tag("div", reason) for reason in left_out))))
    return join(tag("h2", "How this was measured"), tag("dl", *rows))


def _policy(script: str) -> str:
    """A policy that forbids loading anything, and all scripts except this page's own (CSP Level 3)."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _asset(name: str) -> str:
    return resources.files("baton.bench.report").joinpath(name).read_text(encoding="utf-8")


def write_report(result: Mapping[str, Any], path: Path) -> None:
    """Writes one self-contained HTML file atomically; raises InvalidRequest for an invalid result, and OSError."""
    write_text(page(parse_result(result)), path)


# Renders a result for programs: the page's contents as JSON, or every measurement as a line of CSV.

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_json(measured: MeasuredResult) -> dict[str, Any]:
    """The answer, the goodput of each arrangement, and every summary with vLLM's keys."""
    answered = answer(measured)
    best = {capacity.arrangement.name: capacity for capacity in capacities(measured)}
    return {
        "answer": _plain(answered.headline),
        "detail": _plain(answered.detail),
        "model": measured.model or None,
        "max_concurrency": measured.max_concurrency,
        "partial": measured.is_partial,
        "slo": measured.slo.to_json(),
        "attainment_target": measured.target,
        "goodput": {
            arrangement.name: best[arrangement.name].goodput
            if arrangement.name in best
            else 0.0
            if measured.slo
            else None
            for arrangement in measured.arrangements
        },
        "measurements": [
            {
                "arrangement": arrangement.name,
                "engines": arrangement.engines,
                "rate": measurement.rate,
                **measurement.summary,
                "offered": measurement.offered,
                "failed": measurement.failed,
                **{f"ttft_{part}_ms": took for part, took in measurement.ttft_parts_ms.items()},
                "errors": dict(measurement.errors),
            }
            for arrangement, measurement in measured.measurements
        ],
    }


def to_csv(measured: MeasuredResult) -> str:
    """One line for each arrangement and rate, with one column for each figure that any of them has."""
    data = to_json(measured)
    named = {"model": data["model"], "max_concurrency": data["max_concurrency"]}
    rows = [row | named for row in data["measurements"]]
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
