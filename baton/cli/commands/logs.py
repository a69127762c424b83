"""`baton logs`: prints the logs of a cluster on this machine, merged by time."""

from __future__ import annotations

import enum
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.cluster.log_files import DirectoryWatch, LogFile, LogLine, merged
from baton.cli.cluster.run_dir import RunDir
from baton.cli.output import OUTPUT_OPTION, print_as_is, print_text
from baton.cli.target import RunDirOption, run_dir_of
from baton.did_you_mean import did_you_mean
from baton.errors import NodeNotFound, Unreachable
from baton.observe.terminal_text import shown

_LEVELS = ("debug", "info", "warning", "error", "critical")
_STYLES: Mapping[str, Mapping[str, Any]] = {
    "debug": {"dim": True},
    "info": {"fg": "green"},
    "warning": {"fg": "yellow"},
    "error": {"fg": "red"},
    "critical": {"fg": "red", "bold": True},
}
"""As the arguments of typer.style."""
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?\Z")


class LogForm(enum.StrEnum):
    """The values of -o: text for people, or one JSON object a line."""

    TEXT = "text"
    JSON = "json"


def register(app: typer.Typer, name: str, text: str) -> None:
    """Add the command."""
    app.command(name, help=text)(logs)


def logs(
    processes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of processes, such as prefill-0, router-0 or redis. Default: all.", metavar="[NODE]..."
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing new lines, until Ctrl-C.")] = False,
    since: Annotated[
        str | None,
        typer.Option(
            help="Only lines that are newer than this duration, such as 30s or 1h30m, or this time.", metavar="AGO|TIME"
        ),
    ] = None,
    tail: Annotated[int | None, typer.Option("-n", "--tail", help="Only the last N lines.", metavar="N", min=0)] = None,
    request: Annotated[str | None, typer.Option(help="Only lines about this request.", metavar="ID")] = None,
    level: Annotated[
        str, typer.Option(help="Only lines of this level or a more severe one.", metavar="|".join(_LEVELS))
    ] = "debug",
    run_dir: RunDirOption = None,
    output: Annotated[LogForm, OUTPUT_OPTION] = LogForm.TEXT,
) -> None:
    """Print the logs of the processes of the cluster in a run directory, the oldest line first.

    The logs of a cluster are kept until the next cluster starts in the directory.
    """
    if level not in _LEVELS:
        raise typer.BadParameter(f"--level: {level!r} is not one of {', '.join(_LEVELS)}")
    begin = 0.0 if since is None else parse_since(since, time.time())
    directory = run_dir_of(run_dir)
    files = _files(directory, processes or ())
    width = max((len(process) for process in files), default=0)
    write = _writer(output, width, sys.stdout.isatty() and not os.environ.get("NO_COLOR"))

    def wanted(lines: Iterable[LogLine]) -> list[LogLine]:
        return [line for line in lines if line.at >= begin and is_selected(line, request, level)]

    if not follow:
        _print(wanted(merged(files.values())), tail, write)
        return
    # The watch begins before the files are read, so that no line is missed.
    with DirectoryWatch(directory.logs) as watch:
        _print(wanted(merged(files.values())), tail, write)
        while True:
            watch.wait()
            if not processes:
                files = {**_files(directory, ()), **files}
            _print(wanted(merged(files.values())), None, write)


def parse_since(since: str, now: float) -> float:
    """The time that --since means, in seconds since the epoch. Raises BadParameter."""
    match = _DURATION.match(since)
    if match is not None and since:
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return now - (((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    try:
        return datetime.fromisoformat(since).astimezone().timestamp()
    except ValueError:
        message = f"--since: {since!r} is neither a duration like 1h30m nor a time like 2026-01-31T12:00:00"
        raise typer.BadParameter(message) from None


def is_selected(line: LogLine, request: str | None, level: str) -> bool:
    """Whether a line belongs to the request, if there is one, and has the level or a more severe one.

    A line without a level is selected at any level.
    """
    if request is not None and line.fields.get("request") != request:
        return False
    return line.level not in _LEVELS or _LEVELS.index(line.level) >= _LEVELS.index(level)


def format_line(line: LogLine, width: int, *, coloured: bool) -> str:
    """A line as text: local time, process, level, event and fields."""
    at = datetime.fromtimestamp(line.at)
    clock = f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}" if line.at else " " * 12
    level = f"{shown(line.level):8}"
    if coloured and line.level in _STYLES:
        level = typer.style(level, **_STYLES[line.level])
    fields = " ".join(f"{key}={_value(value)}" for key, value in line.fields.items() if key != "exception")
    said = shown(f"{line.event}" + (f"  {fields}" if fields else ""))
    text = f"{clock}  {shown(line.process):{width}}  {level} {said}"
    exception = line.fields.get("exception")
    return f"{text}\n{shown(str(exception))}" if exception else text


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return json.dumps(text, ensure_ascii=False) if not text or re.search(r"[\s\"=]", text) else text


def _files(directory: RunDir, processes: Sequence[str]) -> dict[str, LogFile]:
    """The log files by process. Raises Unreachable if there are no logs, and NodeNotFound for a process without one."""
    files = {path.stem: path for path in sorted(_log_paths(directory))}
    if not files:
        raise Unreachable(
            f"there are no logs in {directory.path}: start a cluster with {directory.command('up')}, "
            "or choose one with --run-dir"
        )
    for process in processes:
        if process not in files:
            raise NodeNotFound(f"there is no log of {process}{did_you_mean(process, files)}")
    return {process: LogFile(files[process]) for process in processes or files}


def _log_paths(directory: RunDir) -> Iterable[Path]:
    return directory.logs.glob("*.log") if directory.exists() else ()


def _print(lines: Sequence[LogLine], tail: int | None, write: Callable[[LogLine], None]) -> None:
    for line in lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]:
        write(line)


def _writer(form: LogForm, width: int, coloured: bool) -> Callable[[LogLine], None]:
    if form is LogForm.JSON:
        return lambda line: print_text(json.dumps(line.to_json(), ensure_ascii=False, default=str))
    return lambda line: print_as_is(format_line(line, width, coloured=coloured))
