"""Stages that this process leads, in its threads."""

from __future__ import annotations

import threading
from pathlib import Path

from baton.errors import BatonError
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.remote_stages.stage_leader import StageLeader
from baton.runner.remote_stages.stage_links import StageLinks
from baton.runner.remote_stages.stage_worker import StageWorker


class FakeStages(StageLeader):
    """The leader's side of stages with caches of their own, of which the others are threads here."""

    def __init__(self, count: int, model_dir: Path, num_threads: int = 1) -> None:
        """`count`: number of all stages."""
        ends = [StageLinks.pair(index) for index in range(1, count)]
        self.workers = [StageWorker(theirs, model_dir, num_threads, "cpu") for _, theirs in ends]
        self._threads = [
            threading.Thread(target=_run, args=(worker, theirs), daemon=True)
            for worker, (_, theirs) in zip(self.workers, ends, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        super().__init__([ours for ours, _ in ends])

    def close(self) -> None:
        super().close()
        for thread in self._threads:
            thread.join()


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
