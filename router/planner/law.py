"""The law by which the planner divides nodes among the roles, and how many nodes it wants. Pure.

Feed-forward: the best division is the one whose busier role is least busy, predicted from the load that is expected.
Requests that wait count as arrivals of the role for which they wait. Feedback: while requests miss their targets, the
role that makes them miss counts as a little busier.

A move has its price, so the division changes only if that gains much, if nodes are busy at all, and some time after the
change before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.messages.node import Role
from baton.values import value
from router.planner.capacity import Capacity, Pressure
from router.planner.demand import Attained, OfferedLoad
from router.planner.size import PoolState, Size, SizeLaw, SizeSettings


@dataclass(frozen=True, slots=True)
class LawSettings:
    """When the law acts."""

    least_gain: float = 0.12
    """The share by which a division must lower the pressure."""
    least_pressure: float = 0.35
    """Below it no node moves."""
    dwell_s: float = 10.0
    """No move begins within so many seconds after the one before."""
    rush: float = 1.5
    """Above this pressure two nodes move at a time."""
    goal: float = 0.95
    """The share of requests that are to keep their targets."""
    missing_share: float = 0.05
    """By so much the role counts as busier that makes requests miss the goal."""
    size: SizeSettings = field(default_factory=SizeSettings)


@value(frozen=True, slots=True)
class Situation:
    """What the law decides from."""

    load: OfferedLoad
    """The load that is expected."""
    prefill_backlog_per_s: float
    """Requests a second by which prefill nodes would have to do more, to serve what waits for them."""
    decode_backlog_per_s: float
    capacity: Capacity
    num_prefill: int
    """Nodes of each role, once all moves have ended."""
    num_decode: int
    attained: Attained = Attained()
    pools: PoolState = PoolState.UNSCALED
    num_coming: int = 0
    """Nodes that are to be and don't serve yet."""

    @property
    def num_nodes(self) -> int:
        return self.num_prefill + self.num_decode


@value(frozen=True, slots=True)
class Verdict:
    """What the law wants, and the numbers for which it does."""

    num_prefill: int
    """Prefill nodes of the division of the present nodes that it found best."""
    now: Pressure
    """The pressure with the division as it is."""
    then: Pressure
    """The pressure with the best one."""
    towards: Role | None
    """The role to which nodes are to move; None: no node is."""
    most_moves: int
    """So many nodes may move at a time."""
    reason: str
    """Why, for people."""
    size: Size
    """The nodes that are wanted altogether."""
    wanted_prefill: int
    """Prefill nodes of the best division of these."""
    wanted: Pressure
    """The pressure with that."""


class Law(Protocol):
    """Decides on the division of nodes."""

    def decide(self, situation: Situation, now: float) -> Verdict:
        """Decide; `moved` is called for each move that begins."""
        ...

    def moved(self, now: float) -> None:
        """A node begins to move."""
        ...


def pressure_of(situation: Situation, num_prefill: int, num_nodes: int, missing: Role | None, more: float) -> Pressure:
    """The pressure with this division. `missing`: the role that counts as busier, by the share `more`."""
    load = situation.load
    prompts = replace(load, requests_per_s=load.requests_per_s + situation.prefill_backlog_per_s)
    streams = replace(load, requests_per_s=load.requests_per_s + situation.decode_backlog_per_s)
    found = situation.capacity.pressure(prompts, streams, num_prefill, num_nodes - num_prefill)
    return Pressure(
        found.prefill * (1.0 + more * (missing is Role.PREFILL)), found.decode * (1.0 + more * (missing is Role.DECODE))
    )


class PressureLaw:
    """The router's own law."""

    def __init__(self, settings: LawSettings | None = None) -> None:
        self._settings = settings or LawSettings()
        self._moved_at = -math.inf
        self._size = SizeLaw(self._settings.size)

    def moved(self, now: float) -> None:
        self._moved_at = now

    def decide(self, situation: Situation, now: float) -> Verdict:
        """Decide from a situation with two nodes at least."""
        settings, at = self._settings, situation.num_prefill
        missing = _missing(situation.attained, settings.goal)

        def pressure(num_prefill: int, num_nodes: int) -> Pressure:
            return pressure_of(situation, num_prefill, num_nodes, missing, settings.missing_share)

        def best_of(num_nodes: int) -> tuple[int, Pressure]:
            divisions = {x: pressure(x, num_nodes) for x in range(1, num_nodes)}
            # Of divisions that are as good, the nearest one.
            best = min(divisions, key=lambda x: (divisions[x].worst, abs(x - at)))
            return best, divisions[best]

        found = pressure(at, situation.num_nodes) if 0 < at < situation.num_nodes else Pressure(math.inf, math.inf)
        best, then = best_of(situation.num_nodes)
        reason, acts = self._why(found, then, best - at, now)
        count = situation.num_nodes + situation.num_coming
        idle = situation.capacity.idle_pressure

        def lowerable(num_nodes: int) -> float:
            """The pressure between what no number of nodes lowers (0) and all that nodes sustain (1)."""
            return 0.0 if idle >= 1.0 else max(0.0, best_of(num_nodes)[1].worst - idle) / (1.0 - idle)

        size = self._size.decide(count, lowerable, now, situation.pools)
        wanted_prefill, wanted = best_of(max(2, size.wanted))
        return Verdict(
            num_prefill=best,
            now=found,
            then=then,
            towards=None if not acts else Role.PREFILL if best > at else Role.DECODE,
            most_moves=2 if found.worst > settings.rush else 1,
            reason=reason,
            size=size,
            wanted_prefill=wanted_prefill,
            wanted=wanted,
        )

    def _why(self, found: Pressure, then: Pressure, more_prefill: int, now: float) -> tuple[str, bool]:
        """Why nodes move or stay, and whether they move."""
        settings = self._settings
        if not more_prefill:
            return "the division is the best one", False
        if found.worst <= settings.least_pressure:
            return f"nodes have little to do: pressure {found.worst:.2f}", False
        gain = 1.0 - then.worst / found.worst if found.worst < math.inf else 1.0
        if gain < settings.least_gain:
            return f"another division would gain {gain:.0%} only", False
        if now < self._moved_at + settings.dwell_s:
            return f"a node moved {now - self._moved_at:.0f} s ago", False
        return f"pressure {found.worst:.2f} becomes {then.worst:.2f}", True


def _missing(attained: Attained, goal: float) -> Role | None:
    """The role that makes requests miss their targets; None: the goal is kept."""
    if attained.share >= goal or attained.num_late == attained.num_slow:
        return None
    return Role.PREFILL if attained.num_late > attained.num_slow else Role.DECODE
