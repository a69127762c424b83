"""Node timelines: a node's steps and reads are placed on this process's clock, whatever the node's clock shows."""

from __future__ import annotations

import pytest

from baton.bench.load.endpoint import Target
from baton.bench.load.report import serve_result
from baton.bench.load.run import GeneratorLoad, LoadPlan, LoadRun
from baton.bench.nodes.run import NodesRun, nodes_result
from baton.bench.nodes.timeline import Interval, NodeSamples, NodeTimeline, merge_decode_steps, reads_of
from baton.bench.results.outcome import Outcome, Outcomes
from baton.bench.results.summary import Slo
from baton.bench.workloads.spec import WorkloadSpec
from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport, StepFigures
from baton.messages.node_report import HandoffReport, NodeReport, NodeTrace, TraceEvent, TraceStep
from tests.support.node_rig import DESCRIPTION
from tests.support.outside import assert_result_as_frozen

KEY, OTHER = AttemptKey("a", 1, 1), AttemptKey("b", 1, 1)
NODE_S = 5000.0
"""How far the node's clock is ahead of this process's; the code under test does not know it."""


def step(seq: int, ended_s: float, step_ms: float, prefill: int, decodes: int) -> TraceStep:
    return TraceStep(seq, int((NODE_S + ended_s) * 1e9), StepFigures(step_ms, prefill, decodes, 0), True)


def event(seq: int, at_s: float, name: str, key: AttemptKey = KEY, value: int = 0) -> TraceEvent:
    return TraceEvent(seq, int((NODE_S + at_s) * 1e9), name, key, value)


def answer(at_s: float, *steps: TraceStep, events: tuple[TraceEvent, ...] = ()) -> NodeTrace:
    return NodeTrace(int((NODE_S + at_s) * 1e9), events, steps)


def test_the_fastest_answer_sets_the_clock_offset() -> None:
    timeline = NodeTimeline()
    timeline.skip(answer(9.0, step(1, 8.5, 10, 4, 0)))
    assert (timeline.after, timeline.steps_after) == (0, 1)
    timeline.add(10.4, answer(10.0, step(2, 9.9, 100, 16, 0)))  # this one took 0.4 s
    timeline.add(11.001, answer(11.0, step(3, 10.1, 200, 16, 2), step(4, 10.2, 100, 0, 2)))
    timeline.add(12.2, answer(12.0))
    assert [one.ended_s for one in timeline.steps] == pytest.approx([9.901, 10.101, 10.201])
    assert [one.kind for one in timeline.steps] == ["prefill", "mixed", "decode"]
    assert timeline.steps_after == 4
    shares = timeline.busy_shares(10.001, 10.201)
    assert shares == pytest.approx({"mixed": 0.5, "decode": 0.5}, rel=1e-3)
    assert timeline.rows(9.0)[0] == [pytest.approx(0.801), pytest.approx(0.901), "prefill", 16]


def test_another_incarnation_has_its_own_clock_and_sequence_numbers() -> None:
    timeline = NodeTimeline()
    timeline.add(10.0, answer(10.0, step(7, 9.9, 100, 16, 0)))
    assert timeline.steps[0].ended_s == pytest.approx(9.9)
    timeline.restart()
    assert timeline.steps_after == 0
    timeline.add(20.0, NodeTrace(int(3e9), [], [TraceStep(1, int(2e9), StepFigures(50.0, 4, 0, 0), False)]))
    assert [one.ended_s for one in timeline.steps] == pytest.approx([9.9, 19.0])


def test_reads_are_from_their_start_event_to_their_end_event() -> None:
    events = (
        event(1, 1.0, "read_started"),
        event(2, 1.1, "read_started", OTHER),
        event(3, 1.2, "read_started"),
        event(4, 1.3, "read_done", KEY, 100),
        event(5, 1.4, "read_done", OTHER, 200),
        event(6, 1.5, "kv_arrived", OTHER, 200),
        event(7, 1.6, "read_done", KEY, 300),
        event(8, 1.7, "read_done", KEY, 400),
    )
    reads = reads_of(events, -NODE_S)
    assert [(read.began_s, read.ended_s, read.num_bytes) for read in reads] == [
        *((pytest.approx(1.0), pytest.approx(1.3), 100), (pytest.approx(1.1), pytest.approx(1.4), 200)),
        (pytest.approx(1.2), pytest.approx(1.6), 300),
    ]


def test_decode_steps_that_follow_each_other_are_merged() -> None:
    steps = [Interval(n * 0.01, n * 0.01 + 0.0095, "decode", 2) for n in range(5)]
    steps += [Interval(0.05, 0.06, "mixed", 9), Interval(0.06, 0.07, "decode", 2), Interval(0.5, 0.6, "decode", 1)]
    assert merge_decode_steps(steps) == [
        *(Interval(0.0, 0.0495, "decode", 10), Interval(0.05, 0.06, "mixed", 9)),
        *(Interval(0.06, 0.07, "decode", 2), Interval(0.5, 0.6, "decode", 1)),
    ]


@pytest.mark.outside
def test_the_results_of_a_load_have_their_keys_and_types() -> None:
    outcomes = Outcomes()
    outcomes.append(Outcome(0, 0.0, 0.1, 0.2, 0.4, 8, 2, [0.2], queue_s=0.01, prefill_s=0.02))
    outcomes.append(Outcome(1, 0.0, 0.1, None, 0.4, 8, 0, error="refused"))
    timeline, samples = NodeTimeline(), NodeSamples("decode")
    timeline.add(0.5, answer(0.5, step(1, 0.3, 10, 0, 1)))
    samples.add(0.5, NodeReport(DESCRIPTION, LoadReport(running=1), {}, HandoffReport()))
    run = LoadRun(outcomes, 1.0, 2, GeneratorLoad(1, 0.1, 0.1, 0.1), was_interrupted=False, is_unreachable=False)
    plan, slo = LoadPlan(Target("baton", "here:1", model="tiny"), WorkloadSpec(request_rate=2.0)), Slo(tpot_ms=50)
    assert_result_as_frozen(serve_result(plan, run, slo, (50, 99), "", "2026-01-01T00:00:00+00:00"))
    ran = NodesRun(run, {"decode-0": samples}, {"decode-0": timeline}, 0)
    assert_result_as_frozen(nodes_result(plan, ran, slo, (50, 99), "", "2026-01-01T00:00:00+00:00"))
