"""Checks and measures Baton on the GPU of this machine, stage by stage.

Without a GPU every stage runs to its end at tiny sizes, Triton's kernels in its interpreter: that finds what is broken
in a stage before a GPU's time is spent on it. Ends with 0 if all stages passed, 1 if one did not, 3 if none failed and
some were left out, 130 on Ctrl-C. Results are written line by line, so a run that was killed goes on with --resume.
"""

from __future__ import annotations

import argparse
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from gpu.driver import Driver, Stage, find_stages
from gpu.machine import NoAnswer, build_kernels, card, default_results, describe, stage_environment, unpack
from gpu.results import Outcome, passed_stages, read_lines
from gpu.stage import Device, Size

STAGES = (
    "environment",
    "bits",
    "tests",
    "micro",
    "engine",
    "pair",
    "transformers",
)
"""All stages, in the order in which they run."""
BUDGET_S = 560.0
"""Seconds for all stages on a GPU: their deadlines, and the longest wait for the C kernels."""
LEFT_OUT = 3
"""The exit status when nothing failed, but stages didn't fit the budget."""


def main() -> None:
    stages = find_stages(Path(__file__).parent / "stages", STAGES, "gpu.stages.")
    arguments = _arguments(stages)
    name, now = _card(arguments.device), datetime.now(UTC)
    device: Device = arguments.device or ("cuda" if name else "cpu")
    size: Size = arguments.size or ("full" if device == "cuda" else "tiny")
    if device == "cpu" and size == "full":
        sys.exit("scripts/gpu_check: --size full needs a GPU: Triton's interpreter would take days")
    results = arguments.resume or arguments.results or default_results(device, name, now)
    done = passed_stages(read_lines(arguments.resume)) if arguments.resume else set()
    budget = arguments.budget or (BUDGET_S if device == "cuda" else float("inf"))
    wanted = [stage for stage in stages if stage.name in arguments.only and stage.name not in done]
    unpack()
    driver = Driver(results, size, device, stage_environment(device, size), budget, build_kernels())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        driver.run(wanted, describe(device, size, name, now))
    except KeyboardInterrupt:
        print(f"scripts/gpu_check: interrupted; go on with --resume {results}", file=sys.stderr)
        sys.exit(130)
    print(f"results: {results}")
    sys.exit(status(driver.outcomes))


def _card(device: Device | None) -> str | None:
    """The name of the GPU, which nobody asks for if the stages are to run on the CPU."""
    try:
        return None if device == "cpu" else card()
    except NoAnswer as error:
        sys.exit(f"scripts/gpu_check: {error}; --device cpu leaves the GPU alone")


def _arguments(stages: list[Stage]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in stages]
    listed = ", ".join(f"{stage.name} ({stage.seconds:.0f} s)" for stage in stages)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STAGE", help=f"of {listed}")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="append to FILE, without stages that passed there")
    parser.add_argument("--results", type=Path, metavar="FILE", help="where results go; see docs/performance/gpu")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"for all stages, on a GPU {BUDGET_S:.0f}")
    parser.add_argument("--size", choices=("tiny", "full"), help="full on a GPU, tiny on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda where there is a GPU")
    return parser.parse_args()


def status(outcomes: dict[str, Outcome]) -> int:
    """The exit status of a run whose stages ended so."""
    kinds = set(outcomes.values())
    if kinds - {Outcome.PASSED, Outcome.LEFT_OUT}:
        return 1
    return LEFT_OUT if Outcome.LEFT_OUT in kinds else 0


if __name__ == "__main__":
    main()
