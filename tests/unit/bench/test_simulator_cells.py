"""A cluster in cells: each one is a simulation by itself, whichever process computes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from baton.bench.arrangement import Arrangement
from baton.bench.simulator.cells import parts_of, simulate_cells
from baton.bench.simulator.simulation import Failure, SimulationConfig, simulate
from baton.bench.workloads import Workload, WorkloadRequest
from baton.bench.workloads.spec import WorkloadSpec
from baton.cli.main import main
from baton.errors import BatonError, InvalidRequest

SPEC = WorkloadSpec(dataset="multi_turn", num_prompts=48, turns=3, request_rate=6.0, random_output_len=40)
CONFIG = SimulationConfig(
    Arrangement(4, 4), cells=2, failures=(Failure("decode-3", 2.0, 3.0),), max_concurrency=16, keeps_timeline=True
)


def test_cells_are_simulations_by_themselves() -> None:
    heard: list[int] = []
    together, again = simulate_cells(SPEC.build(), CONFIG, heard.append), simulate_cells(SPEC.build(), CONFIG)
    assert together.outcomes.columns(0.0) == again.outcomes.columns(0.0)
    alone = [
        simulate([one for one in SPEC.build() if cast(int, one.session) % 2 == cell], part)
        for cell, part in enumerate(parts_of(CONFIG))
    ]
    columns = [one.outcomes.columns(0.0) for one in alone]
    assert together.outcomes.columns(0.0) == {name: columns[0][name] + columns[1][name] for name in columns[0]}
    assert together.num_steps == alone[0].num_steps + alone[1].num_steps
    assert together.parts.count == 48
    assert together.timeline == {**(alone[0].timeline or {}), **(alone[1].timeline or {})}
    assert (alone[0].num_failures, alone[1].num_failures, together.num_failures) == (0, 1, 1)
    ends = together.outcomes.finished_s.max() - together.outcomes.planned_s.min()
    assert together.duration_s == pytest.approx(ends)


def test_nodes_of_a_cell_serve_its_requests_alone() -> None:
    outcomes = simulate_cells(SPEC.build(), CONFIG).outcomes
    cell_of = {one.index: cast(int, one.session) % 2 for one in SPEC.build()}
    for index, names in zip(outcomes.index.tolist(), outcomes.node_names(), strict=True):
        for name in names:
            assert int(name.rpartition("-")[2]) // 2 == cell_of[index]


@pytest.mark.parametrize("config", [replace(CONFIG, cells=3), replace(CONFIG, max_concurrency=5)])
def test_what_can_not_be_shared_evenly_is_refused(config: SimulationConfig) -> None:
    with pytest.raises(InvalidRequest, match="evenly"):
        simulate_cells(SPEC.build(), config)


def test_the_command_refuses_it_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--arrangement", "3p2d", "--cells", "2"]) == 2
    assert "--cells" in capsys.readouterr().err


class _Broken:
    """A workload that goes wrong where it is read."""

    def __init__(self, *, dies: bool) -> None:
        self._dies = dies

    def __iter__(self) -> Iterator[WorkloadRequest]:
        if self._dies:
            os._exit(3)
        raise BatonError("the trace is broken")


@pytest.mark.parametrize(("dies", "story"), [(False, "the trace is broken"), (True, "the process of cell [01] died")])
def test_what_goes_wrong_in_a_process_is_told(dies: bool, story: str) -> None:
    with pytest.raises(BatonError, match=story):
        simulate_cells(cast(Workload, _Broken(dies=dies)), replace(CONFIG, failures=()))
