"""Stages that this process leads, in its threads."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from baton.runner.remote_stages.stage_leader import StageLeader
from baton.runner.remote_stages.stage_links import StageLinks
from baton.runner.remote_stages.stage_worker import StageWorker
from baton.stage.running import run_stage


class FakeStages(StageLeader):
    """The leader's side of stages with caches of their own, of which the others are threads here."""

    def __init__(self, count: int, model_dir: Path, num_threads: int = 1) -> None:
        """`count`: number of all stages."""
        ends = [StageLinks.pair(index) for index in range(1, count)]
        self.workers = [StageWorker(theirs, model_dir, num_threads, "cpu") for _, theirs in ends]
        self._threads = [threading.Thread(target=_run, args=(worker,), daemon=True) for worker in self.workers]
        for thread in self._threads:
            thread.start()
        super().__init__([ours for ours, _ in ends])

    def close(self) -> None:
        super().close()
        for thread in self._threads:
            thread.join()


def _run(worker: StageWorker) -> None:
    # The leader is told of whatever goes wrong.
    with contextlib.suppress(Exception):
        run_stage(worker)
