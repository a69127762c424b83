"""Runs one stage until the leader is gone."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.remote_stages.stage_links import StageLinks
from baton.runner.remote_stages.stage_worker import StageWorker

_log = logging.getLogger(__name__)


def run_stage(links: StageLinks, model_dir: Path, num_threads: int, device: str) -> None:
    """Load what the leader says, and compute and move blocks for it until it is gone; raises RankLost then.

    Raises ConfigError for a model that can't be loaded here; the leader is told. `links` are closed in the end.
    """
    worker = StageWorker(links, model_dir, num_threads, device)
    try:
        worker.load()
        threading.Thread(target=_move_blocks, args=(worker, links), name="baton-moves", daemon=True).start()
        _log.info("stage %d of %d is loaded, and computes for %s", worker.stage.index, worker.stage.count, links.name)
        worker.follow()
    except Exception as error:
        if not isinstance(error, RankLost):
            worker.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        worker.close()
        links.close()


def _move_blocks(worker: StageWorker, links: StageLinks) -> None:
    # The end of this connection is the end of the stage, too: the first one can't hand over without its blocks.
    pass
