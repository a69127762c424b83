"""The process of a stage on its node's own host: `python -m baton.stage.process JSON`.

Only `LocalStage` (`baton/runner/stages/stages_here.py`) starts it, with the connections that it shares.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from baton.errors import BatonError
from baton.processes.interpreter import switch_threads_early
from baton.runner.lean_imports import import_transformers

_GONE = 0


def main(arguments: Sequence[str]) -> int:
    """Run the stage; returns the exit code."""
    # What ends a whole group of processes lets the leader drain: this one computes for it until it is gone.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    switch_threads_early()
    what = json.loads(arguments[0])
    down, up, moves = (socket.socket(fileno=descriptor) for descriptor in what["descriptors"])
    # Imported only now, since torch and transformers take seconds.
    import_transformers()
    from baton.runner.backends.cpu.kernels.errors import RankLost
    from baton.runner.stages.frames import StageLinks
    from baton.runner.stages.stage_worker import StageWorker
    from baton.stage.running import run_stage

    links = StageLinks("the leader", down, up, moves)
    try:
        # While a model is loaded, nothing else would end this process and free what it has.
        run_stage(
            StageWorker(
                links, Path(what["model_dir"]), what["num_threads"], what["device"], lambda _why: os._exit(_GONE)
            )
        )
    except RankLost:
        return 0
    except BatonError:  # the leader is told, and says it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
