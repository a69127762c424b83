"""Processes of stages with caches of their own that are killed or stopped, and the death of their leader."""

from __future__ import annotations

import os
import queue
import signal
from contextlib import closing
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.remote_stages.stages_here import start_on
from baton.runner.spec import TorchSpec
from tests.fault.test_killed_ranks import BOUND_S, step
from tests.support.idle_leader import ranks_of_killed_leader
from tests.support.rank_processes import wait_until_gone
from tests.support.tiny_models import TINY_MODELS

pytestmark = pytest.mark.usefixtures("forked_ranks")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_random_model(directory, TINY_MODELS["llama"], seed=5)
    return directory


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSTOP, "sends no heartbeats")]
)
def test_a_killed_or_stopped_stage_ends_them_all(model: Path, number: signal.Signals, reason: str) -> None:
    told = queue.SimpleQueue[str]()
    stages = start_on(["cpu", "cpu"], model, 1)
    with closing(
        load_runner(TorchSpec(model, dtype="float32", num_blocks=16, pipeline_parallel=3), stages=stages)
    ) as runner:
        own, second, third = runner.rank_reports()
        assert (own.pid, second.rank, third.rank) == (os.getpid(), 1, 2)
        assert second.is_up
        runner.on_lost(told.put)
        # Whoever ends a group of processes with these lets the leader finish its work.
        for name in (signal.SIGTERM, signal.SIGINT):
            os.kill(second.pid, name)
        assert runner.execute_model(step("before")).sampled_token_ids["before"]
        os.kill(third.pid, number)
        # A stage that is stopped is noticed soon when something is to be computed.
        with pytest.raises(RankLost, match=reason):
            runner.execute_model(step("behind"))
        assert told.get(timeout=BOUND_S) == f"rank 2 (process {third.pid}) {reason}"
        assert not any(report.is_up for report in runner.rank_reports()[1:])
    wait_until_gone([second.pid, third.pid])


def test_stages_end_with_the_process_that_started_them(model: Path) -> None:
    pids = ranks_of_killed_leader("stages", model)
    assert len(pids) == 1
    wait_until_gone(pids)


def test_a_stage_that_can_not_load_the_model_says_why(model: Path) -> None:
    stages = start_on(["cpu"], Path("/nowhere"), 1)
    pids = stages.pids
    with pytest.raises(ConfigError, match=r"rank 1 \(process \d+\) has failed: .*/nowhere"):
        load_runner(TorchSpec(model, dtype="float32", num_blocks=16, pipeline_parallel=2), stages=stages)
    wait_until_gone(pids)
