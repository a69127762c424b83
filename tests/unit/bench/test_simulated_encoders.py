"""Images in simulations: who encodes them, and what waits for their rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.bench.arrangement import Arrangement
from baton.bench.simulator.config import NodeSizes, PlannerMode, SimulationConfig
from baton.bench.simulator.simulation import Simulation
from baton.bench.workloads.workload import WorkloadRequest, unique_piece

ENCODE_S = 0.3
_CONFIG = SimulationConfig(Arrangement(1, 1), NodeSizes(encode_ms=ENCODE_S * 1e3), planner=PlannerMode.ADVISE)


def _run(num_encode: int, image_share: float, num_requests: int, every_s: float) -> Simulation:
    config = replace(_CONFIG, num_encode=num_encode, image_share=image_share)
    simulation = Simulation(config, lambda ended: None)
    simulation.run(
        WorkloadRequest(index, index * every_s, 300, 8, (unique_piece(300, 7, index),)) for index in range(num_requests)
    )
    assert len(simulation.outcomes) == num_requests
    return simulation


def test_a_prompt_waits_for_its_rows_wherever_they_are_made() -> None:
    plain, alone, apart = (_run(*setting, 1, 0.0).outcomes.ttft_s[0] for setting in ((1, 0.0), (0, 1.0), (1, 1.0)))
    assert alone - plain == pytest.approx(ENCODE_S)
    assert apart - plain == pytest.approx(ENCODE_S + _CONFIG.network_latency_s)


def test_encode_nodes_spare_the_nodes_that_compute_and_the_planner_sees_how_busy_they_are() -> None:
    alone, apart = (_run(count, 0.5, 200, 0.2) for count in (0, 2))
    assert apart.outcomes.ttft_s.mean() < alone.outcomes.ttft_s.mean() / 2
    figures = apart.result().encoders
    assert figures is not None
    assert figures["num_images"] == pytest.approx(100, abs=20)
    assert apart.planner is not None
    seen = apart.planner.planner.encoders
    # Two and a half images a second, each of 0.3 s, on two nodes.
    assert (seen.num_nodes, seen.wanted) == (2, 1)
    assert seen.pressure == pytest.approx(0.375, abs=0.12)
