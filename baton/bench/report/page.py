"""The page: one HTML file with everything in it. It asks the network for nothing, and its own policy forbids it to."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from baton.bench.report import plots
from baton.bench.report.comparison import answer, rate_of
from baton.bench.report.figures import percent, plural
from baton.bench.report.markup import Markup, join, tag
from baton.bench.report.measured import Measured
from baton.bench.report.section import Section, render, table
from baton.bench.report.timeline import timelines

_KINDS = {
    "serve": "Benchmark of a running endpoint",
    "compare": "Comparison of arrangements",
    "nodes": "Benchmark of several nodes",
    "simulate": "Simulation",
    "validate": "Simulation beside real processes",
}


def page(measured: Measured) -> str:
    """HTML of a result."""
    style, script = Markup(_asset("page.css")), Markup(_asset("page.js"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"Baton: {answer(measured).headline}"),
        tag("style", style),
    )
    sections = [
        plots.goodput(measured),
        plots.attainment(measured),
        plots.first_tokens(measured),
        plots.token_gaps(measured),
        plots.first_token_parts(measured),
        timelines(measured),
        plots.overview(measured),
        *([_errors(measured)] if _has_errors(measured) else []),
    ]
    body = tag(
        "body",
        _header(measured),
        tag("main", *(render(section) for section in sections)),
        tag("footer", _conditions(measured)),
        tag("script", script),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _header(measured: Measured) -> Markup:
    said = answer(measured)
    return tag(
        "header",
        tag("p", _KINDS.get(measured.kind, measured.kind), class_="kind"),
        tag("h1", said.headline),
        tag("p", said.detail, class_="detail"),
        *(tag("p", notice, class_="notice", role="note") for notice in _notices(measured)),
        class_="bad" if said.is_bad else None,
    )


def _notices(measured: Measured) -> list[str]:
    """What a reader has to know before believing anything below."""
    notices = []
    if measured.is_partial:
        notices.append("The run was interrupted: these are the results until then.")
    measurements = [one for arrangement in measured.arrangements for one in arrangement.measurements]
    failed, offered = sum(one.failed for one in measurements), sum(one.offered for one in measurements)
    if 0 < failed < offered:
        notices.append(
            f"{plural(failed, 'request')} of {offered:,} failed ({percent(failed / offered)}). They count as offered, "
            "so they lower goodput; times are of those that were answered."
        )
    if empty := [one.name for one in measured.arrangements if not one.measurements]:
        notices.append(f"Nothing was measured of {', '.join(empty)}.")
    late = sorted({one.bottleneck for one in measurements} - {""})
    return [*notices, *(f"In some runs the load generator was late: {reason}" for reason in late), *measured.notes]


def _has_errors(measured: Measured) -> bool:
    return any(one.errors for arrangement in measured.arrangements for one in arrangement.measurements)


def _errors(measured: Measured) -> Section:
    rows = [
        [arrangement.name, rate_of(one), f"{count:,}", error]
        for arrangement in measured.arrangements
        for one in arrangement.measurements
        for error, count in one.errors.items()
    ]
    columns = ["Arrangement", "Offered", "Requests", "Error"]
    figures = table(columns, rows, "Requests that failed, by error")
    return Section("errors", "What failed", "As the client was told.", None, figures, is_wide=True)


def _conditions(measured: Measured) -> Markup:
    """Under which conditions these figures hold, and how to get them again."""
    rows = [tag("div", tag("dt", name), tag("dd", text)) for name, text in measured.facts.items()]
    return join(tag("h2", "How this was measured"), tag("dl", *rows))


def _policy(script: str) -> str:
    """Nothing may be loaded, and no script run but this page's own, whatever the result's names contain."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _asset(name: str) -> str:
    return resources.files("baton.bench.report").joinpath(name).read_text(encoding="utf-8")
