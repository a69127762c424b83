"""Validation of the simulator against a cluster that is simulated with a known formula: both must agree."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from itertools import zip_longest
from pathlib import Path

import pytest

from baton.bench.arrangement import Arrangement
from baton.bench.config import ValidateConfig
from baton.bench.experiment import Experiment
from baton.bench.load.endpoint import Target
from baton.bench.load.run import GeneratorLoad, LoadPlan, LoadRun
from baton.bench.nodes.run import NodesRun
from baton.bench.nodes.timeline import NodeStep, NodeTimeline
from baton.bench.report.comparison import answer
from baton.bench.report.measured import parse_result
from baton.bench.results.outcome import Outcome, Outcomes
from baton.bench.simulator.config import Contention, NodeSizes, SimulatedSpeculation, SimulationConfig
from baton.bench.simulator.drafts import SimulatedDrafts
from baton.bench.simulator.events import TimelineEntry
from baton.bench.simulator.simulation import simulate
from baton.bench.simulator.step_times import FormulaTimes
from baton.bench.validate.fit import costs, costs_of, fit
from baton.bench.validate.predict import Predictor, Segment, observed_speculation
from baton.bench.validate.report import rows, validation_result, verdict
from baton.bench.validate.run import ProcBackgroundLoad, Validated, Validation
from baton.bench.workloads.spec import WorkloadSpec
from baton.engine.request import Request, RequestStatus
from baton.errors import BatonError, Unreachable
from baton.messages.node import NodeDescription, Role, StepFigures
from baton.messages.node_report import NodeTrace, TraceStep
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams
from baton.models.resolve import FoundModel
from tests.doubles.fake_clock import FakeClock
from tests.support.node_rig import DESCRIPTION
from tests.support.outside import assert_result_as_frozen

TRUTH = FormulaTimes(4.0, 0.8, 0.0, 12.0, 0.0, 1.5)
PAIR = Arrangement(1, 1)
SIZES = NodeSizes(*(TRUTH, 16, 16_000, 100.0), max_num_seqs=64, max_num_batched_tokens=512, max_model_len=1024)
MESSAGE_S, HANDOFF_S = 0.004, 0.02
CONTENTION = Contention(prefill=0.25, decode=0.5)
CONFIG = ValidateConfig(
    *("formula", FoundModel(Path("model"), "model"), "auto"),
    WorkloadSpec(random_input_len=200, random_output_len=20, random_range_ratio=0.5),
    *(PAIR, (0.2, 0.4, 0.6), 30.0),
)


class FakeBackgroundLoad:
    """Fake `BackgroundLoad`: the share that other processes use in each run, by the run's number; 0 in all others."""

    def __init__(self, shares: Mapping[int, float] | None = None) -> None:
        self._shares = shares or {}
        self.num_runs = 0

    def mark(self) -> None:
        self.num_runs += 1

    def share(self) -> float:
        return self._shares.get(self.num_runs, 0.0)

    def watch(self) -> float:
        return self.share()


def step(ended_s: float, step_ms: float, prefill: int, decodes: int, *, goes_on: bool = True) -> NodeStep:
    return NodeStep(ended_s, StepFigures(step_ms, prefill, decodes, 0), goes_on)


class FormulaCluster:
    """Runs loads in virtual time, step by step, and reports its nodes' steps."""

    def __init__(self, clock: FakeClock, slow_runs: Mapping[int, float] | None = None) -> None:
        """`slow_runs`: the slowdown of every step in a run, by the run's number."""
        self.clock = clock
        self.plans: list[LoadPlan] = []
        self.dies_in_run = math.inf
        self._slow_runs = slow_runs or {}
        self._config = SimulationConfig(
            *(PAIR, SIZES),
            nic_bytes_per_s=5e9,
            network_latency_s=HANDOFF_S,
            message_s=MESSAGE_S,
            keeps_timeline=True,
            contention=CONTENTION,
        )

    def run(self, plan: LoadPlan) -> NodesRun:
        self.plans.append(plan)
        workload = plan.workload
        if workload.num_prompts is not None and workload.num_prompts > 1000:
            workload = replace(workload, num_prompts=40)  # about as many as the time limit allows
        config = replace(self._config, max_concurrency=plan.max_concurrency)
        slow = self._slow_runs.get(len(self.plans), 1.0)
        times = FormulaTimes(*(slow * ms for ms in astuple(TRUTH)))
        done = simulate(workload.build(), replace(config, sizes=replace(SIZES, times=times)))
        self.clock.advance(done.duration_s)
        timelines = {name: NodeTimeline() for name in done.timeline or {}}
        for name, entries in (done.timeline or {}).items():
            timelines[name].add(0.0, NodeTrace(0, [], _steps(entries)))
        is_dead = len(self.plans) > self.dies_in_run
        load = GeneratorLoad(1, 0.1, 0.1, 0.1)
        return NodesRun(LoadRun(done.outcomes, done.duration_s, 60, load, False, is_dead), {}, timelines, 0)


def _steps(entries: Sequence[TimelineEntry]) -> list[TraceStep]:
    """The steps as a node reports them."""
    steps = []
    for number, (one, following) in enumerate(zip_longest(entries, entries[1:])):
        decodes = one.tokens if one.kind == "decode" else 0
        figures = StepFigures((one.end_s - one.start_s) * 1e3, one.tokens - decodes, decodes, 0)
        goes_on = following is not None and following.start_s == one.end_s
        steps.append(TraceStep(number + 1, round(one.end_s * 1e9), figures, goes_on))
    return steps


def descriptions() -> dict[str, NodeDescription]:
    described = replace(
        DESCRIPTION,
        max_model_len=1024,
        block_size=16,
        num_blocks=1000,
        block_bytes=1600,
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    return {role.value: replace(described, role=role) for role in (Role.PREFILL, Role.DECODE)}


def validated(
    cluster: FormulaCluster, deadline_s: float = math.inf, background: FakeBackgroundLoad | None = None
) -> Validated:
    return Validation(
        *(CONFIG, descriptions(), Target("baton", "x"), cluster.run, background or FakeBackgroundLoad()),
        Experiment(lambda _: None, cluster.clock, deadline_s),
    ).run()


@pytest.fixture(scope="module")
def undisturbed() -> tuple[FormulaCluster, Validated]:
    cluster = FormulaCluster(FakeClock())
    return cluster, validated(cluster)


@pytest.mark.outside
def test_a_cluster_with_the_formulas_step_times_is_predicted_exactly(
    undisturbed: tuple[FormulaCluster, Validated],
) -> None:
    _, found = undisturbed
    assert found.failure is None
    times, contention, _ = found.steps
    assert (times.prefill_ms, times.prefill_token_ms) == pytest.approx((4.0, 0.8), rel=0.05)
    assert (times.decode_ms, times.decode_sequence_ms) == pytest.approx((12.0, 1.5), rel=0.05)
    assert (contention.prefill, contention.decode) == pytest.approx((0.25, 0.5), abs=0.02)
    for pair in found.pairs:
        assert pair.overheads.message_s == pytest.approx(MESSAGE_S, rel=0.05)
        assert pair.overheads.handoff_s == pytest.approx(HANDOFF_S, rel=0.15)
    result = validation_result([found], 0, "2026-01-01T00:00:00+00:00")
    assert_result_as_frozen(result)
    assert result["models"][0]["shapes"] == {"prefill": "tp1", "decode": "tp1"}
    for load in result["models"][0]["loads"]:
        for name in ("ttft_ms", "tpot_ms"):
            assert load[name]["ratio"] == pytest.approx(1.0, abs=0.02)
            assert load[name]["own_steps_ratio"] == pytest.approx(1.0, abs=0.02)
    assert verdict(result)[0].startswith("6 of 6 means within 15%")
    assert len(rows(result)) == 3
    found_answer = answer(parse_result(json.loads(json.dumps(result, allow_nan=False))))
    assert "mean TTFT and TPOT are within" in found_answer.headline
    assert "of 6\u00a0means" in found_answer.detail


def _by_index(outcomes: Outcomes, column: str) -> dict[int, float]:
    return dict(zip(outcomes.index.tolist(), getattr(outcomes, column).tolist(), strict=True))


def test_live_and_simulated_requests_are_the_same_and_no_prompt_is_sent_twice(
    undisturbed: tuple[FormulaCluster, Validated],
) -> None:
    cluster, found = undisturbed
    for pair in found.pairs:
        assert len(pair.segments) == 3
        for live, simulated in zip(pair.segments, pair.simulated, strict=True):
            mine, theirs = simulated.outcomes, live.outcomes
            for column in ("planned_s", "input_length", "output_length"):
                assert _by_index(mine, column) == pytest.approx(_by_index(theirs, column))
    assert len({plan.workload.seed for plan in cluster.plans}) == len(cluster.plans)
    rates = sorted(pair.rate for pair in found.pairs)
    assert rates == pytest.approx([rates[0], 2 * rates[0], 3 * rates[0]])


def test_loads_are_interleaved_with_single_requests_between_them(undisturbed: tuple[FormulaCluster, Validated]) -> None:
    cluster, found = undisturbed
    least = min(pair.rate for pair in found.pairs)
    asked = [round(plan.workload.request_rate / least) if plan.max_concurrency is None else 0 for plan in cluster.plans]
    assert asked == [0, 0, *(0, 1, 2, 3), *(0, 2, 3, 1), *(0, 3, 1, 2)]


def test_a_load_is_predicted_from_the_others() -> None:
    slow = dict.fromkeys((4, 10, 13), 2.0)  # the runs of the lowest load
    found = validated(FormulaCluster(FakeClock(), slow))
    least = min(found.pairs, key=lambda pair: pair.rate)
    result = validation_result([found], 0, "2026-01-01T00:00:00+00:00")
    load_result = next(load for load in result["models"][0]["loads"] if load["rate"] == least.rate)
    assert load_result["tpot_ms"]["ratio"] == pytest.approx(0.5, abs=0.06)
    assert load_result["tpot_ms"]["own_steps_ratio"] == pytest.approx(1.0, abs=0.06)


def test_a_segment_that_other_processes_disturbed_is_measured_again_and_left_out() -> None:
    disturbed = 5  # the middle load's first segment
    cluster = FormulaCluster(FakeClock(), {disturbed: 3.0})
    found = validated(cluster, background=FakeBackgroundLoad({disturbed: 0.4}))
    assert [len(pair.segments) for pair in found.pairs] == [3, 3, 3]
    assert cluster.plans[-1].workload.request_rate == cluster.plans[disturbed - 1].workload.request_rate
    result = validation_result([found], 0, "2026-01-01T00:00:00+00:00")
    assert verdict(result)[0].startswith("6 of 6 means within 15%")
    assert not any("other processes used" in line for line in verdict(result))


def test_the_verdict_says_when_other_processes_always_used_the_machine() -> None:
    cluster = FormulaCluster(FakeClock())
    found = validated(cluster, 120.0, FakeBackgroundLoad(dict.fromkeys(range(100), 0.4)))
    found_lines = verdict(validation_result([found], 0, "2026-01-01T00:00:00+00:00"))
    assert "other processes used more than 8% of the machine" in found_lines[-1]


def test_a_budget_shortens_runs_and_what_was_measured_is_kept(undisturbed: tuple[FormulaCluster, Validated]) -> None:
    needs_s = undisturbed[0].clock.monotonic()
    cluster = FormulaCluster(FakeClock())
    assert validated(cluster, needs_s * 0.8).failure is None
    assert needs_s * 0.4 <= cluster.clock.monotonic() <= needs_s * 0.8
    for slow_run in (5, 9):  # in the first round, before the last load was measured, and in the second round
        cluster = FormulaCluster(FakeClock(), {slow_run: 40.0})
        found = validated(cluster, needs_s)
        assert [len(pair.segments) for pair in found.pairs] == ([1, 1] if slow_run == 5 else [1, 2, 2])
        assert (found.failure is None) == (slow_run == 9)
    dying = FormulaCluster(FakeClock())
    dying.dies_in_run = 4
    found = validated(dying)
    assert isinstance(found.failure, Unreachable)
    assert [len(pair.segments) for pair in found.pairs] == [1]
    assert "ended early" in verdict(validation_result([found], 0, "2026-01-01T00:00:00+00:00"))[0]


def test_a_steps_cost_includes_the_work_before_it_but_no_idle_time() -> None:
    steps = [
        *(
            step(1.000, 10, 0, 2),
            step(1.012, 10, 0, 2),
            step(1.062, 10, 0, 3),
        ),  # its core was taken for 40 ms
        *(step(1.074, 10, 0, 1, goes_on=False), step(2.0, 10, 0, 1)),  # and then the node was idle
    ]
    assert [one.ms for one in costs(steps)] == [10] * 5
    assert [one.between_ms for one in costs(steps)] == [None, *map(pytest.approx, (2, 40, 2)), None]
    late = [step(1.000, 10, 0, 2), step(3.0, 10, 0, 2)]  # the node waited for KV, or its clients had left
    assert [one.between_ms for one in costs(late)] == [None, None]


def test_the_median_stands_for_work_before_a_step_that_could_not_be_measured() -> None:
    prompts = [step(n + 1.0, 100, 500, 0) for n in range(3)]
    ends = itertools.accumulate([2.0, 0.012, 0.012, 0.013, 0.05, 1.0])
    steps, _, before_prompts_ms = fit([*costs(prompts), *costs([step(ended_s, 10, 0, 1) for ended_s in ends])])
    assert before_prompts_ms == 0
    assert steps.prefill_ms + 500 * steps.prefill_token_ms == pytest.approx(100)
    median_ms = 2.5
    total_ms = (median_ms, 2, 2, 3, 40, median_ms)
    assert steps.decode_ms + steps.decode_sequence_ms == pytest.approx(10 + sum(total_ms) / 6)


def test_a_steps_cost_has_the_share_of_time_in_which_other_nodes_computed() -> None:
    prompts = [step(1.100, 100, 64, 0, goes_on=False)]
    streams = [step(1.010, 20, 0, 1), step(1.030, 20, 0, 1), step(1.110, 80, 0, 1, goes_on=False)]
    found = costs_of({"prefill-0": prompts, "decode-0": streams})
    assert [one.beside for one in found] == pytest.approx([1.0, 0.5, 1.0, 70 / 80])
    assert [one.beside for one in costs(streams)] == [0, 0, 0]


def test_message_latency_is_the_time_that_waiting_and_computing_and_work_before_steps_do_not_explain() -> None:
    outcomes = Outcomes()
    for index, wait_s in enumerate([0.001, 0.001, 0.001, 0.2]):
        ends_s = (0.030 + wait_s, 0.130 + wait_s)
        outcomes.append(Outcome(index, 0.0, 0.0, *ends_s, 100, 5, queue_s=wait_s, prefill_s=0.020))
    timelines = {"prefill-0": NodeTimeline(), "decode-0": NodeTimeline()}
    prompts = [TraceStep(n + 1, (n + 1) * 23_000_000, StepFigures(20, 100, 0, 0), goes_on=True) for n in range(4)]
    streams = [TraceStep(n + 1, (n + 1) * 25_000_000, StepFigures(25, 0, 1, 0), goes_on=True) for n in range(20)]
    for timeline, steps in zip(timelines.values(), (prompts, streams), strict=True):
        timeline.add(0.0, NodeTrace(0, [], steps))
    run = LoadRun(outcomes, 1.0, 4, GeneratorLoad(1, 0.1, 0.1, 0.1), False, False)
    workload = replace(CONFIG.workload, num_prompts=4, request_rate=2.0)
    segment = Segment(workload, NodesRun(run, {}, timelines, 0), background_share=0.0)
    pairs = Predictor(PAIR, descriptions(), [segment]).pairs({1.0: [segment], 2.0: [segment]})
    # 10 ms of the time to first token were neither waiting nor computing. 3 ms of them are work before a step. 1 ms of
    # waiting is added: the way into the queue, which requests that find an idle node have, too.
    assert [pair.overheads.message_s for pair in pairs] == pytest.approx([0.004] * 2)


def test_no_coefficient_is_negative() -> None:
    prompts = [
        step(n + 1.0, ms, tokens, 0, goes_on=False)
        for n, (tokens, ms) in enumerate([(100, 9.0), (200, 21.0), (300, 31.0)])
    ]
    streams = [step(n + 9.0, 10.0 - n, 0, n + 1, goes_on=False) for n in range(3)]
    times, contention, _ = fit([*costs(prompts), *costs(streams)])
    assert contention == Contention(0.0, 0.0)
    assert min(times.prefill_ms, times.prefill_token_ms, times.decode_ms, times.decode_sequence_ms) >= 0
    assert times.prefill_token_ms == pytest.approx(0.1, rel=0.05)
    with pytest.raises(BatonError, match="too few"):
        fit(costs(prompts))


def test_background_load_excludes_the_cluster_and_this_process() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    files = {"stat": "cpu  9 9 9 9 9 9 9 9\ncpu0 100 0 0 50 0 0 0 0 0 0\ncpu1 100 0 0 50 0 0 0 0 0 0\n"}
    files |= {f"{os.getpid()}/stat": _process(0), "7/stat": _process(0)}
    background = ProcBackgroundLoad([7], (0, 1), lambda name: files[name])
    background.mark()
    assert background.share() == 0
    busy = 1000 * ticks
    files["stat"] = (
        f"cpu0 {100 + busy} 0 0 50 0 0 0 0 0 0\ncpu1 100 0 0 50 0 0 0 {busy} 0 0\ncpu2 {busy} 0 0 0 0 0 0 0\n"
    )
    files["7/stat"] = _process(2 * busy)
    assert background.share() == 0
    files["7/stat"] = _process(busy)
    assert background.share() == 1


def _process(ticks: int) -> str:
    return f"7 (a (b) c) S {' '.join(['1'] * 10)} {ticks // 2} {ticks - ticks // 2} 0 0 20"


@pytest.mark.parametrize(
    ("share", "length", "coverage"), [(0.7, 5, 0.4), (0.0, 1, 1.0), (1.0, 16, 0.2), (0.95, 3, 1.0)]
)
def test_drafts_of_nodes_are_those_of_the_simulator(share: float, length: int, coverage: float) -> None:
    given = SimulatedSpeculation(share, length, coverage=coverage, adapts=False)
    drafts, request = SimulatedDrafts(given, seed=1), Request("r", RequestSpec([1], SamplingParams()))
    request.status = RequestStatus.RUNNING
    steps = []
    for _ in range(5000):
        proposed = drafts.propose([("text", request)])
        drafted = len(proposed.get("r", ()))
        right = drafts.verify("text", request, drafted) if drafted else 0
        request.output_token_ids += [0] * (1 + right)
        request.num_computed_tokens += 1 + right
        steps.append(StepFigures(5.0, 0, 1, 100, int(drafted > 0), drafted, right))
    found = observed_speculation(steps)
    assert found is not None
    assert (found.num_speculative_tokens, found.adapts) == (length, False)
    assert (found.share, found.coverage) == (pytest.approx(share, abs=0.03), pytest.approx(coverage, abs=0.03))


def test_nodes_that_draft_nothing_are_simulated_without_drafts() -> None:
    assert observed_speculation([StepFigures(5.0, 0, 3, 100), StepFigures(5.0, 64, 0, 0)]) is None
    # What no step can have done: more right tokens than drafted ones, and more drafts than sequences.
    found = observed_speculation([StepFigures(5.0, 0, 1, 100, 2, 4, 9)])
    assert found is not None
    assert (found.share, found.coverage) == (pytest.approx(1.0), 1.0)
