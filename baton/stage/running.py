"""Runs one stage until its leader is gone."""

from __future__ import annotations

import logging
import threading

from baton.processes.interpreter import rare_collections
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.stages.stage_worker import StageWorker
from kv_transfer.mover.mover_server import MoverServer

_END_S = 30.0

_log = logging.getLogger(__name__)


def run_stage(worker: StageWorker) -> None:
    """Load what the leader says, and compute and move blocks for it until it is gone; raises RankLost then.

    Raises ConfigError for a model that can't be loaded here; the leader is told. The connections are closed in the end.
    """
    links = worker.links
    moving: threading.Thread | None = None
    try:
        with rare_collections():
            worker.load()
        moving = threading.Thread(target=_move_blocks, args=(worker,), name="baton-moves", daemon=True)
        moving.start()
        layers = worker.memory.layers or range(0)
        _log.info("the layers %d to %d are loaded, and computed for %s", layers.start, layers.stop - 1, links.name)
        worker.follow()
    except Exception as error:
        if not isinstance(error, RankLost):
            worker.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        worker.close()
        if moving is not None:
            # The thread ends with the connection, unless a call into the transfer agent does not return.
            moving.join(_END_S)
        links.close()


def _move_blocks(worker: StageWorker) -> None:
    """Move blocks of this stage's part of the KV cache until the leader is gone, or this stage can't any more."""
    try:
        MoverServer(worker.links.moves, worker.memory).serve()
    except Exception as error:
        _log.exception("this stage can't move blocks any more: it ends")
        worker.fail(f"{type(error).__name__}: {error}")
    finally:
        # Without its blocks the node can't hand over, so the stage ends, too.
        worker.cut()
