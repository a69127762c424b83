"""The planner at a router: what it does while it leads, and that nothing moves blindly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random

from baton.cli.commands.get_plan import roles_of
from baton.messages.node import LoadReport, NodeDescription, Role, StepFigures, StepReport
from baton.messages.operator import PlanReport
from baton.registry.base import Term
from baton.registry.desired import DesiredState, cordon, plan_cordon, set_role
from baton.wire.codec.operator import PLAN_REPORT
from router.live_requests import LiveRequests
from router.operations.live_history import RouterTotals
from router.operations.planning import FORGET_S, PlannerMode, Planning
from router.placement.placer import PlacementSettings, Placer
from router.planner.demand import OfferedLoad
from router.planner.moves import MoveState
from router.planner.planner import Planner
from tests.doubles.fake_registry import FakeRegistry
from tests.support.router_parts import decode, description, prefill
from tests.unit.cli.test_steering_rules import Rig

PROMPTS = OfferedLoad(20.0, 400.0, 400.0, 4.0, 402.0)
"""More than one prefill node computes."""


class Nowhere:
    """Sends nothing."""

    def send(self, incarnation: str, message: object) -> bool:
        return True


class PlannedRig(Rig):
    """A router with a planner, beside its steering."""

    def __init__(self, mode: PlannerMode = PlannerMode.ON) -> None:
        super().__init__()
        self.placer = Placer(PlacementSettings())
        self.requests = LiveRequests(self.view, Nowhere(), self.timers, Random(1), placer=self.placer)
        self.planning = self.make(self.registry, "r1.a", mode)

    def make(self, registry: FakeRegistry, incarnation: str, mode: PlannerMode) -> Planning:
        return Planning(
            mode,
            incarnation,
            self.view,
            self.requests,
            registry,
            self.steering,
            self.timers,
            self.events,
            Planner(acts=mode is PlannerMode.ON, forecast=lambda meter, now: PROMPTS),
        )

    def attach(self, *nodes: NodeDescription) -> None:
        super().attach(*nodes)
        for node in nodes:
            self.placer.on_attached(node)

    def learn(self, nodes: Sequence[NodeDescription]) -> None:
        for _ in range(40):
            for figures in (StepFigures(30.0, 200, 0, 0), StepFigures(12.0, 0, 4, 400)):
                for node in nodes:
                    self.placer.on_report(node.incarnation, StepReport((), LoadReport(), step=figures), 0.0)

    @property
    def desired(self) -> DesiredState:
        return self.store.desired("c")


@asynccontextmanager
async def planned(mode: PlannerMode = PlannerMode.ON) -> AsyncIterator[PlannedRig]:
    rig = PlannedRig(mode)
    nodes = [replace(node, num_blocks=100_000) for node in (prefill(), decode(), decode("d2"), decode("d3"))]
    rig.attach(*nodes)
    rig.learn(nodes)
    try:
        yield rig
    finally:
        await rig.steering.close()
        await rig.registry.close()


async def test_a_move_is_written_step_by_step_and_told_with_its_numbers() -> None:
    async with planned() as rig:
        await rig.planning.tick()
        # The node was idle: it is cordoned, and is to have its new role at once.
        assert rig.desired == DesiredState(planned_cordon=frozenset({"d1"}), planned_prefill=frozenset({"d1"}))
        (move,) = rig.planning.planner.book.moves
        assert (move.name, move.state) == ("d1", MoveState.FLIPPING)
        (event,) = [event for event in rig.events.after(0) if event.reason == "PlanMoved"]
        assert event.subject == "d1"
        assert event.detail.startswith("decode to prefill: pressure ")


async def test_a_planner_that_advises_tells_the_same_and_writes_nothing() -> None:
    async with planned() as acting, planned(PlannerMode.ADVISE) as advising:
        await acting.planning.tick()
        await advising.planning.tick()
        (advice,) = [event for event in advising.events.after(0) if event.reason.startswith("Plan")]
        (told,) = [event for event in acting.events.after(0) if event.reason.startswith("Plan")]
        assert (advice.reason, advice.subject, advice.detail) == ("PlanAdvised", told.subject, told.detail)
        assert advising.desired == DesiredState()


async def test_only_the_leader_plans_until_it_is_gone() -> None:
    async with planned() as rig:
        assert await rig.registry.lead("r2.b") is not None
        await rig.planning.tick()
        assert (rig.planning.term, rig.desired) == (None, DesiredState())
        term = rig.store.term("c")
        assert term is not None
        await rig.registry.resign(term)
        rig.timers.advance(10.0)
        await rig.planning.tick()
        assert rig.planning.term is not None
        assert rig.desired != DesiredState()


async def test_a_leader_whose_term_has_ended_writes_nothing_and_forgets_its_moves() -> None:
    async with planned() as rig:
        rig.report(decode(), running=1)
        rig.report(decode("d2"), running=1)
        rig.report(decode("d3"), running=1)
        await rig.planning.tick()
        assert rig.desired.planned_cordon
        before, term = rig.desired, rig.planning.term
        assert term is not None
        await rig.registry.resign(term)
        assert await rig.registry.lead("r2.b") is not None
        for node in (decode(), decode("d2"), decode("d3")):
            rig.report(node)
        rig.timers.advance(1.0)  # before it would confirm that it leads
        await rig.planning.tick()
        assert rig.desired == before
        assert (rig.planning.term, rig.planning.planner.book.moves) == (None, [])


async def test_a_new_leader_ends_the_cordons_of_the_one_before() -> None:
    async with planned() as rig:
        await rig.steering.write(plan_cordon("d3"))
        await rig.steering.write(cordon(["d2"]))
        await rig.planning.tick()
        assert "d3" not in rig.desired.planned_cordon
        assert rig.desired.cordoned == {"d2"}


async def test_nothing_moves_while_the_registry_is_away() -> None:
    async with planned() as rig:
        await rig.planning.tick()
        (move,) = rig.planning.planner.book.moves
        rig.store.stop()
        for _ in range(3):
            rig.timers.advance(20.0)
            await rig.planning.tick()
        assert rig.planning.term is None
        assert rig.reasons().count("PlannerStopped") == 1
        assert move.state is MoveState.FLIPPING
        rig.store.restart(empty=False)
        rig.timers.advance(1.0)
        await rig.planning.tick()
        assert rig.planning.term is not None
        assert rig.planning.planner.book.moves == [move]


async def test_a_write_that_failed_is_tried_again_before_anything_else() -> None:
    async with planned() as rig:
        await rig.planning.tick()
        (move,) = rig.planning.planner.book.moves
        rig.attach(replace(prefill("d1"), incarnation="d1.2"))
        rig.timers.advance(1.0)
        rig.store.stop()
        rig.planning.term = rig.planning.term or Term(0, "")
        await rig.planning.tick()
        assert move.state is MoveState.WARMING
        assert rig.desired.planned_cordon == {"d1"}
        rig.store.restart(empty=False)
        rig.timers.advance(1.0)
        await rig.planning.tick()
        assert rig.desired.planned_cordon == frozenset()


async def test_the_words_of_operators_come_first() -> None:
    async with planned() as rig:
        await rig.steering.write(set_role("d1", "decode"))
        await rig.planning.tick()
        assert rig.desired.role_of("d1") == "decode"
        assert rig.desired.planned_prefill == {"d2"}
        await rig.steering.set_role("d2", "decode")
        assert rig.desired.role_of("d2") == "decode"


async def test_what_was_planned_for_a_name_that_is_gone_is_forgotten() -> None:
    async with planned() as rig:
        await rig.planning.tick()
        assert rig.desired.planned_prefill == {"d1"}
        rig.view.detached("d1.1", "gone", 0.0)
        for seconds in (1.0, FORGET_S, 1.0):
            rig.timers.advance(seconds)
            await rig.planning.tick()
        assert "d1" not in rig.desired.planned_prefill


async def test_metrics_are_those_of_the_last_decision() -> None:
    async with planned() as rig:
        quiet = {figure.name: figure.value for figure in rig.planning.figures()}
        assert set(quiet.values()) == {0.0}
        await rig.planning.tick()
        shown = {(figure.name, figure.labels.get("role", "")): figure.value for figure in rig.planning.figures()}
        assert shown["planner_leads", ""] == 1.0
        assert shown["planner_nodes_wanted", "prefill"] == 3
        assert shown["planner_pressure", "prefill"] > 1.0


async def test_operators_are_told_the_numbers_of_the_last_decision() -> None:
    async with planned() as rig:
        assert rig.planning.report() == PlanReport("on")
        await rig.planning.tick()
        report = rig.planning.report()
        assert PLAN_REPORT.from_pb(PLAN_REPORT.to_pb(report)) == report
        assert (report.prefill_nodes, report.decode_nodes, report.wanted_prefill_nodes) == (1, 3, 3)
        assert report.prefill_pressure > 1.0 > report.wanted_prefill_pressure
        assert (report.requests_per_s, report.attained) == (PROMPTS.requests_per_s, 1.0)
        (move,) = report.moves
        assert (move.node, move.origin, move.to, move.state) == ("d1", "decode", "prefill", "flipping")
        rows = list(roles_of(report))
        assert rows[0] == [
            "prefill",
            "1",
            "3",
            f"{report.prefill_pressure:.2f}",
            f"{report.wanted_prefill_pressure:.2f}",
        ]


async def test_encode_nodes_do_not_move_and_have_a_pressure_of_their_own() -> None:
    async with planned() as rig:
        encoders = [description(name, Role.ENCODE) for name in ("a", "b")]
        rig.attach(*encoders)
        for node in encoders:
            rig.view.reported(node.incarnation, LoadReport(running=1, waiting=8))
        await rig.planning.tick()
        # They have no rates, and the others move as they would without them.
        assert [move.name for move in rig.planning.planner.book.moves] == ["d1"]
        shown = {(f.name, f.labels.get("role")): f.value for f in rig.planning.figures()}
        assert shown["planner_pressure", "encode"] == 1.0
        assert (shown["planner_nodes", "encode"], shown["planner_nodes_wanted", "encode"]) == (2, 3)
        assert list(roles_of(rig.planning.report()))[-1] == ["encode", "2", "3", "1.00", "0.67"]
        for node in encoders:
            rig.view.reported(node.incarnation, LoadReport())
        for _ in range(60):
            rig.timers.advance(1.0)
            await rig.planning.tick()
        assert rig.planning.planner.encoders.wanted == 1


async def test_requests_at_other_routers_are_demand() -> None:
    async with planned() as rig:
        meter = rig.planning.planner.meter
        for accepted in (100, 130, 130, 20):  # the last one is of a router that has begun anew
            rig.planning.take_totals([_totals("r1.a", 1000), _totals("r2.b", accepted)])
        assert meter.load(10.0, rig.timers.monotonic()).requests_per_s == 30.0


def _totals(incarnation: str, requests: int) -> RouterTotals:
    return RouterTotals("r", incarnation, requests=requests)
