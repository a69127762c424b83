"""Interleaved goodput searches on a simulated machine: they end in time, and keep what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.arrangement import chosen
from baton.bench.compare.interleaved import (
    OVERHEAD_S,
    InterleavedRuns,
    MeasuredArrangement,
    Pace,
    RunningArrangement,
    default_slo,
)
from baton.bench.compare.report import compare_result, verdict
from baton.bench.compare.run import Comparison
from baton.bench.config import CompareConfig
from baton.bench.experiment import Experiment
from baton.bench.load.endpoint import Target
from baton.bench.load.run import GeneratorLoad, LoadPlan, LoadRun
from baton.bench.nodes.run import NodesRun
from baton.bench.results.outcome import Outcome, Outcomes
from baton.bench.workloads.spec import WorkloadSpec
from baton.errors import BatonError, DeadlineExceeded, ExitCode, Unreachable
from baton.models.resolve import FoundModel
from tests.doubles.fake_clock import FakeClock

TOKENS = 64
NAMES = ("colocated", "1p1d")


@dataclass
class FormulaMachine:
    """Simulates loads on a manual clock: an arrangement keeps any SLO up to its capacity, and none above it."""

    clock: FakeClock
    capacities: Sequence[float]
    lone_s: float = 2.0
    """Latency of a single request."""
    starts_s: float = 2.0
    """Time that a generator takes to start."""
    dies_in_run: float = math.inf
    plans: list[LoadPlan] = field(default_factory=list)

    def run(self, number: int, plan: LoadPlan) -> NodesRun:
        self.plans.append(plan)
        spec = plan.workload
        rate = 1 / self.lone_s if plan.max_concurrency == 1 else spec.request_rate
        slowness = 1.0 if plan.max_concurrency == 1 or rate <= self.capacities[number] else 20.0
        limit_s = math.inf if plan.limit_s is None else plan.limit_s
        outcomes = Outcomes()
        first_s, takes_s = 0.4 * self.lone_s * slowness, self.lone_s * slowness
        for index in range(spec.num_prompts or 0):
            at_s = index / rate
            if at_s + takes_s <= limit_s:
                outcomes.append(Outcome(index, at_s, at_s, at_s + first_s, at_s + takes_s, 512, TOKENS, [0.1]))
        lasts_s = min(limit_s, (spec.num_prompts or 0) / rate + takes_s)
        self.clock.advance(self.starts_s + lasts_s)
        is_dead = len(self.plans) > self.dies_in_run
        load = GeneratorLoad(1, 0.1, 0.1, 0.1)
        run = LoadRun(outcomes, lasts_s, spec.num_prompts or 0, load, was_interrupted=False, is_unreachable=is_dead)
        return NodesRun(run, {}, {}, 0)


def compared(machine: FormulaMachine, config: CompareConfig, deadline_s: float = math.inf) -> Comparison:
    measured = [MeasuredArrangement(one, {}) for one in config.arrangements]
    running = [
        RunningArrangement(Target("baton", str(number)), {}, partial(machine.run, number))
        for number in range(len(measured))
    ]
    runs = InterleavedRuns(config, measured, running, Experiment(lambda _: None, machine.clock, deadline_s))
    undisturbed = runs.calibrate()
    slo = default_slo(undisturbed, config.ttft_factor)
    return Comparison(slo, undisturbed, measured, runs.search_all(slo, undisturbed))


def config_of(repeats: int = 3, run_s: float = 15.0, tries: int = 8) -> CompareConfig:
    workload = WorkloadSpec(random_input_len=512, random_output_len=TOKENS)
    return CompareConfig(
        chosen(NAMES, 2),
        FoundModel(Path("model"), "model"),
        "auto",
        workload,
        None,
        repeats=repeats,
        run_s=run_s,
        max_tries=tries,
    )


def test_each_goodput_is_found_and_all_arrangements_get_the_same_load() -> None:
    machine = FormulaMachine(FakeClock(), (0.8, 2.0))
    found = compared(machine, config_of())
    assert found.failure is None
    for one, capacity in zip(found.measured, machine.capacities, strict=True):
        assert len(one.goodputs) == len(one.common) == 3
        assert all(capacity / 1.1 <= goodput <= capacity for goodput in one.goodputs)
    for mine, theirs in zip(found.measured[0].common, found.measured[1].common, strict=True):
        assert mine.rate == theirs.rate
    loads = [
        (plan.workload.seed, plan.workload.num_prompts, plan.workload.request_rate)
        for plan in machine.plans
        if plan.max_concurrency is None and plan.target.address == "0"
    ]
    assert len({seed for seed, _, _ in loads}) == len(loads)


@given(
    lone_s=st.floats(0.01, 20),
    capacities=st.tuples(st.floats(0.001, 50), st.floats(0.001, 50)),
    started_s=st.floats(1, 500),
    starts_s=st.floats(0.1, OVERHEAD_S),
)
def test_the_time_budget_is_kept_on_any_machine(
    lone_s: float, capacities: tuple[float, float], started_s: float, starts_s: float
) -> None:
    clock = FakeClock(started_s)
    machine = FormulaMachine(clock, capacities, lone_s, starts_s)
    try:
        found = compared(machine, config_of(run_s=30, tries=5), deadline_s=440.0)
    except BatonError:  # not even single requests ended in their share of the time
        assert clock.monotonic() <= max(440.0, started_s + 2 * (OVERHEAD_S + 1.0))
        return
    assert clock.monotonic() <= max(440.0, started_s + 2 * (OVERHEAD_S + 1.0))
    if isinstance(found.failure, DeadlineExceeded):
        assert not any(one.goodputs for one in found.measured)
    else:
        assert found.failure is None
        assert all(one.goodputs for one in found.measured)


def test_the_quick_comparison_of_the_documented_load_has_time_for_all_its_runs() -> None:
    """Two cores, 0.5b, 512 and 64 tokens: a single request takes about two seconds, starting all nodes a minute."""
    clock = FakeClock(60.0)
    found = compared(FormulaMachine(clock, (0.5, 1.1), 2.2), config_of(run_s=30, tries=5), deadline_s=440.0)
    assert found.failure is None
    assert clock.monotonic() <= 440
    for one, capacity in zip(found.measured, (0.5, 1.1), strict=True):
        assert one.goodputs[0] == pytest.approx(capacity, rel=0.2)
        assert one.common[0].summary["offered"] >= 5
        assert all(run.summary["offered"] >= 4 for run in one.runs)


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_measurements_are_kept_when_an_arrangement_dies(finished: int) -> None:
    whole = FormulaMachine(FakeClock(), (0.8, 2.0))
    compared(whole, config_of(finished))
    machine = FormulaMachine(FakeClock(), (0.8, 2.0), dies_in_run=len(whole.plans) + 5)
    found = compared(machine, config_of())
    assert isinstance(found.failure, Unreachable)
    assert found.failure.exit_code is ExitCode.UNREACHABLE
    assert [len(one.common) for one in found.measured] == [finished, finished]
    assert [len(one.goodputs) for one in found.measured] == [max(1, finished)] * 2
    result = compare_result(config_of(), found, "2026-01-01T00:00:00+00:00")
    assert result["is_complete"] is False
    assert "ended early" in verdict(result)[0]
    assert sum(len(one["rates"]) for one in result["arrangements"]) == len(machine.plans) - 1 - len(NAMES)


def test_a_run_waits_as_long_as_a_request_within_the_slo_can_take() -> None:
    pace = Pace(run_s=10, min_prompts=8, tail_s=5, deadline_s=100)
    alone = pace.length(2.0, 0.0, 1)
    assert alone is not None
    assert (alone.prompts, alone.limit_s) == (20, 15)
    slow = pace.length(0.1, 0.0, 1)
    assert slow is not None
    assert (slow.prompts, slow.limit_s) == (8, 85)
    shared = pace.length(2.0, 0.0, 10)
    assert shared is not None
    assert (shared.prompts, shared.limit_s) == (4, 7)
    assert pace.length(2.0, 50.0, 10) is None
    patient = pace.length(2.0, 0.0, 1, waits_for_slow=True)
    assert patient is not None
    assert patient.limit_s == 17
