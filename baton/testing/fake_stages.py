"""Stages behind the first one, in threads of this process."""

from __future__ import annotations

import threading
from pathlib import Path

from baton.errors import BatonError
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.remote_stages.first_stage import FirstStage
from baton.runner.remote_stages.stage_links import StageLinks
from baton.runner.remote_stages.stage_worker import StageWorker


def fake_stages(count: int, model_dir: Path, num_threads: int = 1) -> FirstStage:
    """The first stage's side of `count` stages, of which the others are threads here."""
    links = []
    for index in range(1, count):
        ours, theirs = StageLinks.pair(index)
        links.append(ours)
        worker = StageWorker(theirs, model_dir, num_threads, "cpu")
        threading.Thread(target=_run, args=(worker, theirs), name=f"stage-{index}", daemon=True).start()
    return FirstStage(links)


def _run(worker: StageWorker, links: StageLinks) -> None:
    try:
        worker.load()
        worker.follow()
    except (RankLost, BatonError):
        return
    except Exception as error:
        worker.fail(f"{type(error).__name__}: {error}")
    finally:
        worker.close()
        links.close()
