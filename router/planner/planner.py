"""The planner: decides which nodes change their roles and how many there are, by what it is shown of a cluster. Pure.

Prefill and decode nodes are planned together. Encode nodes have a number of their own, and never change their role.

It decides the same whether it acts or only advises: a planner that advises ends each of its moves as it begins.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from baton.messages.node import Role
from baton.values import value
from router.planner.capacity import Capacity
from router.planner.demand import DemandMeter, Forecast, latest
from router.planner.encoders import EncoderDemand, EncoderMeter, encoder_law
from router.planner.law import Law, PressureLaw, Situation, Verdict, pressure_of
from router.planner.moves import Move, MoveBook, MoveEffect, MoveState, PlannedNode
from router.planner.scaling import Answer, Ask, Growth, GrowthEnded, Remove, Scaling
from router.planner.size import PoolState
from router.scalers.scaler import ScalerFailed, ScalerFault

PERIOD_S = 5.0
"""The law decides once in so many seconds; moves are followed in each tick."""
LEAST_STEPS = 64
"""Rates that were learnt from fewer steps say little: no node moves by them."""
_ATTAINED_S = 60.0
_MOVING = (Role.PREFILL, Role.DECODE)
"""The roles between which nodes move."""
_WITHIN_TARGETS = 4.0
"""What waits is to be served within so many times the target of the first token."""


@value(frozen=True, slots=True)
class Backlog:
    """What waits for nodes."""

    prompt_tokens: int = 0
    """Tokens of prompts that wait or are being computed on prefill nodes."""
    num_for_prefill: int = 0
    """Requests that wait at the router because all prefill nodes are full."""
    num_for_decode: int = 0
    """Those that wait because all decode nodes are full."""


@value(frozen=True, slots=True)
class Observation:
    """What a planner is shown of the cluster."""

    nodes: Sequence[PlannedNode]
    """The attached prefill and decode nodes, one of each name."""
    capacity: Capacity | None
    """What nodes sustain; None: there is no node."""
    num_steps: int
    """The steps from which that was learnt."""
    backlog: Backlog
    settle_s: float = 0.0
    """Within so many seconds all routers know that a node is cordoned."""
    encoders: Sequence[PlannedNode] = ()
    """The attached encode nodes; their `work` is the inputs that they have."""

    @property
    def all_nodes(self) -> Sequence[PlannedNode]:
        """Nodes of all roles."""
        return [*self.nodes, *self.encoders]


PlanEffect: TypeAlias = MoveEffect | GrowthEnded


@dataclass(frozen=True, slots=True)
class Plan:
    """What a tick of the planner has decided."""

    effects: Sequence[PlanEffect]
    """To be carried out in order; nothing for a planner that advises."""
    verdict: Verdict | None
    """What the law has decided; None: it was not asked, see `why_not`."""
    started: Sequence[Move]
    """Nodes begin to move to another role, or out."""
    grown: Sequence[Growth]
    situation: Situation | None
    """What it has decided from."""
    why_not: str
    """Why the law was not asked, for people; empty: it was, or its time has not come."""


class Planner:
    """Plans for one cluster. Seconds on the caller's clock."""

    def __init__(
        self,
        *,
        acts: bool,
        law: Law | None = None,
        forecast: Forecast = latest,
        most_nodes: int | None = None,
        most_encoders: int | None = None,
    ) -> None:
        """`acts`: whether the effects are carried out; if not, nothing but the decisions comes of a tick.

        `most_nodes`: the most prefill and decode nodes together; None: nobody can be told to change the number of
        nodes. `most_encoders`: None: the number of encode nodes is not changed.
        """
        self.meter = DemandMeter()
        self.book = MoveBook()
        self.scaling = None if most_nodes is None else Scaling()
        self._most_nodes = most_nodes
        self._most_encoders = most_encoders
        self.encoders = EncoderDemand()
        """How busy encode nodes are, and how many are wanted, as of the last decision."""
        self._encoder_meter = EncoderMeter()
        self._encoder_law = None if most_encoders is None else encoder_law(most_encoders)
        self._attached: frozenset[str] = frozenset()
        """The names of all nodes, when they were seen last."""
        self._acts = acts
        self._law = law or PressureLaw()
        self._forecast = forecast
        self._decides_at = 0.0

    def tick(self, seen: Observation, now: float) -> Plan:
        """Follow the moves, and decide on further ones if it is time."""
        self._attached = frozenset(node.name for node in seen.all_nodes)
        encoders = self._encoder_meter.sample(
            [int(node.work) for node in seen.encoders if node.is_ready and not self.book.moves_away(node.name)], now
        )
        effects: list[PlanEffect] = [*self.book.follow(seen.all_nodes, seen.settle_s, now)]
        if self.scaling is not None:
            effects += self.scaling.follow(now)
        if now < self._decides_at:
            return Plan(effects, None, (), (), None, "")
        self._decides_at = now + PERIOD_S
        self.encoders = encoders
        more, encoders_grown, encoders_removed = self._plan_encoders(seen, now)
        plan = self._plan_others(seen, now)
        return replace(
            plan,
            effects=[*effects, *more, *plan.effects] if self._acts else (),
            started=[*encoders_removed, *plan.started],
            grown=[*encoders_grown, *plan.grown],
        )

    def _plan_encoders(self, seen: Observation, now: float) -> tuple[Sequence[PlanEffect], list[Growth], list[Move]]:
        """Decide on the number of encode nodes."""
        scaling, demand, roles = self.scaling, self.encoders, (Role.ENCODE,)
        most = self._most_encoders
        if scaling is None or self._encoder_law is None or most is None or not demand.num_nodes:
            return (), [], []
        if Role.ENCODE.value not in scaling.sizes:
            return (), [], []
        count = demand.num_nodes + scaling.num_coming(roles)
        pools = scaling.state(roles, self.book.num_changing(roles), now)
        size = self._encoder_law.decide(count, demand.pressure_with, now, pools)
        self.encoders = replace(demand, wanted=size.wanted)
        effects, to_add = self._keep(size.to_add, roles, now)
        told = f"pressure {demand.pressure_with(count):.2f} with {count} encode nodes"
        grown: list[Growth] = []
        move: Move | None = None
        if to_add:
            reason = f"{told} becomes {demand.pressure_with(size.wanted):.2f} with {size.wanted}"
            grown = scaling.grow({Role.ENCODE: to_add}, to_add, most, reason, now)
        elif size.to_remove:
            left = demand.pressure_with(count - 1)
            reason = f"{told}, {left:.2f} with {count - 1}"
            move = self.book.start_removal(seen.encoders, scaling.only(roles), {Role.ENCODE: left}, reason, now)
        return self._begun(scaling, effects, grown, move, seen, now)

    def _plan_others(self, seen: Observation, now: float) -> Plan:
        """Decide on prefill and decode nodes."""
        effects: list[PlanEffect] = []
        counts = self.book.counts(seen.nodes)
        if seen.capacity is None or sum(counts.values()) < 2:
            return Plan(effects, None, (), (), None, "there are fewer than two nodes")
        if seen.num_steps < LEAST_STEPS:
            return Plan(effects, None, (), (), None, f"nodes have reported {seen.num_steps} of {LEAST_STEPS} steps")
        situation = self._situation(seen, seen.capacity, now)
        verdict = self._law.decide(situation, now)
        started: list[Move] = []
        if verdict.towards is not None:
            more, started = self._move(
                verdict, verdict.towards, abs(verdict.num_prefill - counts[Role.PREFILL]), seen, now
            )
            effects += more
        grown: list[Growth] = []
        if self.scaling is not None:
            resized, grown, removed = self._resize(self.scaling, verdict, situation, seen, now)
            effects += resized
            started += removed
        return Plan(effects, verdict, started, grown, situation, "")

    def next_ask(self, now: float) -> Ask | None:
        """What is to be asked of the scaler now, if no call to it goes on."""
        return None if self.scaling is None else self.scaling.next_ask(self.book.to_ask, now)

    def answered(self, ask: Ask, answer: Answer, now: float) -> Sequence[PlanEffect]:
        """Take the scaler's answer. Returns effects like those of a plan."""
        if self.scaling is None:
            return ()
        if isinstance(ask, Remove) and ask.name not in self._attached and _is_unknown_node(answer):
            answer = None  # an earlier call has taken it away
        ended, event = self.scaling.answered(ask, answer, self.book.to_ask, now)
        moved = self.book.answered(ask.name, event, now) if isinstance(ask, Remove) and event is not None else ()
        return [*ended, *moved]

    def forget(self) -> None:
        """Another planner decides: forget what goes on."""
        self.book = MoveBook()
        if self._most_nodes is not None:
            self.scaling = Scaling()

    def _situation(self, seen: Observation, capacity: Capacity, now: float) -> Situation:
        load, counts, backlog = self._forecast(self.meter, now), self.book.counts(seen.nodes), seen.backlog
        scaling = self.scaling
        within_s = _WITHIN_TARGETS * capacity.first_token_ms / 1e3
        # Where nodes leave a role, others fill up, and what waits for them says nothing of the load.
        leaving = {move.origin for move in self.book.moves if move.state is not MoveState.WARMING}
        num_waiting = backlog.num_for_prefill + backlog.prompt_tokens / max(1.0, load.uncached_tokens)
        return Situation(
            load=load,
            prefill_backlog_per_s=0.0 if Role.PREFILL in leaving else num_waiting / within_s,
            decode_backlog_per_s=0.0 if Role.DECODE in leaving else backlog.num_for_decode / within_s,
            capacity=capacity,
            num_prefill=counts[Role.PREFILL],
            num_decode=counts[Role.DECODE],
            attained=self.meter.attained(_ATTAINED_S, now),
            pools=PoolState.UNSCALED
            if scaling is None
            else scaling.state(_MOVING, self.book.num_changing(_MOVING), now),
            num_coming=0 if scaling is None else scaling.num_coming(_MOVING),
        )

    def _move(
        self, verdict: Verdict, towards: Role, count: int, seen: Observation, now: float
    ) -> tuple[Sequence[MoveEffect], list[Move]]:
        """Let nodes move to a role: those on their way from it turn first."""
        effects: list[MoveEffect] = []
        while count and (turned := self.book.turn(towards, now)):
            effects += turned
            count -= 1
        started: list[Move] = []
        may_start = min(count, verdict.most_moves - self.book.num_changing(_MOVING))
        while len(started) < may_start:
            move = self.book.start(towards, seen.nodes, verdict.reason, now)
            if move is None:
                break
            started.append(move)
            self._law.moved(now)
            if not self._acts:
                self.book.turn(move.origin, now)
        if self._acts and started:
            effects += self.book.follow(seen.all_nodes, seen.settle_s, now)
        return effects, started

    def _resize(
        self,
        scaling: Scaling,
        verdict: Verdict,
        situation: Situation,
        seen: Observation,
        now: float,
    ) -> tuple[Sequence[PlanEffect], list[Growth], list[Move]]:
        """Let pools of prefill and decode nodes grow, or such a node leave."""
        size, count = verdict.size, situation.num_nodes
        effects, to_add = self._keep(size.to_add, _MOVING, now)
        pressure = f"pressure {verdict.then.worst:.2f} with {count} nodes"
        grown: list[Growth] = []
        move: Move | None = None
        if to_add and self._most_nodes is not None:
            counts = self.book.counts(seen.nodes)
            missing = {
                Role.PREFILL: verdict.wanted_prefill - counts[Role.PREFILL],
                Role.DECODE: size.wanted - verdict.wanted_prefill - counts[Role.DECODE],
            }
            reason = f"{pressure} becomes {verdict.wanted.worst:.2f} with {size.wanted}"
            grown = scaling.grow(missing, to_add, self._most_nodes, reason, now)
        elif size.to_remove and verdict.towards is None:
            left = self._left_without(situation)
            reason = f"{pressure}, {min(left.values(), default=0.0):.2f} with {count - 1}"
            move = self.book.start_removal(seen.nodes, scaling.only(_MOVING), left, reason, now)
        return self._begun(scaling, effects, grown, move, seen, now)

    def _keep(self, count: int, roles: Collection[Role], now: float) -> tuple[Sequence[PlanEffect], int]:
        """Keep nodes that were to leave, as long as more are wanted. Returns how many are then still to be added."""
        effects: list[PlanEffect] = []
        while count and (kept := self.book.keep(roles, now)):
            effects += kept
            count -= 1
        return effects, count

    def _begun(
        self,
        scaling: Scaling,
        effects: Sequence[PlanEffect],
        grown: list[Growth],
        removal: Move | None,
        seen: Observation,
        now: float,
    ) -> tuple[Sequence[PlanEffect], list[Growth], list[Move]]:
        """A planner that advises ends what has begun; one that acts goes on with it."""
        removed = [] if removal is None else [removal]
        if self._acts:
            more = self.book.follow(seen.all_nodes, seen.settle_s, now) if removed else ()
            return [*effects, *more], grown, removed
        for growth in grown:
            scaling.cancel(growth, now)
        for move in removed:
            self.book.turn(move.origin, now)
        return (), grown, removed

    def _left_without(self, situation: Situation) -> dict[Role, float]:
        """The pressure without a node of each role that has more than one."""
        counts, total = {Role.PREFILL: situation.num_prefill, Role.DECODE: situation.num_decode}, situation.num_nodes
        return {
            role: pressure_of(situation, counts[Role.PREFILL] - (role is Role.PREFILL), total - 1, None, 0.0).worst
            for role, count in counts.items()
            if count > 1
        }


def _is_unknown_node(answer: Answer) -> bool:
    return isinstance(answer, ScalerFailed) and answer.fault is ScalerFault.UNKNOWN_NODE
