"""The planner: how many nodes of each role it wants, which node moves when, and what bounds that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.messages.node import Role
from router.attainment import Kept
from router.placement.rates import StepRates
from router.planner.capacity import Capacity, NodeCapacity
from router.planner.demand import Attained, DemandMeter, OfferedLoad
from router.planner.law import LawSettings, PressureLaw, Situation
from router.planner.moves import (
    EVACUATE_S,
    FLIP_S,
    REST_S,
    WARM_S,
    Cordon,
    Flip,
    Move,
    MoveBook,
    MoveEffect,
    MoveEnded,
    MoveState,
    PlannedNode,
    Uncordon,
)
from router.planner.planner import LEAST_STEPS, PERIOD_S, Backlog, Observation, Planner
from router.planner.size import PoolState, Size, SizeLaw, SizeSettings

P, D = Role.PREFILL, Role.DECODE
_NODE = NodeCapacity(StepRates(20.0, 0.1, 0.05, 6e-4), chunk=2048, kv_tokens=48_000)
_CAPACITY = Capacity(_NODE, _NODE, token_ms=80.0)
PROMPTS = OfferedLoad(10.0, 2000.0, 2000.0, 20.0, 2010.0)
"""They keep 2.2 prefill nodes busy, and a fifth of a decode node."""
CHATS = OfferedLoad(6.0, 200.0, 200.0, 800.0, 600.0)


def _nodes(prefill: int, decode: int, **changes: object) -> list[PlannedNode]:
    roles = [P] * prefill + [D] * decode
    nodes = [PlannedNode(f"n{place}", f"n{place}.1", role, work=place) for place, role in enumerate(roles)]
    return [replace(node, **changes) for node in nodes]  # type: ignore[arg-type]


def _situation(load: OfferedLoad, prefill: int, decode: int, **changes: object) -> Situation:
    situation = Situation(load, 0.0, 0.0, _CAPACITY, prefill, decode)
    return replace(situation, **changes)  # type: ignore[arg-type]


def _seen(nodes: Sequence[PlannedNode], num_steps: int = LEAST_STEPS) -> Observation:
    return Observation(nodes, _CAPACITY, num_steps, Backlog())


def test_a_meter_tells_the_load_of_a_window() -> None:
    meter = DemandMeter()
    for second in range(100):
        for _ in range(2 if second < 90 else 5):
            meter.arrived(1000 if second < 90 else 100, float(second))
    meter.ended(1000, 500, 10, 95.0)
    meter.ended(1000, 0, 30, 95.5)
    load = meter.load(10.0, 100.0)
    assert (load.requests_per_s, load.prompt_tokens, load.uncached_tokens, load.output_tokens) == (5.0, 100.0, 75.0, 20)
    # The longer output has more tokens to whose time its context counts.
    assert load.context_tokens == pytest.approx((10 * 1005 + 30 * 1015) / 40)
    assert meter.load(60.0, 100.0).requests_per_s == pytest.approx((50 * 2 + 10 * 5) / 60)
    # The time before the first request is no time without load.
    young = DemandMeter()
    young.arrived(10, 1000.0)
    assert young.load(600.0, 1002.0).requests_per_s == 0.5


def test_targets_that_were_kept_count_for_a_minute() -> None:
    meter = DemandMeter()
    for kept in (Kept.GOOD, Kept.GOOD, Kept.LATE, Kept.LATE_AND_SLOW, Kept.FAILED):
        meter.kept(kept, 10.0)
    assert meter.attained(60.0, 30.0) == Attained(num_requests=5, num_good=2, num_late=3, num_slow=1)
    assert meter.attained(60.0, 72.0) == Attained()


def test_the_busier_role_gets_nodes() -> None:
    law = PressureLaw()
    verdict = law.decide(_situation(PROMPTS, 2, 4), 0.0)
    assert (verdict.towards, verdict.num_prefill) == (P, 5)
    assert verdict.then.worst < verdict.now.worst == verdict.now.prefill
    assert PressureLaw().decide(_situation(CHATS, 4, 2), 0.0).towards is D


@pytest.mark.parametrize(
    ("situation", "why"),
    [
        (_situation(PROMPTS, 5, 1), "the division is the best one"),
        (_situation(replace(PROMPTS, requests_per_s=0.3), 2, 4), "little to do"),
        (_situation(PROMPTS, 4, 2), "would gain 11% only"),
    ],
)
def test_nodes_stay_where_a_move_gains_little(situation: Situation, why: str) -> None:
    verdict = PressureLaw().decide(situation, 0.0)
    assert verdict.towards is None
    assert why in verdict.reason


def test_after_a_move_the_law_waits() -> None:
    law, situation = PressureLaw(), _situation(PROMPTS, 2, 4)
    law.moved(100.0)
    assert law.decide(situation, 105.0).towards is None
    assert law.decide(situation, 110.0).towards is P


def test_what_waits_counts_as_arrivals_of_its_role() -> None:
    quiet = PressureLaw().decide(_situation(CHATS, 3, 3), 0.0).now
    waiting = PressureLaw().decide(_situation(CHATS, 3, 3, prefill_backlog_per_s=30.0), 0.0).now
    assert waiting.prefill > quiet.prefill
    assert waiting.decode == quiet.decode


def test_the_role_that_misses_the_targets_counts_as_busier() -> None:
    situation, share = _situation(CHATS, 3, 3), LawSettings().missing_share
    kept = PressureLaw().decide(situation, 0.0).now
    late = PressureLaw().decide(replace(situation, attained=Attained(100, 90, 10, 0)), 0.0).now
    slow = PressureLaw().decide(replace(situation, attained=Attained(100, 90, 0, 10)), 0.0).now
    assert late.prefill == pytest.approx(kept.prefill * (1 + share))
    assert slow.decode == pytest.approx(kept.decode * (1 + share))
    assert (late.decode, slow.prefill) == (kept.decode, kept.prefill)
    assert PressureLaw().decide(replace(situation, attained=Attained(100, 96, 4, 0)), 0.0).now == kept


def test_nodes_are_added_at_once_and_taken_back_late() -> None:
    law = SizeLaw(SizeSettings(max_nodes=8))
    # Each node takes an equal part of a load that keeps four of them busy.
    assert law.decide(4, lambda count: 4.0 / count, 0.0) == Size(5, to_add=1)
    assert law.decide(4, lambda count: 8.0 / count, 5.0) == Size(6, to_add=1)
    assert law.decide(4, lambda count: 8.0 / count, 10.0) == Size(6)  # no more than two in a minute
    assert law.decide(6, lambda count: 8.0 / count, 65.0) == Size(8, to_add=2)
    assert law.decide(8, lambda count: 8.0 / count, 130.0) == Size(8)
    idle = [law.decide(8, lambda count: 4.0 / count, at).wanted for at in (200.0, 499.0, 500.0, 505.0, 900.0)]
    assert idle == [8, 8, 7, 7, 7]  # six would be too busy


@pytest.mark.parametrize("token_ms", [80.0, 25.0, 21.0, 19.0])
def test_nodes_that_would_not_help_are_not_wanted(token_ms: float) -> None:
    law = PressureLaw(LawSettings(size=SizeSettings(max_nodes=8)))
    load = replace(CHATS, requests_per_s=0.001)
    situation = _situation(load, 2, 2, capacity=replace(_CAPACITY, token_ms=token_ms), pools=PoolState.SETTLED)
    assert law.decide(situation, 0.0).size == Size(4)
    assert law.decide(situation, 400.0).size == Size(3, to_remove=1)


def _reach(book: MoveBook, move: Move, state: MoveState, nodes: Sequence[PlannedNode], now: float) -> list[MoveEffect]:
    effects = list(book.follow(nodes, 0.0, now))
    assert move.state is state
    return effects


def test_a_move_goes_through_all_of_its_states() -> None:
    book, nodes = MoveBook(), _nodes(2, 2, is_idle=False)
    move = book.start(P, nodes, "because", 0.0)
    assert move is not None
    assert move.name == "n2", "the decode node with least to do"
    assert book.counts(nodes) == {P: 3, D: 1}
    assert book.follow(nodes, 3.0, 0.0) == [Cordon("n2")]
    assert book.follow(nodes, 3.0, 2.9) == []
    assert _reach(book, move, MoveState.EVACUATING, nodes, 3.0) == []
    idle = [replace(node, is_idle=True) for node in nodes]
    assert _reach(book, move, MoveState.FLIPPING, idle, 4.0) == [Flip("n2", "n2.1", P)]
    others = [node for node in nodes if node.name != "n2"]
    assert _reach(book, move, MoveState.FLIPPING, others, 5.0) == []
    # The node as it was is no sign of what it is to become.
    assert _reach(book, move, MoveState.FLIPPING, nodes, 5.5) == []
    back = [*others, PlannedNode("n2", "n2.2", P)]
    assert _reach(book, move, MoveState.WARMING, back, 6.0) == [Uncordon("n2")]
    assert _reach(book, move, MoveState.SETTLED, back, 6.0 + WARM_S) == [MoveEnded(move)]
    assert (book.moves, book.ended, book.num_ended[P, MoveState.SETTLED]) == ([], [move], 1)
    # A node that has moved rests, from the beginning of its move on.
    again = book.start(D, [*(replace(node, work=9.0) for node in others), back[-1]], "", REST_S - 1)
    assert again is not None
    assert again.name != "n2"


def test_a_node_that_does_not_become_idle_flips_anyway() -> None:
    book, nodes = MoveBook(), _nodes(2, 2, is_idle=False)
    move = book.start(P, nodes, "", 0.0)
    assert move is not None
    _reach(book, move, MoveState.EVACUATING, nodes, 0.0)
    assert _reach(book, move, MoveState.EVACUATING, nodes, EVACUATE_S - 0.1) == []
    assert _reach(book, move, MoveState.FLIPPING, nodes, EVACUATE_S)


@pytest.mark.parametrize("state", [MoveState.EVACUATING, MoveState.FLIPPING, MoveState.WARMING])
def test_the_move_of_a_lost_node_fails_and_is_forgotten(state: MoveState) -> None:
    book, nodes = MoveBook(), _nodes(2, 2, is_idle=False)
    move = book.start(P, nodes, "", 0.0)
    assert move is not None
    _reach(book, move, MoveState.EVACUATING, nodes, 0.0)
    others = [node for node in nodes if node.name != move.name]
    if state is not MoveState.EVACUATING:
        _reach(book, move, MoveState.FLIPPING, nodes, EVACUATE_S)
    if state is MoveState.WARMING:
        _reach(book, move, state, [*others, PlannedNode(move.name, "n2.2", P)], EVACUATE_S + 1)
    assert _reach(book, move, MoveState.FAILED, others, EVACUATE_S + FLIP_S) == [Uncordon(move.name), MoveEnded(move)]
    assert book.counts(others) == {P: 2, D: 1}


def test_a_move_is_cancelled_when_its_role_would_lose_its_last_node() -> None:
    book, nodes = MoveBook(), _nodes(2, 2, is_idle=False)
    move = book.start(P, nodes, "", 0.0)
    assert move is not None
    _reach(book, move, MoveState.EVACUATING, nodes, 0.0)
    without_n3 = [node for node in nodes if node.name != "n3"]
    assert _reach(book, move, MoveState.CANCELLED, without_n3, 1.0) == [Uncordon("n2"), MoveEnded(move)]


def test_operators_come_first() -> None:
    book, nodes = MoveBook(), _nodes(2, 3, is_idle=False)
    theirs = [replace(node, is_operators=node.name == "n2") for node in nodes]
    move = book.start(P, theirs, "", 0.0)
    assert move is not None
    assert move.name == "n3"
    _reach(book, move, MoveState.EVACUATING, nodes, 0.0)
    now_theirs = [replace(node, is_operators=node.name == "n3") for node in nodes]
    assert _reach(book, move, MoveState.CANCELLED, now_theirs, 1.0) == [Uncordon("n3"), MoveEnded(move)]


@pytest.mark.parametrize(
    "nodes",
    [
        _nodes(3, 1),
        _nodes(2, 2, is_operators=True),
        [replace(node, is_ready=node.name != "n3") for node in _nodes(2, 2)],
    ],
    ids=["the last node of its role", "operators' nodes", "the only ready one"],
)
def test_a_node_that_may_not_move_stays(nodes: Sequence[PlannedNode]) -> None:
    assert MoveBook().start(P, nodes, "", 0.0) is None


def _planner(*, acts: bool = True, load: OfferedLoad = PROMPTS) -> Planner:
    return Planner(acts=acts, forecast=lambda meter, now: load)


def test_no_node_moves_by_rates_of_few_steps() -> None:
    planner = _planner()
    plan = planner.tick(_seen(_nodes(2, 4), LEAST_STEPS - 1), 0.0)
    assert (plan.verdict, plan.effects, plan.started) == (None, [], [])
    assert "63 of 64 steps" in plan.why_not
    assert planner.tick(_seen(_nodes(2, 4)), PERIOD_S).started


def test_one_node_moves_at_a_time_and_two_in_a_rush() -> None:
    usual = replace(PROMPTS, requests_per_s=4.0)
    planner = _planner(load=usual)
    assert len(planner.tick(_seen(_nodes(2, 4, is_idle=False)), 0.0).started) == 1
    assert planner.tick(_seen(_nodes(2, 4, is_idle=False)), 15.0).started == []
    rush = replace(PROMPTS, requests_per_s=40.0)
    assert len(_planner(load=rush).tick(_seen(_nodes(2, 4)), 0.0).started) == 2


def test_a_move_turns_when_the_demand_does() -> None:
    load = [PROMPTS]
    planner = Planner(acts=True, forecast=lambda meter, now: load[-1])
    nodes = _nodes(3, 3, is_idle=False)
    (move,) = planner.tick(_seen(nodes), 0.0).started
    load.append(CHATS)
    plan = planner.tick(_seen(nodes), 10.0)
    assert plan.effects[:2] == [Uncordon(move.name), MoveEnded(move)]
    assert move.state is MoveState.CANCELLED
