"""Writes the files of `baton bench` commands: the result as JSON, and its report as HTML."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from baton.cli.output import print_note
from baton.errors import ExitCode, UsageError

ResultFileOption = Annotated[Path | None, typer.Option(help="Write the result to this file.")]
ReportOption = Annotated[
    Path | None, typer.Option(help="Write a page with plots to this HTML file.", metavar="FILE.html")
]


def check_files(*files: Path | None) -> None:
    """Raises UsageError for a file that can't be written, before anything is measured for it."""
    for file in files:
        if file is None:
            continue
        if file.is_dir():
            raise UsageError(f"{file} is a folder: name a file in it")
        # Folders that are missing are made.
        folder = next(one for one in file.absolute().parents if one.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{file} can't be written: {folder} is not a folder that you may write to")


def write_files(result: Mapping[str, Any], result_file: Path | None, report: Path | None) -> None:
    """Writes the files whose path is given, and says where they are; raises OSError."""
    from baton.bench.report.page import write_report
    from baton.bench.results.result_file import write_result

    sys.stdout.flush()  # the printed results come first, even if a file can't be written
    if result_file is not None:
        write_result(result_file, dict(result))
        print_note(f"written to {result_file}")
    if report is not None:
        write_report(result, report)
        print_note(f"report: {report}")


def exit_interrupted(*files: Path | None) -> NoReturn:
    """Ends a benchmark that Ctrl-C cut short, after its figures were printed and written to `files`."""
    kept = " and ".join(str(file) for file in files if file is not None)
    where = f"printed, and in {kept}" if kept else "printed, and in no file: --result-filename FILE writes one"
    print_note(f"baton: interrupted: the figures until then are {where}")
    raise typer.Exit(ExitCode.INTERRUPTED)
