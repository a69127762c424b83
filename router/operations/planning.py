"""Planning at one router: it shows its planner the cluster, and carries out what that decides, while it is the leader.

One router of a cluster leads, by a lock in the registry (`Membership.lead`); the others keep metering. Each write names
the leader's term. The rules:

1. Without a term nothing is decided: not while another router leads, and not while the registry is away.
2. Effects are carried out in order. One that the registry could not store is tried again before anything is decided.
3. A new leader knows nothing of the moves before. It ends their cordons; roles that were given stay.
4. What was planned for a name without a node is forgotten after FORGET_S.
5. Before the number of nodes is changed, the registry confirms the term; a call that still goes on when the term ends
   is given up. A router that is suspended right between these two for longer than LEAD_S may still ask once: then the
   cluster has a node more than another leader wants, or one that was emptied is gone. A pool never gets a lower number.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum

from baton.errors import NotLeader, Unreachable
from baton.messages.operator import PlanReport
from baton.observe.metrics import Figure
from baton.registry.base import LEAD_S, Membership, Term
from baton.registry.desired import (
    DesiredChange,
    DesiredState,
    end_planned_cordons,
    forget_planned,
    plan_cordon,
    plan_role,
)
from router.live_requests import LiveRequests
from router.operations.cluster_events import EventRing
from router.operations.live_history import RouterTotals
from router.operations.plan_report import plan_figures, plan_report
from router.operations.scaler_calls import ScalerCalls
from router.operations.steering import Steering
from router.placement.view import ClusterView
from router.planner.law import LawSettings, PressureLaw
from router.planner.moves import Cordon, Flip, Forget, MoveEnded, MoveState, Uncordon
from router.planner.observation import meter_requests, observe
from router.planner.planner import Plan, PlanEffect, Planner
from router.planner.scaling import GrowthEnded, GrowthState, Observe
from router.planner.size import SizeSettings
from router.scalers.scaler import Scaler
from router.timers import Timers, sleep_until

_log = logging.getLogger(__name__)

TICK_S = 1.0
FORGET_S = 3600.0
_CONFIRM_S = LEAD_S / 3


class PlannerMode(Enum):
    """What a router's planner does."""

    OFF = "off"
    ADVISE = "advise"
    """The planner tells operators what it would do."""
    ON = "on"


def planner_of(mode: PlannerMode, goal: float, size: SizeSettings, most_encoders: int | None = None) -> Planner:
    """A planner by the router's own law. `goal`: the share of requests that are to keep their targets.

    `most_encoders`: as for `Planner`.
    """
    law = PressureLaw(LawSettings(goal=goal, size=size))
    return Planner(acts=mode is PlannerMode.ON, law=law, most_nodes=size.max_nodes, most_encoders=most_encoders)


class Planning:
    """The planner of one router. Belongs to the event loop."""

    def __init__(
        self,
        mode: PlannerMode,
        incarnation: str,
        view: ClusterView,
        requests: LiveRequests,
        membership: Membership,
        steering: Steering,
        timers: Timers,
        events: EventRing,
        planner: Planner,
        scaler: Scaler | None = None,
    ) -> None:
        """`incarnation`: this router's. `scaler`: changes the number of nodes, for a planner that decides on it."""
        self.planner = planner
        self.term: Term | None = None
        """The term in which this router leads; None: it does not."""
        self.plan: Plan | None = None
        """What was decided last."""
        self._mode = mode
        self._incarnation = incarnation
        self._view = view
        self._requests = requests
        self._membership = membership
        self._steering = steering
        self._timers = timers
        self._events = events
        self._calls = None if scaler is None else ScalerCalls(scaler, timers)
        self._due: deque[PlanEffect | DesiredChange] = deque()
        """What is still to be carried out."""
        self._confirm_at = 0.0
        self._last_error = ""
        self._accepted: dict[str, int] = {}
        """The requests that each other router has accepted so far."""
        self._seen_at: dict[str, float] = {}
        """When each node for which something is planned was attached last."""
        if mode is not PlannerMode.OFF:
            meter_requests(self.planner.meter, requests, timers)

    def take_totals(self, totals: Iterable[RouterTotals]) -> None:
        """Take what all routers have counted, this one first: requests at others are demand, too."""
        accepted = {router.incarnation: router.requests for router in totals if router.incarnation != self._incarnation}
        # A router that was not known before has accepted nothing since then.
        more = sum(max(0, count - self._accepted.get(name, count)) for name, count in accepted.items())
        self._accepted = accepted
        if more:
            self.planner.meter.arrived_elsewhere(more, self._timers.monotonic())

    async def run(self) -> None:
        """Plan until cancelled, which ends this router's term."""
        if self._mode is PlannerMode.OFF:
            return
        try:
            while True:
                await self.tick()
                await sleep_until(self._timers, self._timers.monotonic() + TICK_S)
        finally:
            if self._calls is not None:
                await self._calls.close()
            await self._resign()

    async def tick(self) -> None:
        """Decide, and carry out what was decided, if this router leads."""
        now = self._timers.monotonic()
        try:
            await self._lead(now)
            if self.term is None:
                return
            self._take_answer(now)
            await self._perform_due(self.term)
            self._forget_names(now)
            desired = self._steering.desired
            assigned = desired.prefill | desired.decode
            seen = observe(self._view, self._requests, desired.cordoned, assigned, self._steering.settle_s)
            plan = self.planner.tick(seen, now)
            if plan.verdict is not None or plan.why_not:
                self.plan = plan
            self._tell(plan)
            self._due.extend(plan.effects)
            await self._perform_due(self.term)
            await self._ask_scaler(self.term, now)
            self._last_error = ""
        except NotLeader:
            self._step_down()
        except Unreachable as error:
            # Nothing is decided until the registry is back and this router leads again.
            self.term, self._confirm_at = None, now
            self._give_up_call()
            if self._last_error != str(error):
                self._last_error = str(error)
                self._events.record("PlannerStopped", detail=str(error), is_warning=True)

    async def _lead(self, now: float) -> None:
        """Confirm that this router leads, or become the leader."""
        if now < self._confirm_at:
            return
        before, self.term = self.term, await self._membership.lead(self._incarnation)
        self._confirm_at = now + _CONFIRM_S
        if self.term is None:
            if before is not None or self.planner.book.moves:
                self._step_down()
        elif self._mode is PlannerMode.ON and self.term != before:
            known = {move.name for move in self.planner.book.moves}
            left_behind = self._steering.desired.planned_cordon - known
            if left_behind:
                self._due.append(end_planned_cordons(left_behind))

    def _step_down(self) -> None:
        """Another router leads: its planner has moves of its own."""
        self.term = None
        self._due.clear()
        self._give_up_call()
        self.planner.forget()

    async def _resign(self) -> None:
        term, self.term = self.term, None
        if term is not None:
            try:
                await self._membership.resign(term)
            except Unreachable as error:
                _log.info("the term of the planner ends by itself: %s", error)

    async def _perform_due(self, term: Term) -> None:
        while self._due:
            await self._perform(self._due[0], term)
            self._due.popleft()

    def _tell(self, plan: Plan) -> None:
        """Tell operators of what begins."""
        acts = self._mode is PlannerMode.ON
        for move in plan.started:
            reason = "PlanMoved" if acts else "PlanAdvised"
            self._events.record(reason, move.name, incarnation=move.incarnation, detail=move.told)
        for growth in plan.grown:
            self._events.record("PlanGrown" if acts else "PlanAdvised", f"pool {growth.pool}", detail=growth.told)

    def _take_answer(self, now: float) -> None:
        """Take the scaler's answer, if there is one."""
        if self._calls is None or self.planner.scaling is None or (answered := self._calls.take()) is None:
            return
        before = self.planner.scaling.trouble
        self._due.extend(self.planner.answered(*answered, now))
        trouble = self.planner.scaling.trouble
        if trouble and trouble != before:
            self._events.record("ScalerFailed", detail=trouble, is_warning=True)
        elif before and not trouble:
            self._events.record("ScalerBack")

    async def _ask_scaler(self, term: Term, now: float) -> None:
        """Ask the scaler what is to be asked. Raises NotLeader instead of changing anything after the term."""
        if self._calls is None or not self._calls.is_idle or (ask := self.planner.next_ask(now)) is None:
            return
        if not isinstance(ask, Observe) and await self._membership.lead(self._incarnation) != term:
            raise NotLeader(f"the term {term.number} has ended before the scaler was {ask.told}")
        self._calls.start(ask)

    def _give_up_call(self) -> None:
        if self._calls is not None and self.planner.scaling is not None:
            self._calls.cancel()
            self.planner.scaling.forget_sizes()

    async def _perform(self, effect: PlanEffect | DesiredChange, term: Term) -> None:
        write = self._steering.write
        match effect:
            case DesiredChange():
                await write(effect, term)
            case Cordon(name):
                await write(plan_cordon(name), term)
            case Uncordon(name):
                await write(end_planned_cordons([name]), term)
            case Flip(name, _, role):
                await write(plan_role(name, "prefill" if role.value == "prefill" else "decode"), term)
            case Forget(name):
                await write(forget_planned([name]), term)
            case GrowthEnded(growth):
                self._events.record(
                    f"Growth{growth.state.value.capitalize()}",
                    f"pool {growth.pool}",
                    detail=f"{growth.told}; it took {self._timers.monotonic() - growth.began_at:.1f} s",
                    is_warning=growth.state is not GrowthState.SETTLED,
                )
            case MoveEnded(move):
                self._events.record(
                    f"Move{move.state.value.capitalize()}",
                    move.name,
                    incarnation=move.incarnation,
                    detail=f"{move.told}; it took {self._timers.monotonic() - move.began_at:.1f} s",
                    is_warning=move.state is MoveState.FAILED,
                )

    def _forget_names(self, now: float) -> None:
        """Forget what was planned for names that have had no node for long."""
        planned = _planned_names(self._steering.desired)
        attached = {node.node_id for node in self._view.descriptions()}
        self._seen_at = {name: now if name in attached else self._seen_at.get(name, now) for name in planned}
        gone = [name for name, at in self._seen_at.items() if now >= at + FORGET_S]
        if gone and self._mode is PlannerMode.ON:
            self._due.append(forget_planned(gone))

    def report(self) -> PlanReport:
        """What was decided last, for operators."""
        now, leads = self._timers.monotonic(), self.term is not None
        return plan_report(self.planner, self.plan, self._mode.value, leads=leads, why_not=self._last_error, now=now)

    def figures(self) -> Iterator[Figure]:
        """The metrics, for the metrics page."""
        return plan_figures(self.planner, self.report())


def _planned_names(desired: DesiredState) -> frozenset[str]:
    return desired.planned_cordon | desired.planned_prefill | desired.planned_decode
