"""The planner in virtual time: nodes follow the load, whatever happens to them, and every request ends once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest

from baton.bench.arrangement import Arrangement
from baton.bench.results.outcome import Outcomes
from baton.bench.simulator.config import Evacuation, Failure, PlannerLaw, PlannerMode, SimulationConfig
from baton.bench.simulator.simulation import Simulation
from baton.bench.workloads.workload import WorkloadRequest, unique_piece
from router.planner.demand import latest
from router.planner.moves import Move, MoveState
from router.planner.planner import Observation, Plan, Planner

TTFT_S, TPOT_S = 2.0, 0.08
_CONFIG = SimulationConfig(
    Arrangement(2, 2),
    planner=PlannerMode.ON,
    evacuation=Evacuation.MOVE,
    target_ttft_ms=TTFT_S * 1e3,
    target_tpot_ms=TPOT_S * 1e3,
)


@dataclass(frozen=True, slots=True)
class _Load:
    """Requests of one kind, from `begin_s` until `end_s` at a rate that changes evenly."""

    begin_s: float
    end_s: float
    rate: float
    then: float
    prompt: int
    output: int

    def arrivals(self, rng: Random) -> Iterator[tuple[float, int, int]]:
        now, most = self.begin_s, max(self.rate, self.then)
        while (now := now + rng.expovariate(most)) < self.end_s:
            share = (now - self.begin_s) / (self.end_s - self.begin_s)
            if rng.random() * most < self.rate + share * (self.then - self.rate):
                yield now, self.prompt, self.output


def _prompts(begin_s: float, end_s: float, rate: float, then: float | None = None) -> _Load:
    """A prefill node computes four of them in a second."""
    return _Load(begin_s, end_s, rate, rate if then is None else then, 2000, 12)


def _chats(begin_s: float, end_s: float, rate: float, then: float | None = None) -> _Load:
    """A decode node takes two and a half in a second, and has each for half a minute."""
    return _Load(begin_s, end_s, rate, rate if then is None else then, 300, 600)


STEP = (_prompts(0, 50, 9.5), _chats(50, 130, 6.0))
RAMP = (_prompts(0, 120, 9.5, 0.1), _chats(0, 120, 0.1, 6.0))
SPIKE = (_prompts(0, 90, 1.0), _chats(0, 90, 1.0), _prompts(30, 60, 7.0))


BUSY = (_prompts(0, 40, 7.0), _chats(0, 40, 1.2))
"""Too much for two prefill nodes, and not for three."""


def _requests(loads: Sequence[_Load]) -> list[WorkloadRequest]:
    rng = Random(7)
    rows = sorted(row for load in loads for row in load.arrivals(rng))
    return [
        WorkloadRequest(index, at, prompt, output, (unique_piece(prompt, 7, index),))
        for index, (at, prompt, output) in enumerate(rows)
    ]


def _run(loads: Sequence[_Load], config: SimulationConfig = _CONFIG) -> Simulation:
    """Simulate a load, each request of which ends once with all of its tokens; no node has anything left."""
    simulation, requests = Simulation(config, lambda ended: None), _requests(loads)
    simulation.run(requests)
    outcomes = simulation.outcomes
    ended = dict(zip(outcomes.index.tolist(), outcomes.output_length.tolist(), strict=True))
    assert len(outcomes) == len(requests)
    assert ended == {request.index: request.output_length for request in requests}
    for node in simulation.nodes.values():
        node.scheduler.kv_cache_manager.check_invariant()
        assert node.is_idle
    return simulation


def _attainment(outcomes: Outcomes) -> float:
    return float(((outcomes.ttft_s <= TTFT_S) & (outcomes.tpot_s <= TPOT_S)).mean())


def _ended(simulation: Simulation) -> list[Move]:
    assert simulation.planner is not None
    return simulation.planner.planner.book.ended


@pytest.mark.parametrize(
    ("loads", "attained"), [(STEP, 0.7), (RAMP, 0.72), (SPIKE, 0.78)], ids=["step", "ramp", "spike"]
)
def test_nodes_follow_the_load(loads: Sequence[_Load], attained: float) -> None:
    """Without a planner two nodes of each role attain 0.32, 0.66 and 0.68."""
    simulation = _run(loads)
    assert _attainment(simulation.outcomes) >= attained
    assert 1 <= len(_ended(simulation)) <= 3
    assert {move.state for move in _ended(simulation)} == {MoveState.SETTLED}


def test_streams_end_on_a_node_that_moves_or_go_on_elsewhere() -> None:
    ended, moved = _run(BUSY, replace(_CONFIG, evacuation=Evacuation.END)), _run(BUSY)
    assert _seconds(_ended(moved)[0]) < _seconds(_ended(ended)[0]) - 3.0
    assert moved.router.num_retries > ended.router.num_retries == 0
    # A stream that moves pauses for two steps, however long its KV takes: nobody computes its prompt again.
    assert moved.outcomes.largest_gap_s[moved.outcomes.attempts > 1].max() < TPOT_S
    assert _as_rows(_run(BUSY, replace(_CONFIG, stepwise=True)).outcomes) == _as_rows(moved.outcomes)


def test_a_node_that_is_empty_tells_so_though_it_computes_no_step() -> None:
    # Prompts are computed sooner than they are read, until all blocks are leased.
    _run((_prompts(0, 10, 9.5),), replace(_CONFIG, planner=PlannerMode.OFF, nic_bytes_per_s=2e9))


def _seconds(move: Move) -> float:
    assert move.ended_at is not None
    return move.ended_at - move.began_at


@pytest.mark.parametrize(
    ("is_its", "after_s", "state", "evacuation"),
    [
        (True, 0.6, MoveState.FAILED, Evacuation.MOVE),
        (True, 5.0, MoveState.FAILED, Evacuation.MOVE),
        (False, 2.0, MoveState.CANCELLED, Evacuation.END),
    ],
    ids=["it evacuates", "it warms up", "the last one of its role"],
)
def test_a_node_dies_while_one_moves(is_its: bool, after_s: float, state: MoveState, evacuation: Evacuation) -> None:
    began = _ended(_run(BUSY, replace(_CONFIG, flip_s=2.0)))[0]
    assert began.state is MoveState.SETTLED
    (other,) = {"decode-0", "decode-1"} - {began.name}
    who = began.name if is_its else other
    failure = Failure(who, began.began_at + after_s, 10.0)
    simulation = _run(BUSY, replace(_CONFIG, flip_s=2.0, failures=(failure,), evacuation=evacuation))
    first = _ended(simulation)[0]
    assert (first.name, first.began_at, first.state) == (began.name, began.began_at, state)
    assert simulation.planner is not None
    assert simulation.planner.cordoned == set()


def test_a_planner_that_advises_decides_the_same_and_moves_nothing() -> None:
    fixed = _run(BUSY, replace(_CONFIG, planner=PlannerMode.OFF))
    advised = _run(BUSY, replace(_CONFIG, planner=PlannerMode.ADVISE))
    assert _as_rows(advised.outcomes) == _as_rows(fixed.outcomes)
    acted = Simulation(replace(_CONFIG), lambda ended: None)
    assert acted.planner is not None
    planner, plans = acted.planner.planner, list[tuple[Plan, Plan]]()
    adviser = Planner(acts=False, forecast=lambda meter, now: latest(planner.meter, now))
    adviser.meter = planner.meter
    decide = planner.tick

    def tick(seen: Observation, now: float) -> Plan:
        # While a node moves, the one that advises sees a cluster that it would not have.
        is_still, plan = not planner.book.moves, decide(seen, now)
        if is_still and plan.verdict is not None:
            advice = adviser.tick(seen, now)
            plans.append((plan, advice))
        return plan

    planner.tick = tick  # type: ignore[method-assign]
    acted.run(_requests(STEP))
    for plan, advice in plans:
        assert advice.verdict == plan.verdict
        assert [(move.name, move.to) for move in advice.started] == [(move.name, move.to) for move in plan.started]
        assert advice.effects == ()
    assert sum(bool(plan.started) for plan, _ in plans) >= 2


def _as_rows(outcomes: Outcomes) -> list[list[float]]:
    return [outcomes.index.tolist(), outcomes.first_token_s.tolist(), outcomes.finished_s.tolist()]


def test_the_law_of_dynamo_changes_the_division_once_in_three_minutes() -> None:
    simulation = _run((_chats(0, 190, 4.0),), replace(_CONFIG, planner_law=PlannerLaw.DYNAMO))
    assert {move.began_at for move in _ended(simulation)} == {180.5}
