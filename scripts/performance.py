"""Measures the figures of docs/performance.md: runs each benchmark, and keeps its output.

The outputs are files (docs/performance/engine.txt), which the page links; its tables are written by hand from them.
Results and their reports are too large to be committed; they are in build/performance.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from core_speed import describe, measured_cores

from baton.bench.results.host import processor, usable_cores

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "docs" / "performance"
RESULTS = ROOT / "build" / "performance"
RESULT = "RESULT"
"""In a command: stands for the result file, from which a report is rendered."""


@dataclass(frozen=True)
class Figure:
    """A command whose output is kept. `minutes`: about how long it takes."""

    name: str
    command: str
    minutes: int


FIGURES = (
    Figure("engine", "baton bench engine --shape 0.5b", 6),
    Figure("engines", "scripts/compare_engines --engines baton openvino --rounds 2", 20),
    Figure("handoff", "baton bench handoff --shape 0.5b --requests 14", 5),
    Figure("scheduler", "baton bench scheduler", 1),
    Figure("router", "baton bench router --streams 1000 --streams 5000", 6),
    Figure("router-http", "baton bench router --streams 1000 --streams 5000 --front http", 6),
    Figure("compare", f"baton bench compare --quick --shape 0.5b --result-filename {RESULT}", 15),
    Figure("validate", f"baton bench validate --result-filename {RESULT}", 10),
    Figure("distserve", f"baton simulate --preset distserve --result-filename {RESULT}", 10),
)


def main(argv: Sequence[str]) -> int:
    """Measures; returns 1 if a command failed, whose earlier output then stays."""
    options = _options(argv)
    chosen = [figure for figure in FIGURES if not options.only or figure.name in options.only]
    if options.list:
        for figure in chosen:
            print(f"{figure.name:12} about {figure.minutes:2} min   {_shown(figure)}")
        return 0
    failed = [figure.name for figure in chosen if not _measure(figure)]
    for name in failed:
        print(f"scripts/performance: {name} failed; its earlier output is kept", file=sys.stderr)
    return 1 if failed else 0


def figure_text(command: str, output: str, where: str, when: str) -> str:
    """What is kept of a figure: conditions, command, output."""
    fence = "```" if "```" not in output else "````"
    return f"{where}, {when}:\n\n{fence}console\n$ {command}\n{output.rstrip()}\n{fence}\n"


def _measure(figure: Figure) -> bool:
    """Runs the command and keeps its output; returns False and keeps nothing if it fails."""
    result = RESULTS / f"{figure.name}.json"
    words = [str(result) if word == RESULT else word for word in shlex.split(figure.command)]
    for folder in (KEPT, RESULTS):
        folder.mkdir(parents=True, exist_ok=True)
    print(f"{figure.name}: about {figure.minutes} min: {_shown(figure)}", flush=True)
    environment = {**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}", "COLUMNS": "120"}
    speeds: dict[int, list[float]] = {}
    with measured_cores(speeds):
        done = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return False
    if RESULT in figure.command:
        subprocess.run(["baton", "bench", "report", str(result)], cwd=ROOT, env=environment, check=True)
    where = f"{usable_cores()} cores of {processor()}, commit {_commit()}"
    when = datetime.now(UTC).date().isoformat()
    _kept(figure).write_text(figure_text(_shown(figure), done.stdout, where, f"{when}; {describe(speeds)}"))
    return True


def _shown(figure: Figure) -> str:
    """The command as a reader types it."""
    return figure.command.replace(RESULT, f"{figure.name}.json")


def _kept(figure: Figure) -> Path:
    return KEPT / f"{figure.name}.txt"


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/performance", description="Measure the figures of docs/performance.md."
    )
    names = [figure.name for figure in FIGURES]
    parser.add_argument("only", nargs="*", metavar="FIGURE", help=f"measure only these of: {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="list the commands without running them")
    options = parser.parse_args(argv)
    if unknown := set(options.only) - set(names):
        parser.error(f"no such figure: {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
