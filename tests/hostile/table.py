"""The table of docs/reliability/attacks.md: the measured effect of each attack on a router.

    BATON_HOSTILE=long BATON_HOSTILE_TABLE=FILE python -m pytest tests/hostile
    python -m tests.hostile.table FILE

The first command appends a line of JSON for each attack, the second one makes a Markdown table of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_HEAD = (
    "attack",
    "loop held at most, CPU (ms)",
    "by the clock (ms)",
    "memory before → peak → after (MB)",
    "as before after (s)",
    "victim's longest request (ms)",
)


@dataclass(frozen=True)
class Row:
    """One attack in one mode; loop and memory are those of the router."""

    attack: str
    mode: str
    held_cpu_ms: float
    """No turn of the event loop took more CPU time: the bound of a histogram's bucket."""
    held_wall_ms: float
    """The same in wall time, which includes other threads and processes on the core."""
    memory_before_mb: float
    memory_peak_mb: float
    memory_after_mb: float
    calm_after_s: float
    """Seconds after the attack until memory, descriptors and tasks were as before."""
    waited_for: str
    victim_longest_ms: float
    attacker_was_told: Mapping[str, int]

    def cells(self) -> Sequence[str]:
        memory = (self.memory_before_mb, self.memory_peak_mb, self.memory_after_mb)
        return (
            f"{self.held_cpu_ms:.0f}",
            f"{self.held_wall_ms:.0f}",
            " → ".join(f"{mb:.0f}" for mb in memory),
            f"{self.calm_after_s:.1f}",
            f"{self.victim_longest_ms:.0f}",
        )


def write_row(row: Row) -> None:
    """Append a row to the file that BATON_HOSTILE_TABLE names, if it is set."""
    if name := os.environ.get("BATON_HOSTILE_TABLE"):
        with Path(name).open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table: one for each attack, with all modes in each cell; the last run of each counts."""
    modes = dict.fromkeys(row.mode for row in rows)
    latest = {(row.attack, row.mode): row.cells() for row in rows}
    yield f"{'; '.join(modes)}:"
    yield ""
    for cells in (_HEAD, ["---"] * len(_HEAD)):
        yield "| " + " | ".join(cells) + " |"
    for attack in dict.fromkeys(row.attack for row in rows):
        found = [latest[attack, mode] for mode in modes if (attack, mode) in latest]
        yield "| " + " | ".join([attack, *map("; ".join, zip(*found, strict=True))]) + " |"


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text().splitlines()
    sys.stdout.write("\n".join(markdown([Row(**json.loads(line)) for line in lines])) + "\n")
