"""The planner in virtual time: the router's own, whose moves are carried out on simulated nodes."""

from __future__ import annotations

import math
from typing import Any, Protocol

from baton.bench.simulator.config import Evacuation, PlannerLaw, PlannerMode, SimulationConfig
from baton.bench.simulator.events import Timeline
from baton.bench.simulator.node import SimulatedNode
from baton.bench.simulator.router import SimulatedRouter
from baton.messages.node import Role
from baton.registry import DesiredState
from router.planner.capacity import Pressure
from router.planner.demand import DemandMeter, OfferedLoad
from router.planner.law import PressureLaw, Situation, Verdict
from router.planner.moves import OUT, Cordon, Flip, Uncordon
from router.planner.observation import meter_requests, observe
from router.planner.planner import PlanEffect, Planner
from router.planner.size import Size

_TICK_S = 0.5
_NOBODY: frozenset[str] = frozenset()


class SimulatedFleet(Protocol):
    """The nodes that move."""

    nodes: dict[str, SimulatedNode]

    @property
    def is_done(self) -> bool:
        """Whether all requests have ended."""
        ...

    def change_role(self, node: SimulatedNode, role: Role) -> None:
        """The node gives back what it still has, and comes back with another role."""
        ...


class SimulatedPlanner:
    """Ticks a planner, and carries out what it decides."""

    def __init__(
        self, fleet: SimulatedFleet, timeline: Timeline, router: SimulatedRouter, config: SimulationConfig
    ) -> None:
        self.moves: list[dict[str, Any]] = []
        """The decisions, as JSON objects."""
        acts = config.planner is PlannerMode.ON
        if config.planner_law is PlannerLaw.DYNAMO:
            self.planner = Planner(acts=acts, law=DynamoLaw(), forecast=last_interval)
        else:
            self.planner = Planner(acts=acts, law=PressureLaw())
        self._fleet = fleet
        self._timeline = timeline
        self._router = router
        self._moves_streams = config.evacuation is Evacuation.MOVE
        self.cordoned: set[str] = set()
        """Names of the nodes that get no requests."""
        meter_requests(self.planner.meter, router.requests, timeline)
        timeline.call_at(_TICK_S, self._tick)

    def _tick(self) -> None:
        now, view = self._timeline.now, self._router.view
        if self._fleet.is_done:
            return
        self._timeline.call_at(now + _TICK_S, self._tick)
        for name in self.cordoned:
            # A node reports steps, and its last blocks may be read after its last step.
            node = self._fleet.nodes[name]
            if not node.is_gone:
                view.reported(node.incarnation, node.load())
        plan = self.planner.tick(observe(view, self._router.requests, _NOBODY, _NOBODY, 0.0), now)
        for move in plan.started:
            self.moves.append(
                {
                    "at_s": now,
                    "node": move.name,
                    "to": OUT if move.to is None else move.to.value,
                    "reason": move.reason,
                    "num_prefill": None if plan.verdict is None else plan.verdict.num_prefill,
                }
            )
        for effect in plan.effects:
            self._perform(effect)
        if self._moves_streams:
            self._router.move_streams()

    def _perform(self, effect: PlanEffect) -> None:
        match effect:
            case Cordon(name):
                self._cordon(name)
            case Uncordon(name):
                self.cordoned.discard(name)
                self._router.view.desired(DesiredState(cordoned=frozenset(self.cordoned)))
            case Flip(name, incarnation, role):
                node = self._fleet.nodes[name]
                if node.incarnation == incarnation and not node.is_gone:
                    self._fleet.change_role(node, role)

    def _cordon(self, name: str) -> None:
        self.cordoned.add(name)
        self._router.view.desired(DesiredState(cordoned=frozenset(self.cordoned)))


# For comparison: the throughput-based planner of NVIDIA Dynamo. Once an interval it computes the replicas of each role
# from the means of the interval before, and changes all of them at once. What a node sustains is what a single one does
# at the target of the time per token: arrivals are even, and no block is reserved while a prompt is computed elsewhere.

_INTERVAL_S = 180.0
_BUSY = 0.9
_KV_USED = 0.92


def last_interval(meter: DemandMeter, now: float) -> OfferedLoad:
    """The load of the last interval."""
    return meter.load(_INTERVAL_S, now)


class DynamoLaw:
    """Divides the nodes once in an interval, whatever it gains."""

    def __init__(self) -> None:
        self._decides_at = _INTERVAL_S

    def moved(self, now: float) -> None:
        pass

    def decide(self, situation: Situation, now: float) -> Verdict:
        load, count, at = situation.load, situation.num_nodes, situation.num_prefill
        num_prefill = max(1, math.ceil(_busy_prefills(situation) / _BUSY))
        num_decode = next((n for n in range(1, count) if _decode_pressure(situation, n) <= 1.0), count)
        if num_prefill + num_decode > count:
            num_prefill = round(num_prefill * count / (num_prefill + num_decode))
        else:
            num_prefill += (count - num_prefill - num_decode) // 2  # what is left over is shared
        best = min(count - 1, max(1, num_prefill))
        acts = now >= self._decides_at and load.requests_per_s > 0 and best != at
        if now >= self._decides_at:
            self._decides_at += _INTERVAL_S

        def pressure(num_prefill: int) -> Pressure:
            num_decode = max(1, count - num_prefill)
            return Pressure(_busy_prefills(situation) / max(1, num_prefill), _decode_pressure(situation, num_decode))

        return Verdict(
            num_prefill=best,
            now=pressure(at),
            then=pressure(best),
            towards=None if not acts else Role.PREFILL if best > at else Role.DECODE,
            most_moves=count,
            reason="its interval is over",
            size=Size(count),
            wanted_prefill=best,
            wanted=pressure(best),
        )


def _busy_prefills(situation: Situation) -> float:
    """The prefill nodes that the load keeps busy."""
    load, node = situation.load, situation.capacity.prefill
    return load.requests_per_s * node.prompt_s(load.uncached_tokens)


def _decode_pressure(situation: Situation, num_nodes: int) -> float:
    """The KV or the time per token, whichever is closer to its limit on each of so many nodes."""
    load, node = situation.load, situation.capacity.decode
    streams, step_ms = node.streams(load, num_nodes)
    context = load.prompt_tokens + load.output_tokens / 2
    return max(streams * context / (_KV_USED * node.kv_tokens), step_ms / situation.capacity.token_ms)
