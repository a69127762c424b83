"""Clusters in cells: each cell is an independent simulation, whichever process computes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest

from baton.bench.arrangement import Arrangement
from baton.bench.simulator.cells import cell_configs, simulate_cells
from baton.bench.simulator.config import Failure, SimulationConfig
from baton.bench.simulator.simulation import simulate
from baton.bench.workloads.spec import WorkloadSpec
from baton.bench.workloads.workload import Workload, WorkloadRequest
from baton.errors import BatonError, InvalidRequest

SPEC = WorkloadSpec(dataset="multi_turn", num_prompts=48, turns=3, request_rate=6.0, random_output_len=40)
CONFIG = SimulationConfig(
    Arrangement(4, 4), cells=2, failures=(Failure("decode-3", 2.0, 3.0),), max_concurrency=16, keeps_timeline=True
)


def test_each_cell_is_an_independent_simulation() -> None:
    progress: list[int] = []
    together, again = simulate_cells(SPEC.build(), CONFIG, progress.append), simulate_cells(SPEC.build(), CONFIG)
    assert together.outcomes.columns() == again.outcomes.columns()
    alone = [
        simulate([one for one in SPEC.build() if cast(int, one.session) % 2 == cell], part)
        for cell, part in enumerate(cell_configs(CONFIG))
    ]
    columns = [one.outcomes.columns() for one in alone]
    assert together.outcomes.columns() == {name: columns[0][name] + columns[1][name] for name in columns[0]}
    assert together.num_steps == alone[0].num_steps + alone[1].num_steps
    assert together.parts.count == 48
    assert together.timeline == {**(alone[0].timeline or {}), **(alone[1].timeline or {})}
    assert (alone[0].num_failures, alone[1].num_failures, together.num_failures) == (0, 1, 1)
    ends = together.outcomes.finished_s.max() - together.outcomes.planned_s.min()
    assert together.duration_s == pytest.approx(ends)


def test_nodes_of_a_cell_serve_only_its_requests() -> None:
    outcomes = simulate_cells(SPEC.build(), CONFIG).outcomes
    cell_of = {one.index: cast(int, one.session) % 2 for one in SPEC.build()}
    for index, names in zip(outcomes.index.tolist(), outcomes.node_names(), strict=True):
        for name in names:
            assert int(name.rpartition("-")[2]) // 2 == cell_of[index]


@pytest.mark.parametrize("config", [replace(CONFIG, cells=3), replace(CONFIG, max_concurrency=5)])
def test_nodes_and_concurrency_that_can_not_be_shared_equally_are_refused(config: SimulationConfig) -> None:
    with pytest.raises(InvalidRequest, match="evenly"):
        simulate_cells(SPEC.build(), config)


class _Broken:
    """A workload that raises an error, or ends the process, when it is read."""

    def __init__(self, *, dies: bool) -> None:
        self._dies = dies

    def __iter__(self) -> Iterator[WorkloadRequest]:
        if self._dies:
            os._exit(3)
        raise BatonError("the trace is broken")


@pytest.mark.parametrize(("dies", "message"), [(False, "the trace is broken"), (True, r"cell [01] died")])
def test_an_error_in_a_cells_process_is_raised(dies: bool, message: str) -> None:
    with pytest.raises(BatonError, match=message):
        simulate_cells(cast(Workload, _Broken(dies=dies)), replace(CONFIG, failures=()))
