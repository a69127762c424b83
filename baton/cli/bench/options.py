"""Options that several benchmarks have, the model that they name, and the files and texts in which results end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter

from baton.cli.output import Format, print_json, print_note, print_text, print_yaml
from baton.config import bundled_model_dir
from baton.config.kinds import Dtype, checked_speculation
from baton.errors import BatonError, Cancelled, ConfigError, ExitCode, UsageError
from baton.models.resolve import FoundModel, find_model


def _checked_size(size: str) -> str:
    try:
        is_size = TypeAdapter(ByteSize).validate_python(size) > 0
    except ValueError:
        is_size = False
    if not is_size:
        raise typer.BadParameter(f"{size!r} is not a number of bytes such as 256MiB")
    return size


def speculation_callback(config: str) -> str:
    """Checks what nodes take for --speculative-config."""
    try:
        return checked_speculation(config)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


DtypeOption = Annotated[Dtype, typer.Option(help="Dtype of the model.")]
ShapeOption = Annotated[str, typer.Option(help="Random weights of a known shape instead: 0.5b.", metavar="NAME")]
CacheMemoryOption = Annotated[str, typer.Option(help="KV cache of each node.", callback=_checked_size)]
MoreGoodputArgument = Annotated[list[str] | None, typer.Argument(hidden=True, metavar="SLO")]
"""The limits after the first one of --goodput, which the command line takes for arguments."""
MaxConcurrencyOption = Annotated[
    int | None, typer.Option(help="Largest number of open requests. Default: no limit.", min=1)
]
GoodputOption = Annotated[
    list[str] | None, typer.Option(help="Limits of a good request: ttft:MS tpot:MS e2el:MS.", metavar="SLO ...")
]
NumWarmupsOption = Annotated[int, typer.Option(help="Requests before the run that are not counted.", min=0)]
WorkloadSeedOption = Annotated[int, typer.Option(help="Seed of the workload.", min=0)]


ModelOption = Annotated[
    Path | None, typer.Option(help="What `baton up --model` takes. Default: the bundled model.", metavar="MODEL")
]


def named_model(model: Path | None) -> FoundModel:
    """The directory and the name of the model, fetched and converted first if need be. Raises ConfigError."""
    resolved = find_model(model or bundled_model_dir(), os.environ)
    if not (resolved.directory / "config.json").is_file():
        # Said here once, and not by each cluster that is started for a part of the measurement.
        raise ConfigError(f"model {resolved.directory} is no directory with a config.json; give --model another one")
    return resolved


@contextmanager
def chosen_model(model: Path | None, shape: str) -> Iterator[FoundModel]:
    """The model that is named, or one of a shape with random weights, for the duration of the block.

    Raises UsageError if both are given, and ConfigError.
    """
    if model is not None and shape:
        raise UsageError("--model and --shape exclude each other")
    if not shape:
        yield named_model(model)
        return
    from baton.bench.micro.shapes import shape_dir

    with shape_dir(shape) as directory:
        yield FoundModel(directory, shape)


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
        folder = next(parent for parent in file.absolute().parents if parent.exists())
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"{file} can't be written: {folder} is not a folder that you may write to")


def printed_as_data(value: Any, output: Format) -> bool:
    """Prints a result as JSON or YAML; returns False, and prints nothing, where a text is wanted."""
    if output is Format.JSON:
        print_json(value)
    elif output is Format.YAML:
        print_yaml(value)
    return output is not Format.TEXT


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


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the result of a benchmark goes: to stdout as text or data, and to files."""

    output: Format
    result_file: Path | None
    report: Path | None

    def show(self, result: Mapping[str, Any], print_result: Callable[[], None], remarks: Iterable[str] = ()) -> None:
        """Prints the result, as text by `print_result`, and remarks on it; writes the files. Raises OSError."""
        from baton.bench.results.result_file import without_outcomes

        if not printed_as_data(without_outcomes(dict(result)), self.output):
            print_result()
        for line in remarks:
            print_note(line)
        write_files(result, self.result_file, self.report)

    def end_early(self, *failures: BatonError | None) -> None:
        """Raises the first of what ended the benchmark early, if anything did, after its result was shown.

        For Ctrl-C it says where the figures until then are.
        """
        for failure in failures:
            if isinstance(failure, Cancelled):
                kept = " and ".join(str(file) for file in (self.result_file, self.report) if file is not None)
                where = (
                    f"printed, and in {kept}" if kept else "printed, and in no file: --result-filename FILE writes one"
                )
                print_note(f"baton: interrupted: the figures until then are {where}")
                raise typer.Exit(ExitCode.INTERRUPTED)
            if failure is not None:
                raise failure


def created_now() -> str:
    """The time at which a result is created, as its file has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def print_lines(lines: Iterable[str]) -> None:
    """Prints sentences below a table."""
    print_text()
    for line in lines:
        print_text(line)
