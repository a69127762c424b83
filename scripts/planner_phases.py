"""Measures which share of requests keeps its targets while the load changes, for fixed divisions and for the planner.

Each run is a cluster of its own under `baton up`: four node processes and a router, all real but for the runner, whose
steps take the time that their tokens would take (`--runner simulated`). So nodes don't compete for this machine's
cores, as four computing nodes would. Prompts are always handed over.

The load is a schedule of phases: `code` has long prompts and short answers, which three prefill nodes and a decode node
sustain, `chat` the reverse. Arrivals are a Poisson process, lengths vary by half of their means; all runs get the same
requests at the same times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

BATON = Path(sys.executable).with_name("baton")
TTFT_MS, TPOT_MS = 2000, 45
STEPS = {
    "BATON_SIMULATED_STEP_MS": "20",
    "BATON_SIMULATED_PREFILL_TOKEN_MS": "0.5",
    "BATON_SIMULATED_DECODE_SEQ_MS": "1",
}
_NODES = ("--runner", "simulated", "--threads", "1", "--require-disaggregation", "on", "--kv-pulls", "off")
_TARGETS = ("--default-ttft-ms", str(TTFT_MS), "--default-tpot-ms", str(TPOT_MS))


@dataclass(frozen=True)
class Load:
    """Requests per second, and their mean tokens."""

    rate: float
    prompt: int
    output: int


LOADS = {"code": Load(4.0, 800, 8), "chat": Load(5.0, 80, 200)}


def main() -> int:
    """Run all divisions and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", default="code:100,chat:100", help="LOAD:SECONDS,...; default: %(default)s")
    parser.add_argument("--divisions", default="3p1d,1p3d,planner", help="XpYd or planner; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    phases = [(name, float(seconds)) for name, _, seconds in (part.partition(":") for part in args.phases.split(","))]
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        trace = Path(folder) / "trace.csv"
        trace.write_text(trace_of(phases, Random(args.seed)))
        print(f"| division | attained | {' | '.join(name for name, _ in phases)} | moves |", flush=True)
        print(f"|---|---|{'---|' * len(phases)}---|", flush=True)
        for division in args.divisions.split(","):
            print(run(division, phases, trace, Path(folder) / division), flush=True)
    return 0


def trace_of(phases: Sequence[tuple[str, float]], rng: Random) -> str:
    """A trace in the format of Azure's."""
    lines, begin = ["TIMESTAMP,ContextTokens,GeneratedTokens"], 0.0
    for name, seconds in phases:
        load, at = LOADS[name], begin
        while (at := at + rng.expovariate(load.rate)) < begin + seconds:
            minute, second = divmod(at, 60.0)
            tokens = (max(2, round(mean * rng.uniform(0.5, 1.5))) for mean in (load.prompt, load.output))
            lines.append(f"2026-01-01 00:{int(minute):02}:{second:010.7f},{','.join(map(str, tokens))}")
        begin += seconds
    return "\n".join(lines) + "\n"


def run(division: str, phases: Sequence[tuple[str, float]], trace: Path, place: Path) -> str:
    """Measure one division; returns its row of the table."""
    plans = division == "planner"
    prefill, decode = (2, 2) if plans else map(int, division.removesuffix("d").split("p"))
    here = ("--run-dir", str(place))
    up = ("--prefill", str(prefill), "--decode", str(decode), "--planner", "on" if plans else "off")
    baton("up", "-d", *here, *up, *_NODES, *_TARGETS, "--grpc-port", "0", "--http-port", "0")
    try:
        result = place.with_suffix(".json")
        words = ("--dataset-name", "azure", "--dataset-path", str(trace), "--ignore-eos", "--no-progress")
        goodput = ("--goodput", f"ttft:{TTFT_MS}", f"tpot:{TPOT_MS}")
        kept = ("--save-result", "--save-detailed", "--result-dir", str(place.parent), "--result-filename", result.name)
        baton("bench", "serve", *here, *words, *goodput, *kept)
        moves = json.loads(baton("get", "plan", "-o", "json", *here) or "{}").get("items", []) if plans else []
    finally:
        baton("down", *here)
    moves = [move for plan in moves for move in plan["moves"] if move["state"] == "settled"]
    good, bounds = judged(result), [sum(seconds for _, seconds in phases[:place]) for place in range(len(phases) + 1)]
    shares = [share([ok for at, ok in good if begin <= at < end]) for begin, end in pairwise(bounds)]
    return f"| {division} | {share([ok for _, ok in good])} | {' | '.join(shares)} | {len(moves) if plans else ''} |"


def judged(result: Path) -> list[tuple[float, bool]]:
    """When each request was to be sent, in seconds, and whether it kept its targets."""
    outcomes: dict[str, list[Any]] = json.loads(result.read_text())["arrangements"][0]["rates"][0]["outcomes"]
    columns = ("planned_s", "first_token_s", "finished_s", "output_length", "error")
    return [
        (planned, not error and first is not None and _keeps(first - planned, finished - first, tokens))
        for planned, first, finished, tokens, error in zip(*(outcomes[name] for name in columns), strict=True)
    ]


def _keeps(first_s: float, later_s: float, tokens: int) -> bool:
    return first_s * 1e3 <= TTFT_MS and later_s * 1e3 <= TPOT_MS * max(1, tokens - 1)


def share(good: Sequence[bool]) -> str:
    """The share as a percentage."""
    return f"{sum(good) / max(1, len(good)):.1%}"


def baton(*words: str) -> str:
    """The output of a command; raises CalledProcessError."""
    done = subprocess.run([BATON, *words], env={**os.environ, **STEPS}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
