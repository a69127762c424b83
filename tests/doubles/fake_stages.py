"""The stages of a model in threads of this process, over connections as between processes."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import torch

from baton.runner.parts import divided
from baton.runner.spec import TorchSpec
from baton.runner.stages.frames import StageLinks
from baton.runner.stages.stage_leader import StageLeader
from baton.runner.stages.stage_worker import StageWorker
from baton.stage.running import run_stage
from tests.doubles.fake_rank_group import FakeRankGroup


class FakeStages(StageLeader):
    """The leader's side of stages, of which the others are threads here, and so are their ranks."""

    def __init__(self, count: int, model_dir: Path, num_threads: int = 1, tensor_parallel: int = 1) -> None:
        """`count`: number of all stages. `num_threads`: of all stages together."""
        ends = [StageLinks.pair(index * tensor_parallel) for index in range(1, count)]
        self.workers = [
            StageWorker(theirs, model_dir, share, "cpu", start_ranks=FakeRankGroup)
            for (_, theirs), share in zip(ends, divided(num_threads, count), strict=False)
        ]
        self._threads = [threading.Thread(target=_run, args=(worker,), daemon=True) for worker in self.workers]
        for thread in self._threads:
            thread.start()
        super().__init__([ours for ours, _ in ends], tensor_parallel=tensor_parallel)

    @classmethod
    def start(cls, spec: TorchSpec, _own_device: torch.device) -> FakeStages:
        """Start the stages of this host before the last (`StartStages`)."""
        return cls(spec.pipeline_parallel, spec.model_dir, spec.num_threads, spec.tensor_parallel)

    def close(self) -> None:
        super().close()
        for thread in self._threads:
            thread.join()


def _run(worker: StageWorker) -> None:
    # The leader is told of whatever goes wrong.
    with contextlib.suppress(Exception):
        run_stage(worker)
