"""`baton bench report`."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.bench.serve import usage_errors
from baton.cli.output import OUTPUT_OPTION, print_json, print_note, print_text


class ReportFormat(enum.StrEnum):
    """Values of `baton bench report -o`."""

    HTML = "html"
    JSON = "json"
    CSV = "csv"


def report(
    result: Annotated[
        Path,
        typer.Argument(
            help="Result file of serve, compare, nodes, validate, simulate or overload --tenants.",
            metavar="RESULT.json",
            show_default=False,
        ),
    ],
    output: Annotated[ReportFormat, OUTPUT_OPTION] = ReportFormat.HTML,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write. Default: RESULT.html beside the result; json and csv go to stdout.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Render a result file as one HTML file with plots and tables, which needs no network.

    json and csv contain the same figures for programs, with the keys of `vllm bench serve`.
    """
    from baton.bench.report.measured import parse_result
    from baton.bench.report.page import page, to_csv, to_json
    from baton.bench.results.result_file import read_result, write_text

    with usage_errors():
        measured = parse_result(read_result(result))
    if output is ReportFormat.HTML:
        path = out or result.with_suffix(".html")
        write_text(page(measured), path)
        print_note(f"report: {path}")
    elif output is ReportFormat.JSON:
        if out is None:
            print_json(to_json(measured))
        else:
            write_text(json.dumps(to_json(measured), indent=2, ensure_ascii=False) + "\n", out)
    elif out is None:
        print_text(to_csv(measured), end="")
    else:
        write_text(to_csv(measured), out)
