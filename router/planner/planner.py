"""The planner: decides which nodes change their roles, from what it is shown of the cluster. Pure.

It decides the same whether it acts or only advises: a planner that advises ends each of its moves as it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.messages.node import Role
from baton.values import value
from router.planner.capacity import Capacity
from router.planner.demand import DemandMeter, Forecast, latest
from router.planner.law import Law, PressureLaw, Situation, Verdict
from router.planner.moves import Move, MoveBook, MoveEffect, MoveState, PlannedNode

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
    """The attached nodes, one of each name."""
    capacity: Capacity | None
    """What nodes sustain; None: there is no node."""
    num_steps: int
    """The steps from which that was learnt."""
    backlog: Backlog
    settle_s: float = 0.0
    """Within so many seconds all routers know that a node is cordoned."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a tick of the planner has decided."""

    effects: Sequence[MoveEffect]
    """To be carried out in order; nothing for a planner that advises."""
    verdict: Verdict | None
    """What the law has decided; None: it was not asked, see `why_not`."""
    started: Sequence[Move]
    situation: Situation | None
    """What it has decided from."""
    why_not: str
    """Why the law was not asked, for people; empty: it was, or its time has not come."""


class Planner:
    """Plans for one cluster. Seconds on the caller's clock."""

    def __init__(self, *, acts: bool, law: Law | None = None, forecast: Forecast = latest) -> None:
        """`acts`: whether the effects are carried out; if not, nothing but the decisions comes of a tick."""
        self.meter = DemandMeter()
        self.book = MoveBook()
        self._acts = acts
        self._law = law or PressureLaw()
        self._forecast = forecast
        self._decides_at = 0.0

    def tick(self, seen: Observation, now: float) -> Plan:
        """Follow the moves, and decide on further ones if it is time."""
        effects = list(self.book.follow(seen.nodes, seen.settle_s, now))
        if now < self._decides_at:
            return Plan(effects, None, (), None, "")
        self._decides_at = now + PERIOD_S
        counts = self.book.counts(seen.nodes)
        if seen.capacity is None or sum(counts.values()) < 2:
            return Plan(effects, None, (), None, "there are fewer than two nodes")
        if seen.num_steps < LEAST_STEPS:
            return Plan(effects, None, (), None, f"nodes have reported {seen.num_steps} of {LEAST_STEPS} steps")
        situation = self._situation(seen, seen.capacity, now)
        verdict = self._law.decide(situation, now)
        started: list[Move] = []
        if verdict.towards is not None:
            more, started = self._move(
                verdict, verdict.towards, abs(verdict.num_prefill - counts[Role.PREFILL]), seen, now
            )
            effects += more
        return Plan(effects if self._acts else (), verdict, started, situation, "")

    def _situation(self, seen: Observation, capacity: Capacity, now: float) -> Situation:
        load, counts, backlog = self._forecast(self.meter, now), self.book.counts(seen.nodes), seen.backlog
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
