"""What every runner with several ranks does when one is lost: `FakeRankedRunner`, and the real one with threads."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, cast

import pytest

from baton.engine.batch import NewRequestData, SchedulerOutput
from baton.engine.runner import ModelRunner, RunnerLost
from baton.messages.node_model import NodeShape
from baton.messages.sampling import SamplingParams
from baton.runner import SimulatedSpec
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.ranks.step_slot import StepSlot
from baton.runner.spec import TorchSpec
from baton.runner.stages import stage_worker
from tests.doubles.fake_rank_group import FakeRankGroup
from tests.doubles.fake_ranked_runner import FakeRankedRunner, LossMoment
from tests.doubles.fake_stages import FakeStages
from tests.support.tiny_models import TINY_MODELS

BLOCK_SIZE = 4


class Ranked(Protocol):
    """A runner with two ranks, of which a test loses the second one."""

    @property
    def runner(self) -> ModelRunner: ...

    def lose(self, reason: str) -> None: ...

    def lose_in_next_step(self) -> None: ...


class FakeRanked:
    def __init__(self, shape: NodeShape) -> None:
        spec = SimulatedSpec(num_blocks=16, block_size=BLOCK_SIZE, num_layers=2, num_kv_heads=2)
        self.runner = FakeRankedRunner(spec, shape)

    def lose(self, reason: str) -> None:
        self.runner.lose(reason)

    def lose_in_next_step(self) -> None:
        self.runner.lose_at_step(0, LossMoment.IN, 1, "in a step")


class RealRanked:
    def __init__(self, shape: NodeShape, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_random_model(directory, TINY_MODELS["llama"], seed=5)
        self.runner: TorchModelRunner = load_runner(
            TorchSpec(
                directory,
                dtype="float32",
                block_size=BLOCK_SIZE,
                num_blocks=16,
                tensor_parallel=shape.tp,
                pipeline_parallel=shape.pp,
            ),
            start_ranks=FakeRankGroup,
            start_stages=FakeStages.start,
        )
        self._monkeypatch = monkeypatch

    def lose(self, reason: str) -> None:
        first_rank = self.runner._leader
        assert first_rank is not None
        first_rank.followers.declare_lost(reason)

    def lose_in_next_step(self) -> None:
        def fails(*_arguments: Any, **_named: Any) -> None:
            raise MemoryError("in a step")

        # Only followers and stages are called so by others: the leading transformer computes its own part by itself.
        self._monkeypatch.setattr(StepSlot, "read", fails)
        self._monkeypatch.setattr(stage_worker, "read_numbers", fails)


@pytest.fixture(params=[NodeShape(tp=2), NodeShape(pp=2)], ids=str)
def shape(request: pytest.FixtureRequest) -> NodeShape:
    return cast(NodeShape, request.param)


@pytest.fixture(params=["fake", "real"])
def ranked(
    request: pytest.FixtureRequest, shape: NodeShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ranked]:
    made: Ranked = FakeRanked(shape) if request.param == "fake" else RealRanked(shape, tmp_path, monkeypatch)
    with closing(made.runner):
        yield made


def prompt(request_id: str, first_block: int) -> SchedulerOutput:
    """A step that computes a prompt of a block and a bit."""
    new = NewRequestData(
        request_id, [1, 2, 3, 4, 5], (), SamplingParams(temperature=0.0), range(first_block, first_block + 2), 0
    )
    return SchedulerOutput(0, [new], [], {request_id: 5}, 5)


def forget(request_id: str) -> SchedulerOutput:
    """A step that computes nothing."""
    return SchedulerOutput(0, [], [], {}, 0, finished_req_ids=frozenset({request_id}))


def block_of(runner: ModelRunner, block: int) -> bytes:
    memory = runner.memory
    return ctypes.string_at(memory.base_address + block * memory.block_bytes, memory.block_bytes)


def test_no_step_is_computed_once_a_rank_is_lost(ranked: Ranked) -> None:
    told: list[str] = []
    ranked.runner.on_lost(told.append)
    assert len(ranked.runner.execute_model(prompt("before", 1)).sampled_token_ids["before"]) == 1
    assert told == []
    ranked.lose("first")
    ranked.lose("second")
    assert told == ["first"]
    for _ in range(2):
        with pytest.raises(RunnerLost, match="first"):
            ranked.runner.execute_model(prompt("behind", 3))


def test_a_loss_is_told_to_the_last_callback_alone(ranked: Ranked) -> None:
    replaced: list[str] = []
    told: list[str] = []
    ranked.runner.on_lost(replaced.append)
    ranked.runner.on_lost(told.append)
    ranked.lose("gone")
    assert (replaced, told) == ([], ["gone"])
    later: list[str] = []
    ranked.runner.on_lost(later.append)
    assert later == ["gone"]


def test_a_rank_that_is_lost_in_a_step_spoils_this_step_alone(ranked: Ranked) -> None:
    told = queue.SimpleQueue[str]()
    ranked.runner.on_lost(told.put)
    ranked.runner.execute_model(prompt("before", 1))
    ranked.runner.execute_model(prompt("same", 3))
    kept = block_of(ranked.runner, 1)
    # All of it was stored: two requests of one prompt have the same KV.
    assert block_of(ranked.runner, 3) == kept != bytes(len(kept))
    ranked.lose_in_next_step()
    with pytest.raises(RunnerLost, match="in a step"):
        ranked.runner.execute_model(prompt("broken", 5))
    # From a thread of its own: the step may end first.
    assert "in a step" in told.get(timeout=60)
    assert block_of(ranked.runner, 1) == kept
    assert block_of(ranked.runner, 5) != kept
    with pytest.raises(RunnerLost, match="in a step"):
        ranked.runner.execute_model(prompt("behind", 7))


def test_a_step_that_computes_nothing_needs_no_other_rank(ranked: Ranked) -> None:
    ranked.runner.execute_model(prompt("before", 1))
    ranked.lose("gone")
    assert ranked.runner.execute_model(forget("before")).sampled_token_ids == {}


def test_ranks_that_were_ended_are_not_lost(ranked: Ranked) -> None:
    told: list[str] = []
    ranked.runner.on_lost(told.append)
    ranked.runner.close()
    ranked.runner.close()
    ranked.lose("too late")
    assert told == []
