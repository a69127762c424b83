"""Placement policies: the router's own, and those of papers for comparison.

`cost` and `global-cache` are the router's own: a node pulls what another one has cached of a prompt where that is
quicker than to compute it, as in Mooncake (Qin et al., FAST 2025, algorithm 1). `local-cache` is that without pulls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from random import Random

from baton.messages.node import NodeDescription, Role
from router.admission.request import ValidRequest
from router.placement.cache_view import PromptKeys, prompt_keys_of
from router.placement.decisions import Choice, DecisionLog
from router.placement.encoders import LoadedEncoder
from router.placement.placement import (
    Candidate,
    Origin,
    Placement,
    choose,
    demand_of,
    fitting_nodes,
)
from router.placement.placement import with_room as only_with_room
from router.placement.placer import PlacementSettings, Placer, Policy
from router.placement.reasons import Reason

_AT_RANDOM = Reason("at_random", "at random")


@dataclass(frozen=True, slots=True)
class Fetch:
    """The first blocks of a prompt, which a node fetches from another one before it computes the rest.

    `source` and `sink` are incarnations.
    """

    source: str
    sink: str
    num_tokens: int


def make_placer(policy: str, settings: PlacementSettings, rng: Random) -> SimulatedPlacer:
    """Makes the placer of a `Policy`; raises KeyError for other names."""
    from baton.bench.simulator.prompt import SimulatedKeys

    own = {"cost": Policy.COST, "local-cache": Policy.COST, "global-cache": Policy.COST, "load-balanced": Policy.COST}
    own |= {"least-loaded": Policy.LEAST_LOADED, "round-robin": Policy.ROUND_ROBIN, "random": Policy.LEAST_LOADED}
    settings = replace(settings, policy=own[policy], pulls="off" if policy == "local-cache" else settings.pulls)
    # Decisions are never asked for.
    log = DecisionLog(kept=0)
    match policy:
        case "random":
            return RandomPlacer(settings, rng, log)
        case "load-balanced":
            return LoadBalancingPlacer(settings, log, prompt_keys=SimulatedKeys.of)
        case _:
            return SimulatedPlacer(settings, log, prompt_keys=SimulatedKeys.of)


class SimulatedPlacer(Placer):
    """A placer whose requests may bring blocks from another node."""

    def __init__(
        self,
        settings: PlacementSettings,
        log: DecisionLog,
        prompt_keys: Callable[[ValidRequest], PromptKeys] = prompt_keys_of,
    ) -> None:
        super().__init__(settings, log, prompt_keys)
        self._fetches: dict[str, Fetch] = {}

    def pop_fetch(self, request_id: str) -> Fetch | None:
        """Removes and returns the fetch that belongs to the last choice for a request, if any."""
        return self._fetches.pop(request_id, None)


class RandomPlacer(SimulatedPlacer):
    """A random prefill node and the least loaded decode node; if one node does both, a random node."""

    def __init__(self, settings: PlacementSettings, rng: Random, log: DecisionLog) -> None:
        super().__init__(settings, log)
        self._rng = rng

    def choose(
        self,
        candidates: Sequence[Candidate],
        request: ValidRequest,
        exclude: Set[str],
        attempt: int,
        waited_s: float,
        now: float,
        *,
        with_room: bool = False,
        origin: Origin | None = None,
        encoders: Sequence[LoadedEncoder] = (),
    ) -> Choice:
        demand = demand_of(request, origin)
        able = fitting_nodes(only_with_room(candidates) if with_room else candidates, demand, exclude)
        prefills = [candidate for candidate in able if candidate.node.role is Role.PREFILL]
        decodes = [candidate for candidate in able if candidate.node.role is Role.DECODE]
        if prefills and decodes:
            placement = choose([self._rng.choice(prefills), *decodes], demand, exclude)
        else:
            placement = Placement(None, self._rng.choice(able).node, _AT_RANDOM)
        return Choice(placement, request, attempt)


class LoadBalancingPlacer(SimulatedPlacer):
    """The router's cost model without knowledge of caches: it chooses the node with the least queued work."""

    def on_attached(self, description: NodeDescription) -> bool:
        super().on_attached(description)
        self._caches.forget(description.incarnation)
        return False

    def _expect(self, request: ValidRequest, placement: Placement) -> Sequence[tuple[str, Sequence[bytes]]]:
        self._prompts.pop(request.request_id, None)
        return ()
