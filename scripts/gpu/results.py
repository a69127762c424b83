"""The result file of `scripts/gpu_check`: one JSON object a line, each written and flushed when it is known.

Every line has a `kind`:

- `run`: a run begins; `fields` describe the machine and the versions.
- `report`: a figure of a stage: `stage`, `name`, `fields`.
- `check`: the same with `ok`, which says whether the check passed.
- `end`: a stage ended or was left out: `stage`, `outcome`, `seconds`, and the end of its output if it didn't pass.

A file may have several runs; of a stage that several runs have, the lines of the last one count (`latest`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Outcome(StrEnum):
    """How a stage ended."""

    PASSED = "passed"
    FAILED = "failed"
    """The stage ran to its end, and a check failed."""
    CRASHED = "crashed"
    DEADLINE = "deadline"
    """The stage ran past its deadline and was killed."""
    INTERRUPTED = "interrupted"
    LEFT_OUT = "left out"
    """The stage didn't fit what was left of the budget."""


class ResultFile:
    """Appends lines to a result file. Each is one write, so the driver and the process of a stage may share a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._file.write(b"\n")  # a killed process left half a line

    def append(self, line: Line) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[Line]:
    """All lines of a result file. A last line that a killed process cut off is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def passed_stages(lines: Sequence[Line]) -> set[str]:
    """The stages whose last run ended with every check passed."""
    outcomes = {line["stage"]: line["outcome"] for line in lines if line["kind"] == "end"}
    return {stage for stage, outcome in outcomes.items() if outcome == Outcome.PASSED}


def latest(lines: Sequence[Line], stage: str) -> list[Line]:
    """The lines of the last run in which a stage was begun."""
    runs: list[list[Line]] = [[]]
    for line in lines:
        if line["kind"] == "run":
            runs.append([])
        elif line["stage"] == stage and line.get("outcome") != Outcome.LEFT_OUT:
            runs[-1].append(line)
    return next((run for run in reversed(runs) if run), [])
