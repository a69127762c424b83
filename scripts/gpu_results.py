"""Renders the newest results of each GPU into docs/performance/gpu.md. Run by scripts/gpu_results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from generated_parts import keep, names_in, rendered
from gpu.results import Line, read_lines
from gpu.tables import render_card

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance" / "gpu.md"
RESULTS = ROOT / "docs" / "performance" / "gpu"
KIND, NAME = "gpu", "results"
NO_RESULTS = "No GPU has been measured by `scripts/gpu_check` so far: there is no result file.\n"


class UnusableResults(Exception):
    """A result file that is not of a GPU."""


def main(argv: Sequence[str]) -> int:
    """Writes the page, or compares it with `--check`; returns 1 if it is outdated or a result file can't be used."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_results", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare, and fail on a difference")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with a place for the results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the result files")
    options = parser.parse_args(argv)
    before = options.page.read_text(encoding="utf-8")
    if names_in(before, KIND) != [NAME]:
        print(f"scripts/gpu_results: {options.page} has no single place for the results", file=sys.stderr)
        return 1
    try:
        text = render_results(options.results)
    except UnusableResults as error:
        print(f"scripts/gpu_results: {error}", file=sys.stderr)
        return 1
    return keep(options.page, rendered(before, KIND, {NAME: text}), only_compare=options.check)


def render_results(folder: Path) -> str:
    """The newest result file of each card, by the dates in their names. Raises UnusableResults."""
    newest: dict[str, list[Line]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = read_lines(path)
        newest[_card(path, lines)] = lines
    return "\n".join(render_card(lines) for lines in newest.values()) or NO_RESULTS


def _card(path: Path, lines: Sequence[Line]) -> str:
    """The card that a result file is of. Raises UnusableResults for one that is not of full sizes on a GPU."""
    runs = [line["fields"] for line in lines if line["kind"] == "run"]
    cards = {str(run["card"]) for run in runs if run["card"] and run["device"] == "cuda" and run["size"] == "full"}
    if len(cards) != 1 or len(runs) != sum(run["device"] == "cuda" and run["size"] == "full" for run in runs):
        raise UnusableResults(f"{path.name} is not of full sizes on one kind of GPU; such figures are not published")
    return cards.pop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
