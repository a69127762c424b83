"""The process of one stage, `python -m gpu.run_stage MODULE --stage NAME …`; it ends with 0, or with CHECK_FAILED."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import signal
import sys
from pathlib import Path
from types import FrameType

from gpu.results import ResultFile
from gpu.stage import StageContext

CHECK_FAILED = 3
"""The exit status of a stage that ran to its end and in which a check failed."""
LAST_WORDS_S = 2.0
"""So many seconds before its deadline a stage's process prints where its threads are."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--stage", required=True)
    parser.add_argument("--size", choices=("tiny", "full"), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    # What the stage started must be ended by its own `finally`.
    signal.signal(signal.SIGTERM, _end)
    faulthandler.dump_traceback_later(max(arguments.seconds - LAST_WORDS_S, 0.1))
    results = ResultFile(arguments.results)
    context = StageContext(arguments.stage, arguments.size, arguments.device, arguments.seconds, results)
    importlib.import_module(arguments.module).run(context)
    faulthandler.cancel_dump_traceback_later()
    if context.failed:
        sys.exit(CHECK_FAILED)


def _end(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
