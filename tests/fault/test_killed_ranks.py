"""Processes of ranks, and of stages with caches of their own, that are killed or stopped, or whose leader is."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from baton.engine.batch import NewRequestData, SchedulerOutput
from baton.errors import AdapterRefused, ConfigError
from baton.messages.sampling import SamplingParams
from baton.processes.fork_server import own_fork_server
from baton.runner.backends.cpu.kernels.errors import RankLost
from baton.runner.backends.ranks.host_ranks import SharedFiles
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.ranks.rank_group import RankGroup
from baton.runner.spec import TorchSpec
from baton.runner.stage_spec import StageSpec
from baton.runner.stages.stages_here import start_on
from tests.support.adapter_files import lora_tensors, write_adapter
from tests.support.adapter_runs import load_adapter
from tests.support.idle_leader import ranks_of_killed_leader
from tests.support.process_counts import shared_memory_segments
from tests.support.rank_processes import wait_until_gone
from tests.support.tiny_models import TINY_MODELS

BOUND_S = 100.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_random_model(directory, TINY_MODELS["llama"], seed=5)
    return directory


@pytest.fixture
def ranks_as_programs() -> None:
    """Nothing forks: so ranks start on GPUs, and in nodes that were started by hand."""
    assert own_fork_server() is None


def pids_of(runner: TorchModelRunner) -> list[int]:
    first_rank = runner._leader
    assert first_rank is not None
    assert isinstance(first_rank.followers, RankGroup)
    return first_rank.followers.pids


def step(request_id: str, adapter: str = "") -> SchedulerOutput:
    sampling = SamplingParams(temperature=0.0)
    request = NewRequestData(request_id, [1, 2, 3], (), sampling, range(1, 2), 0, adapter=adapter)
    return SchedulerOutput(0, [request], [], {request_id: 3}, 3)


@pytest.mark.parametrize(
    ("number", "reason", "start"),
    [
        (signal.SIGKILL, "was ended by SIGKILL", "ranks_as_programs"),
        (signal.SIGSTOP, "sends no heartbeats", "forked_ranks"),
    ],
)
def test_a_killed_or_stopped_rank_ends_the_group(
    model: Path,
    number: signal.Signals,
    reason: str,
    start: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request.getfixturevalue(start)
    monkeypatch.setattr("baton.runner.ranks.rank_group._MISSED_HEARTBEATS", 4)
    shared, told = shared_memory_segments(), queue.SimpleQueue[str]()
    with closing(load_runner(TorchSpec(model, dtype="float32", num_blocks=16, tensor_parallel=2))) as runner:
        (pid,) = pids_of(runner)
        runner.on_lost(told.put)
        # Whoever ends a group of processes with these lets the first rank finish its work.
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        assert runner.execute_model(step("before")).sampled_token_ids["before"]
        os.kill(pid, number)
        why = told.get(timeout=BOUND_S)
        assert why == f"rank 1 (process {pid}) {reason}"
        with pytest.raises(RankLost):
            runner.execute_model(step("behind"))
    wait_until_gone([pid])
    assert shared_memory_segments() == shared


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
def test_ranks_and_stages_end_with_the_process_that_started_them(model: Path, tp: int, pp: int) -> None:
    pids = ranks_of_killed_leader(tp, pp, model)
    assert len(set(pids)) == tp * pp - 1
    wait_until_gone(pids)


@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_can_not_load_the_model_says_why(model: Path) -> None:
    def start(spec: StageSpec, files: SharedFiles, abort: Callable[[], None]) -> RankGroup:
        return RankGroup(replace(spec, model_dir="/nowhere"), files, abort)

    with pytest.raises(ConfigError, match=r"can't be divided among ranks: rank 1 .* exit code 1: .*/nowhere"):
        load_runner(TorchSpec(model, dtype="float32", num_blocks=16, tensor_parallel=2), start_ranks=start)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSTOP, "sends no heartbeats")]
)
def test_a_killed_or_stopped_stage_ends_them_all(
    model: Path, number: signal.Signals, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        monkeypatch.setattr("baton.runner.stages.stage_leader.MISSED_HEARTBEATS", 4)
        # A stage that is stopped is noticed soon when something is to be computed.
        with pytest.raises(RankLost, match=reason):
            runner.execute_model(step("behind"))
        assert told.get(timeout=BOUND_S) == f"rank 2 (process {third.pid}) {reason}"
        assert not any(report.is_up for report in runner.rank_reports()[1:])
    wait_until_gone([second.pid, third.pid])


@pytest.mark.usefixtures("forked_ranks")
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


@pytest.mark.usefixtures("forked_ranks")
def test_a_load_of_an_adapter_ends_with_a_killed_rank(model: Path, tmp_path: Path) -> None:
    """The rank is stopped before, so it can't be done when it is killed."""
    spec = TorchSpec(model, dtype="float32", num_blocks=16)
    whole = load_runner(spec)
    adapters = [
        write_adapter(tmp_path / f"{seed}", lora_tensors(whole.adaptable_modules, seed=seed, scale=0.1))
        for seed in range(2)
    ]
    used = load_adapter(whole, adapters[0])
    expected = whole.execute_model(step("one", used)).sampled_token_ids
    divided = replace(spec, tensor_parallel=2, pipeline_parallel=2)
    with closing(load_runner(divided)) as runner, ThreadPoolExecutor(1) as pool:
        load_adapter(runner, adapters[0])
        assert runner.execute_model(step("one", used)).sampled_token_ids == expected
        assert expected != whole.execute_model(step("two")).sampled_token_ids
        pid = runner.rank_reports()[3].pid
        os.kill(pid, signal.SIGSTOP)
        loading = pool.submit(load_adapter, runner, adapters[1])
        # Another stage has loaded it by then.
        runner.adapters.check(adapters[1])
        assert not loading.done()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises((RankLost, AdapterRefused), match="rank 3 "):
            loading.result(BOUND_S)
        with pytest.raises(RankLost, match="rank 3 "):
            runner.adapters.check(adapters[1])


@pytest.mark.usefixtures("forked_ranks")
def test_a_stage_that_can_not_load_the_model_says_why(model: Path) -> None:
    spec = TorchSpec(model, dtype="float32", num_blocks=16, pipeline_parallel=2)
    stages = start_on(["cpu"], replace(spec, model_dir=Path("/nowhere")))
    pids = stages.pids
    with pytest.raises(ConfigError, match=r"rank 1 \(process \d+\) has failed: .*/nowhere"):
        load_runner(spec, stages=stages)
    wait_until_gone(pids)
