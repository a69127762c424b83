"""Placement policies: the router's own, and those of papers for comparison.

`global-cache` is Mooncake's (Qin et al., FAST 2025, algorithm 1): if another node has cached much more of a prompt than
the node that would be fastest, its blocks are fetched first. Baton's router does not do that; the simulator shows what
it would gain.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from random import Random

from baton.messages.node import NodeDescription, Role
from router.admission.request import ValidRequest
from router.placement.cost_model import NodeCosts, PlacementQuery, Way, cheapest
from router.placement.decisions import Choice, DecisionLog
from router.placement.encoders import LoadedEncoder
from router.placement.placement import Candidate, Demand, Origin, Placement, choose, demand_of, fitting_nodes
from router.placement.placement import with_room as only_with_room
from router.placement.placer import PlacementSettings, Placer, Policy
from router.placement.reasons import Reason

_AT_RANDOM = Reason("at_random", "at random")
_FETCHED = Reason("with_blocks_from_elsewhere", "with blocks from elsewhere")
_BALANCING = 1.5
"""Blocks are fetched from a node that has cached at least this many times as much of the prompt."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """The first blocks of a prompt, which a node fetches from another one before it computes the rest.

    `source` and `sink` are incarnations.
    """

    source: str
    sink: str
    num_tokens: int


def make_placer(policy: str, settings: PlacementSettings, rng: Random, bytes_per_s: float) -> Placer:
    """Makes the placer of a `Policy`; raises KeyError for other names."""
    from baton.bench.simulator.prompt import SimulatedKeys

    own = {"cost": Policy.COST, "local-cache": Policy.COST, "global-cache": Policy.COST, "load-balanced": Policy.COST}
    own |= {"least-loaded": Policy.LEAST_LOADED, "round-robin": Policy.ROUND_ROBIN, "random": Policy.LEAST_LOADED}
    settings = replace(settings, policy=own[policy])
    # Decisions are never asked for.
    log = DecisionLog(kept=0)
    match policy:
        case "random":
            return RandomPlacer(settings, rng, log)
        case "load-balanced":
            return LoadBalancingPlacer(settings, log, prompt_keys=SimulatedKeys.of)
        case "global-cache":
            return FetchingPlacer(settings, bytes_per_s, log)
        case _:
            return Placer(settings, log, prompt_keys=SimulatedKeys.of)


class RandomPlacer(Placer):
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


class LoadBalancingPlacer(Placer):
    """The router's cost model without knowledge of caches: it chooses the node with the least queued work."""

    def on_attached(self, description: NodeDescription) -> bool:
        super().on_attached(description)
        self._caches.forget(description.incarnation)
        return False

    def _expect(self, request: ValidRequest, placement: Placement) -> Sequence[tuple[str, Sequence[bytes]]]:
        self._prompts.pop(request.request_id, None)
        return ()


class FetchingPlacer(Placer):
    """The router's cost model, in which nodes may fetch blocks that other nodes have cached."""

    def __init__(self, settings: PlacementSettings, bytes_per_s: float, log: DecisionLog) -> None:
        from baton.bench.simulator.prompt import SimulatedKeys

        super().__init__(settings, log, prompt_keys=SimulatedKeys.of)
        self._ms_per_byte = 1e3 / bytes_per_s
        self._fetches: dict[str, Fetch] = {}

    def pop_fetch(self, request_id: str) -> Fetch | None:
        """Removes and returns the fetch that belongs to the last choice for a request, if any."""
        return self._fetches.pop(request_id, None)

    def _cheapest(
        self,
        candidates: Sequence[Candidate],
        request: ValidRequest,
        demand: Demand,
        exclude: Set[str],
        attempt: int,
        waited_s: float,
        now: float,
        with_room: bool,
    ) -> Choice:
        self._fetches.pop(request.request_id, None)
        choice = super()._cheapest(candidates, request, demand, exclude, attempt, waited_s, now, with_room)
        query, way = choice.query, choice.way
        if query is None or way is None or way.prefill is None:
            return choice
        prefills = [cost for cost in query.costs if cost.node.role is Role.PREFILL]
        source = max(prefills, key=lambda cost: query.cached.get(cost.node.incarnation, 0))
        num_elsewhere = min(query.cached.get(source.node.incarnation, 0), demand.num_prompt_tokens - 1)
        ttfts = {cost.node.incarnation: self._ttft_ms(query, cost, num_elsewhere) for cost in prefills}
        best = min(prefills, key=lambda cost: (ttfts[cost.node.incarnation][0], cost.candidate.last_chosen))
        num_fetched = ttfts[best.node.incarnation][1]
        if num_fetched:
            fetch = Fetch(source.node.incarnation, best.node.incarnation, num_elsewhere)
            self._fetches[request.request_id] = fetch
        elif best.node.incarnation == way.prefill.node.incarnation:
            return choice
        taken = self._with_prefill(query, best, num_elsewhere if num_fetched else 0) or way
        assert taken.prefill is not None
        placement = Placement(taken.prefill.node, taken.decode.node, _FETCHED)
        return replace(choice, placement=placement, way=taken)

    def _ttft_ms(self, query: PlacementQuery, cost: NodeCosts, num_elsewhere: int) -> tuple[float, int]:
        """Time to first token on this node, and the number of tokens to fetch for it."""
        tokens = query.demand.num_prompt_tokens
        here = min(query.cached.get(cost.node.incarnation, 0), tokens - 1)
        alone = cost.queue_ms + cost.prefill_ms(tokens - here)
        if num_elsewhere <= here * _BALANCING:
            return alone, 0
        token_bytes = cost.node.block_bytes / cost.node.block_size
        fetch_ms = (num_elsewhere - here) * token_bytes * self._ms_per_byte
        # Requests ahead in the queue are computed while blocks are fetched.
        fetched = max(cost.queue_ms, fetch_ms) + cost.prefill_ms(tokens - num_elsewhere)
        return (fetched, num_elsewhere - here) if fetched < alone else (alone, 0)

    @staticmethod
    def _with_prefill(query: PlacementQuery, prefill: NodeCosts, cached: int) -> Way | None:
        """The cheapest placement with this prefill node, which then has `cached` tokens of the prompt."""
        costs = [cost for cost in query.costs if cost.node.role is Role.DECODE] + [prefill]
        there = {prefill.node.incarnation: max(cached, query.cached.get(prefill.node.incarnation, 0))}
        return cheapest(replace(query, costs=costs, cached={**query.cached, **there}, alone_tokens=0))
