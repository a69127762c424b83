"""Processes of stages that are killed or stopped, and their ranks, and the death of their leader."""

from __future__ import annotations

import os
import queue
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.spec import TorchSpec
from baton.runner.stages.stages_here import start_on
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
    with closing(load_runner(TorchSpec(model, dtype="float32", num_blocks=16, pipeline_parallel=3))) as runner:
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


def test_stages_and_their_ranks_end_with_the_process_that_started_them(model: Path) -> None:
    pids = ranks_of_killed_leader(2, 2, model)
    assert len(set(pids)) == 3
    wait_until_gone(pids)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_killed_rank_of_any_stage_ends_them_all(model: Path, place: int) -> None:
    """The last stage has the ranks 0 and 1, and the first one 2 and 3."""
    told = queue.SimpleQueue[str]()
    spec = TorchSpec(model, dtype="float32", num_blocks=16, tensor_parallel=2, pipeline_parallel=2)
    with closing(load_runner(spec)) as runner:
        reports = runner.rank_reports()
        assert [report.rank for report in reports] == [0, 1, 2, 3]
        assert all(report.is_up for report in reports)
        runner.on_lost(told.put)
        assert runner.execute_model(step("before")).sampled_token_ids["before"]
        os.kill(reports[place].pid, signal.SIGKILL)
        assert f"rank {place} (process {reports[place].pid}) was ended by SIGKILL" in told.get(timeout=BOUND_S)
        with pytest.raises(RankLost, match=f"rank {place} "):
            runner.execute_model(step("behind"))
    wait_until_gone([report.pid for report in reports[1:]])


def test_a_stage_that_can_not_load_the_model_says_why(model: Path) -> None:
    spec = TorchSpec(model, dtype="float32", num_blocks=16, pipeline_parallel=2)
    stages = start_on(["cpu"], replace(spec, model_dir=Path("/nowhere")))
    pids = stages.pids
    with pytest.raises(ConfigError, match=r"rank 1 \(process \d+\) has failed: .*/nowhere"):
        load_runner(spec, stages=stages)
    wait_until_gone(pids)
