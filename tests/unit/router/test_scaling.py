"""The number of nodes at a router that plans: what it asks of a scaler, when, and that nothing is changed blindly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.config import UpConfig
from baton.config.load import load
from baton.errors import ConfigError
from baton.messages.node import NodeDescription, Role
from baton.messages.operator import PlannedPool
from baton.registry.desired import DesiredState, cordon, plan_role
from baton.wire.codec.operator import PLAN_REPORT
from router.operations.planning import PlannerMode, Planning
from router.operations.scaler_calls import DEADLINE_S
from router.planner.demand import OfferedLoad
from router.planner.law import LawSettings, PressureLaw
from router.planner.moves import ASK_S, EVACUATE_S, LEAVE_S, Move, MoveState
from router.planner.planner import Planner
from router.planner.scaling import START_S
from router.planner.size import SizeSettings
from router.scalers.scaler import ScalerFailed, ScalerFault
from tests.doubles.fake_registry import FakeRegistry
from tests.doubles.fake_scaler import FakeScaler
from tests.support.router_parts import description
from tests.unit.router.test_planning import PlannedRig

BUSY = OfferedLoad(26.0, 400.0, 400.0, 60.0, 430.0)
"""Two nodes of each role have a pressure of 1.2, a third decode node makes it 0.79."""
QUIET = OfferedLoad(6.0, 400.0, 400.0, 60.0, 430.0)
"""Three nodes would have a pressure of 0.43."""
IDLE_S = SizeSettings().idle_s


class ScaledRig(PlannedRig):
    """A router with a planner and a scaler, whose nodes it sees when they start and end."""

    def __init__(self, mode: PlannerMode, load: OfferedLoad, encoders: int) -> None:
        self.scaler = FakeScaler({"prefill": 2, "decode": 2} | ({"encode": encoders} if encoders else {}))
        self.load = load
        super().__init__(mode)
        self.known: dict[str, NodeDescription] = {}
        self.meet()

    def make(self, registry: FakeRegistry, incarnation: str, mode: PlannerMode) -> Planning:
        size = SizeSettings(min_nodes=2, max_nodes=6)
        acts, law = mode is PlannerMode.ON, PressureLaw(LawSettings(size=size))
        planner = Planner(
            acts=acts, law=law, forecast=lambda meter, now: self.load, most_nodes=size.max_nodes, most_encoders=4
        )
        return Planning(
            *(mode, incarnation, self.view, self.requests, registry, self.steering, self.timers, self.events, planner),
            scaler=self.scaler,
        )

    def meet(self) -> None:
        """The scaler's nodes start and end, and the router sees it."""
        self.scaler.settle()
        names = [name for pool in self.scaler.pools for name in self.scaler.nodes(pool)]
        for name in set(self.known) - set(names):
            self.view.detached(self.known.pop(name).incarnation, "gone", 0.0)
        for name in names:
            if name not in self.known:
                role = Role(name.partition("-")[0])
                node = description(name, role, num_blocks=2000)
                self.known[name] = node
                self.attach(node)
                if role is not Role.ENCODE:
                    self.learn([node])

    async def run(self, seconds: float, *, meets: bool = True) -> None:
        """Let time pass, in steps that are shorter than a leader's term."""
        for _ in range(int(seconds / 5.0)):
            self.timers.advance(5.0)
            await self.planning.tick()
            await self.turn()
            if meets:
                self.meet()

    async def until_removal(self) -> Move:
        """Let time pass until a node is to be taken away."""
        while not self.removals:
            await self.run(5.0, meets=False)
        return self.removals[0]

    async def turn(self) -> None:
        """Calls that don't hang end."""
        for _ in range(4):
            await asyncio.sleep(0)

    def told(self, *reasons: str) -> list[str]:
        return [f"{e.reason} {e.subject}: {e.detail}" for e in self.events.after(0) if e.reason.startswith(reasons)]

    @property
    def removals(self) -> list[Move]:
        book = self.planning.planner.book
        return [move for move in [*book.ended, *book.moves] if move.to is None]

    def figure(self, name: str, **labels: str) -> float:
        return sum(f.value for f in self.planning.figures() if f.name == name and labels.items() <= f.labels.items())


@asynccontextmanager
async def scaled(
    load: OfferedLoad = BUSY, mode: PlannerMode = PlannerMode.ON, encoders: int = 0
) -> AsyncIterator[ScaledRig]:
    rig = ScaledRig(mode, load, encoders)
    running = asyncio.create_task(rig.planning.run())
    await rig.turn()
    try:
        yield rig
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await rig.steering.close()
        await rig.registry.close()


async def test_a_pool_grows_by_what_its_role_lacks_and_no_further() -> None:
    async with scaled() as rig:
        await rig.run(200.0)
        assert rig.scaler.changes == ["decode 3"]
        assert rig.told("PlanGrown", "Growth")[0].startswith("PlanGrown pool decode: 2 to 3 nodes: pressure 1.2")
        assert rig.told("Growth")[0].startswith("GrowthSettled pool decode: 2 to 3 nodes: pressure 1.2")
        assert rig.figure("planner_growths_total", pool="decode", end="settled") == 1
        report = rig.planning.report()
        assert (report.prefill_nodes, report.decode_nodes, report.wanted_decode_nodes) == (2, 3, 3)
        assert report.pools == (PlannedPool("prefill", 2, 2), PlannedPool("decode", 3, 3))
        (growth,) = report.growths
        assert (growth.pool, growth.before, growth.after, growth.state) == ("decode", 2, 3, "settled")
        assert 0.0 < growth.took_s < growth.age_s
        assert PLAN_REPORT.from_pb(PLAN_REPORT.to_pb(report)) == report


async def test_nodes_that_start_are_counted_and_those_that_do_not_are_no_reason_for_more() -> None:
    async with scaled() as rig:
        await rig.run(START_S + 100.0, meets=False)
        assert rig.scaler.changes == ["decode 3"]
        assert rig.told("GrowthFailed")
        assert rig.planning.report().wanted_decode_nodes == 3


async def test_pools_never_grow_beyond_the_most_nodes_however_few_of_them_join() -> None:
    async with scaled() as rig:
        for _ in range(30):
            await rig.run(20.0, meets=False)
            rig.scaler.settle()  # they serve, but not here
        assert sum(len(rig.scaler.nodes(pool)) for pool in ("prefill", "decode")) == 6


async def test_an_idle_node_is_emptied_and_then_taken_away_by_its_name() -> None:
    async with scaled(QUIET) as rig:
        await rig.steering.write(plan_role("prefill-0", "prefill"))
        rig.report(rig.known["prefill-0"], running=1)
        rig.report(rig.known["prefill-1"], running=1, context_tokens=9)
        await rig.run(IDLE_S - 30.0)
        assert rig.scaler.changes == []
        move = await rig.until_removal()
        # A prefill node is missed least. It is cordoned until it has nothing to do.
        assert (move.name, move.state, rig.scaler.changes) == ("prefill-0", MoveState.EVACUATING, [])
        assert rig.desired.planned_cordon == {"prefill-0"}
        rig.report(rig.known["prefill-0"])
        await rig.run(15.0, meets=False)
        assert (rig.scaler.changes, move.state) == (["-prefill-0"], MoveState.LEAVING)
        await rig.run(20.0)
        assert (move.state, rig.desired) == (MoveState.SETTLED, DesiredState())
        why = "prefill to none: pressure 0.21 with 4 nodes, 0.43 with 3"
        assert rig.told("PlanMoved") == [f"PlanMoved prefill-0: {why}"]
        assert rig.figure("planner_moves_total", to="none", end="settled") == 1
        # The next one goes five minutes later, and two stay.
        await rig.run(3 * IDLE_S)
        assert rig.scaler.changes == ["-prefill-0", "-decode-0"]


async def test_a_node_with_much_to_do_goes_after_its_time_and_one_that_does_not_go_serves_again() -> None:
    async with scaled(QUIET) as rig:
        for node in rig.known.values():
            rig.report(node, running=1)
        move = await rig.until_removal()
        await rig.run(EVACUATE_S + 10.0, meets=False)
        assert move.state is MoveState.LEAVING
        await rig.run(LEAVE_S, meets=False)
        assert (move.state, rig.desired) == (MoveState.FAILED, DesiredState())


async def test_only_the_node_that_can_go_goes() -> None:
    async with scaled(QUIET) as rig:
        rig.scaler.only = {"prefill": "prefill-1", "decode": "decode-1"}
        await rig.run(IDLE_S + 60.0)
        assert rig.scaler.changes == ["-prefill-1"]
        assert [pool.next_out for pool in rig.planning.report().pools] == ["prefill-1", "decode-1"]
    async with scaled(QUIET) as rig:
        rig.scaler.only = {"prefill": "prefill-1", "decode": "decode-1"}
        await rig.steering.write(cordon(["prefill-1", "decode-1"]))
        await rig.run(2 * IDLE_S)
        assert rig.scaler.changes == []


async def test_a_removal_turns_when_the_load_does() -> None:
    async with scaled(QUIET) as rig:
        for node in rig.known.values():
            rig.report(node, running=1)
        move = await rig.until_removal()
        assert move.state is MoveState.EVACUATING
        rig.load = BUSY
        await rig.run(10.0, meets=False)
        # Five nodes are wanted: it stays, and one is added.
        assert (move.state, rig.desired, rig.scaler.changes) == (MoveState.CANCELLED, DesiredState(), ["decode 3"])


@pytest.mark.parametrize("load", [BUSY, QUIET])
async def test_a_planner_that_advises_decides_the_same_and_asks_for_nothing(load: OfferedLoad) -> None:
    async with scaled(load) as acting, scaled(load, PlannerMode.ADVISE) as advising:
        for rig in (acting, advising):
            await rig.run(IDLE_S + 40.0)
        (did, *_), (advised, *_) = acting.told("PlanMoved", "PlanGrown"), advising.told("PlanAdvised")
        assert did.split(" ", 1)[1] == advised.split(" ", 1)[1]
        assert (advising.scaler.changes, advising.desired) == ([], DesiredState())
        assert len(advising.told("PlanAdvised")) <= 4


async def test_a_leader_whose_term_has_ended_asks_for_nothing() -> None:
    async with scaled() as rig:
        term = rig.planning.term
        assert term is not None
        await rig.registry.resign(term)
        assert await rig.registry.lead("r2.b") is not None
        rig.planning._confirm_at = 1e9  # it has not found out yet
        await rig.run(60.0)
        assert rig.scaler.changes == []
        assert rig.planning.term is None


async def test_a_call_is_given_up_when_the_registry_is_gone() -> None:
    async with scaled() as rig:
        rig.scaler.hangs = True
        while not rig.scaler.changes:
            await rig.run(5.0)
        assert rig.scaler.num_hanging == 1
        rig.store.stop()
        await rig.run(5.0)
        assert rig.scaler.num_hanging == 0
        rig.scaler.hangs = False
        await rig.run(60.0)
        assert rig.scaler.changes == ["decode 3"]
        rig.store.restart(empty=False)
        await rig.run(60.0)
        # Whether the first call had its effect was not known; it had none.
        assert (rig.scaler.changes, len(rig.scaler.nodes("decode"))) == (["decode 3", "decode 3"], 3)


@pytest.mark.parametrize("fault", list(ScalerFault))
async def test_a_scaler_that_fails_is_told_and_asked_less_and_less(fault: ScalerFault) -> None:
    async with scaled() as rig:
        await rig.run(5.0)
        rig.scaler.fails = ScalerFailed(fault, "pool decode", "no room")
        await rig.run(600.0)
        assert rig.planning.planner.scaling is not None
        assert rig.told("ScalerFailed")
        report = rig.planning.report()
        assert f"no room ({fault})" in report.reason
        assert report.pools == (), "what was observed before may have changed"
        # A call each few seconds would be 120.
        assert 3 <= rig.figure("planner_scaler_failures_total", fault=fault) <= 15
        assert len(rig.scaler.changes) <= 8
        rig.scaler.fails = None
        await rig.run(2400.0)
        assert rig.told("ScalerBack")
        assert rig.scaler.nodes("decode") == ["decode-0", "decode-1", "decode-2"]


async def test_a_pool_that_may_not_grow_is_left_alone_longer_and_longer() -> None:
    async with scaled() as rig:
        rig.scaler.refuses = ScalerFailed(ScalerFault.DENIED, "pool decode", "ask the owner")
        await rig.run(3600.0)
        assert 4 <= len(rig.scaler.changes) <= 8
        assert len(rig.told("GrowthCancelled")) == len(rig.scaler.changes)
        assert "ask the owner (denied); nothing is changed for" in rig.planning.report().reason


async def test_a_change_whose_answer_was_lost_is_not_made_twice() -> None:
    async with scaled() as rig:
        rig.scaler.fails_late = ScalerFailed(ScalerFault.TIMEOUT, "pool decode", "no answer within 30 s")
        await rig.run(120.0)
        assert rig.scaler.changes == ["decode 3"]
        assert rig.told("GrowthSettled")
    async with scaled(QUIET) as rig:
        rig.scaler.fails_late = ScalerFailed(ScalerFault.TIMEOUT, "node prefill-0", "no answer within 30 s")
        await rig.run(IDLE_S + 100.0)
        (move,) = rig.removals
        assert (move.state, rig.scaler.nodes("prefill")) == (MoveState.SETTLED, ["prefill-1"])


async def test_a_scaler_that_hangs_is_given_up() -> None:
    async with scaled() as rig:
        await rig.run(5.0)
        rig.scaler.hangs = True
        await rig.run(ASK_S + 2 * DEADLINE_S)
        assert rig.figure("planner_scaler_failures_total", fault="timeout") >= 1
        assert f"no answer within {DEADLINE_S:g} s" in rig.told("ScalerFailed")[0]
        assert len(rig.scaler.changes) <= 1


async def test_a_node_that_nobody_takes_away_serves_again() -> None:
    async with scaled(QUIET) as rig:
        await rig.run(IDLE_S)
        rig.scaler.fails = ScalerFailed(ScalerFault.REFUSED, "node prefill-0", "keep it")
        await rig.run(20.0)
        (move,) = rig.removals
        assert (move.state, rig.desired) == (MoveState.CANCELLED, DesiredState())
        assert rig.told("MoveCancelled")
        rig.scaler.fails = None
        await rig.run(2 * IDLE_S)
        assert rig.scaler.changes == ["-prefill-0", "-prefill-1"], "another one goes"


async def test_no_node_goes_while_one_that_is_to_be_does_not_serve() -> None:
    async with scaled(QUIET) as rig:
        await rig.run(5.0)
        await rig.scaler.scale("decode", 3)
        await rig.run(2 * IDLE_S, meets=False)
        assert rig.scaler.changes == ["decode 3"]


async def test_whoever_adds_a_node_keeps_it_for_five_minutes() -> None:
    async with scaled(QUIET) as rig:
        await rig.run(IDLE_S - 60.0)
        await rig.scaler.scale("decode", 3)
        await rig.run(IDLE_S)
        assert rig.scaler.changes == ["decode 3"]
        await rig.run(60.0)
        assert len(rig.scaler.changes) == 2


async def test_encode_nodes_grow_when_they_stay_busy_and_up_to_a_bound_of_their_own() -> None:
    async with scaled(QUIET, encoders=2) as rig:
        for name in ("encode-0", "encode-1"):
            rig.report(rig.known[name], waiting=40)
        await rig.run(20.0)
        for name in ("encode-0", "encode-1"):
            rig.report(rig.known[name])
        await rig.run(60.0)
        assert rig.scaler.changes == [], "it was a burst"
        for _ in range(40):
            for name in rig.scaler.nodes("encode"):
                rig.report(rig.known[name], running=1, waiting=8)
            await rig.run(5.0)
        assert rig.scaler.changes == ["encode 3", "encode 4"]
        assert rig.told("PlanGrown")[0].startswith("PlanGrown pool encode: 2 to 3 nodes: pressure ")
        assert rig.figure("planner_growths_total", pool="encode", end="settled") == 2
        assert rig.figure("planner_nodes_wanted", role="encode") == 4


async def test_an_idle_encode_node_is_emptied_and_taken_away_and_the_last_one_stays() -> None:
    async with scaled(BUSY, encoders=3) as rig:
        await rig.run(IDLE_S)
        for name, count in (("encode-0", 2), ("encode-1", 1), ("encode-2", 2)):
            rig.report(rig.known[name], running=count)
        move = await rig.until_removal()
        assert (move.name, move.state, rig.desired.planned_cordon) == ("encode-1", MoveState.EVACUATING, {"encode-1"})
        assert move.reason == "pressure 0.04 with 3 encode nodes, 0.07 with 2"
        for name in ("encode-0", "encode-1", "encode-2"):
            rig.report(rig.known[name])
        await rig.run(4 * IDLE_S)
        assert rig.scaler.changes == ["decode 3", "-encode-1", "-encode-0"]
        assert rig.desired == DesiredState()


async def test_encode_nodes_that_start_or_do_not_are_no_prefill_or_decode_nodes() -> None:
    async with scaled(BUSY, encoders=1) as rig:
        await rig.scaler.scale("encode", 4)
        await rig.run(20.0, meets=False)
        assert rig.scaler.changes == ["encode 4", "decode 3"]
    async with scaled(QUIET, encoders=1) as rig:
        await rig.scaler.scale("encode", 4)
        await rig.run(IDLE_S + 60.0, meets=False)
        assert rig.scaler.changes == ["encode 4", "-prefill-0"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"scaler": "local:/r", "max_nodes": 4}, "set planner"),
        ({"scaler": "local:/r", "planner": "on"}, "needs max_nodes"),
        ({"max_nodes": 4, "planner": "on"}, "no scaler"),
        ({"max_encode_nodes": 4, "planner": "on"}, "no scaler"),
        ({"scaler": "local:/r", "planner": "on", "max_nodes": 3, "min_nodes": 4}, "less than min_nodes 4"),
    ],
)
def test_settings_that_make_no_sense_are_refused(flags: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load(UpConfig, {"model": "m", **flags}, {})
