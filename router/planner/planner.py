"""The planner: decides which nodes change their roles and how many there are, by what it is shown of a cluster. Pure.

It decides the same whether it acts or only advises: a planner that advises ends each of its moves as it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.messages.node import Role
from baton.values import value
from router.planner.capacity import Capacity
from router.planner.demand import DemandMeter, Forecast, latest
from router.planner.encoders import EncoderDemand, EncoderMeter
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
    encoder_inputs: Sequence[int] = ()
    """The inputs that each encode node that takes work has."""


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
        self, *, acts: bool, law: Law | None = None, forecast: Forecast = latest, most_nodes: int | None = None
    ) -> None:
        """`acts`: whether the effects are carried out; if not, nothing but the decisions comes of a tick.

        `most_nodes`: None: nobody can be told to change the number of nodes.
        """
        self.meter = DemandMeter()
        self.book = MoveBook()
        self.scaling = None if most_nodes is None else Scaling(most_nodes)
        self._most_nodes = most_nodes
        self.encoders = EncoderDemand()
        """How busy encode nodes are; their number is told to operators, and not changed."""
        self._encoder_meter = EncoderMeter()
        self._attached: frozenset[str] = frozenset()
        """The names of all nodes, when they were seen last."""
        self._acts = acts
        self._law = law or PressureLaw()
        self._forecast = forecast
        self._decides_at = 0.0

    def tick(self, seen: Observation, now: float) -> Plan:
        """Follow the moves, and decide on further ones if it is time."""
        self._attached = frozenset(node.name for node in seen.nodes)
        self.encoders = self._encoder_meter.sample(seen.encoder_inputs, now)
        effects: list[PlanEffect] = [*self.book.follow(seen.nodes, seen.settle_s, now)]
        if self.scaling is not None:
            effects += self.scaling.follow(now)
        if now < self._decides_at:
            return Plan(effects, None, (), (), None, "")
        self._decides_at = now + PERIOD_S
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
            to_add = verdict.size.to_add
            while to_add and (kept := self.book.keep(now)):
                effects += kept
                to_add -= 1
            grown, removed = self._resize(self.scaling, verdict, situation, to_add, seen.nodes, now)
            started += removed
            if self._acts and removed:
                effects += self.book.follow(seen.nodes, seen.settle_s, now)
        return Plan(effects if self._acts else (), verdict, started, grown, situation, "")

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
            self.scaling = Scaling(self._most_nodes)

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
            pools=PoolState.UNSCALED if scaling is None else scaling.state(self.book.num_changing, now),
            num_coming=0 if scaling is None else scaling.num_coming,
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
        may_start = min(count, verdict.most_moves - self.book.num_changing)
        while len(started) < may_start:
            move = self.book.start(towards, seen.nodes, verdict.reason, now)
            if move is None:
                break
            started.append(move)
            self._law.moved(now)
            if not self._acts:
                self.book.turn(move.origin, now)
        if self._acts and started:
            effects += self.book.follow(seen.nodes, seen.settle_s, now)
        return effects, started

    def _resize(
        self,
        scaling: Scaling,
        verdict: Verdict,
        situation: Situation,
        to_add: int,
        nodes: Sequence[PlannedNode],
        now: float,
    ) -> tuple[list[Growth], list[Move]]:
        """Let pools grow, or a node leave."""
        size, count = verdict.size, situation.num_nodes
        pressure = f"pressure {verdict.then.worst:.2f} with {count} nodes"
        grown: list[Growth] = []
        removed: list[Move] = []
        if to_add:
            counts = self.book.counts(nodes)
            missing = {
                Role.PREFILL: verdict.wanted_prefill - counts[Role.PREFILL],
                Role.DECODE: size.wanted - verdict.wanted_prefill - counts[Role.DECODE],
            }
            reason = f"{pressure} becomes {verdict.wanted.worst:.2f} with {size.wanted}"
            grown = scaling.grow(missing, to_add, reason, now)
        elif size.to_remove and verdict.towards is None:
            left = self._left_without(situation)
            reason = f"{pressure}, {min(left.values(), default=0.0):.2f} with {count - 1}"
            move = self.book.start_removal(nodes, scaling.only, left, reason, now)
            removed = [] if move is None else [move]
        if not self._acts:
            for growth in grown:
                scaling.cancel(growth, now)
            for move in removed:
                self.book.turn(move.origin, now)
        return grown, removed

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
