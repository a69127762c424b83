"""The log of placement decisions: their reasons, their outcomes, and what would have been best. Bounded; no I/O.

When its request has ended, a decision is judged by what was known when it was made, at the rates that were learnt
since. For the chosen way, measured times replace the predicted ones. The regret is what it cost more than the way that
looks cheapest now; 0 if that is the chosen way, however wrong its prediction was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cachetools import FIFOCache

from baton.messages.node import Role, StageTimings
from baton.messages.operator import PlacementWay
from baton.observe.metrics import Distribution, Figure, Histogram
from baton.values import value
from router.admission.ledger import Standing
from router.admission.request import ValidRequest
from router.placement.cost_model import PlacementQuery, Way
from router.placement.placement import Origin, Placement
from router.placement.reasons import Reason

_KEPT = 2048
"""Requests whose decisions are kept."""
_REGRET_BUCKETS_S = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""The first bucket has the decisions that were the best."""
_MOST_ATTEMPTS = 16
"""Attempts of one request that are kept."""


@value(frozen=True, slots=True)
class Choice:
    """A placement, and the query and the way from which it was made (policy COST)."""

    placement: Placement
    request: ValidRequest
    attempt: int
    query: PlacementQuery | None = None
    way: Way | None = None
    origin: Origin | None = None
    """Where the stream began that the attempt continues; None: its client has no token yet."""

    @property
    def cached_on(self) -> Mapping[str, int]:
        """How many tokens of the prompt are expected to be cached on its nodes, by incarnation, as far as is known."""
        if self.way is None:
            return {}
        on_decode = {self.placement.decode.incarnation: self.way.terms.decode_cached_tokens}
        return {**on_decode, self.placement.prompt_node.incarnation: self.way.terms.cached_tokens}


@value(frozen=True, slots=True)
class MeasuredTimes:
    """The measured times of a request that ended well."""

    timings: StageTimings
    first_token_ms: float
    """From the request's arrival at the router to its first token."""


@dataclass(slots=True)
class Decision:
    """The placement of one attempt, and why it was chosen."""

    request_id: str
    attempt: int
    at: float
    """Seconds on the router's clock."""
    policy: str
    decision: str
    """pair, decode_only or prefill_only."""
    reason: Reason
    prompt_tokens: int
    prefill: str
    """Names of the nodes."""
    decode: str
    bits: str = ""
    """`NodeDescription.bits` of the nodes."""
    continues_only_at: str = ""
    """The nodes among which the choice was made, since they alone may continue the stream; empty: it had not begun."""
    way: Way | None = None
    """None for policies that predict nothing, and so is `query`."""
    query: PlacementQuery | None = None
    standing: Standing | None = None
    """The tenant's, before it was charged; None: it was no first placement here."""
    measured: MeasuredTimes | None = None
    """None until the request has ended well."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision as it is judged now."""

    decision: Decision
    ways: Sequence[PlacementWay] = ()
    """The costs that were predicted for the decision, the cheapest first: see `alternative_ways`."""
    best: PlacementWay | None = None
    """The cheapest way in hindsight; None until the request has ended well."""
    regret_ms: float = 0.0


def regret_ms(taken: PlacementWay, measured: MeasuredTimes, best: Way) -> float:
    """The regret in milliseconds. `taken`: the cost of the chosen way at the rates that are known now."""
    if (taken.prefill_node, taken.decode_node) == (best.terms.prefill_node, best.terms.decode_node):
        return 0.0
    total_ms = taken.total_ms - taken.first_token_ms + measured.timings.queue_ms + measured.timings.prefill_ms
    return max(0.0, total_ms - best.terms.total_ms)


class DecisionLog:
    """Keeps the latest decisions by request, and totals of all."""

    def __init__(self, kept: int = _KEPT) -> None:
        """`kept`: the number of requests whose decisions are kept; 0: nothing is recorded."""
        self._kept = kept
        self._by_request: FIFOCache[str, list[Decision]] = FIFOCache(kept)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._regrets_s = Histogram(_REGRET_BUCKETS_S)

    def add(self, decision: Decision) -> None:
        """Record a decision, unless none are kept."""
        if not self._kept:
            return
        self._counts[decision.decision, decision.reason.code] += 1
        attempts = self._by_request.get(decision.request_id, [])
        if attempts and attempts[-1].attempt >= decision.attempt:
            attempts.clear()  # another request with the same id
        attempts.append(decision)
        del attempts[:-_MOST_ATTEMPTS]
        self._by_request[decision.request_id] = attempts

    @property
    def is_recording(self) -> bool:
        """Whether decisions are recorded."""
        return self._kept > 0

    def decisions_of(self, request_id: str) -> Sequence[Decision]:
        """The decisions of a request, in order; none if it is unknown or too long ago."""
        return tuple(self._by_request.get(request_id, ()))

    def last(self, request_id: str, attempt: int) -> Decision | None:
        """The decision of this attempt, if it is the request's latest."""
        attempts = self._by_request.get(request_id)
        return attempts[-1] if attempts and attempts[-1].attempt == attempt else None

    def add_regret(self, regret_ms: float) -> None:
        """Count the regret of a decision that was judged."""
        self._regrets_s.observe(regret_ms / 1e3)

    def figures(self) -> Iterable[Figure | Distribution]:
        """The metrics, for the metrics page."""
        name, text = "router_decisions_total", "Placements, by kind and reason."
        for (decision, reason), count in sorted(self._counts.items()):
            yield Figure(name, text, count, {"decision": decision, "reason": reason})
        text = "What a placement cost more than the best one in hindsight, of those that were judged."
        yield self._regrets_s.now("router_placement_regret_seconds", text)


def decision_of(choice: Choice, policy: str, now: float, standing: Standing | None = None) -> Decision:
    placement = choice.placement
    alone = "decode_only" if placement.decode.role is Role.DECODE else "prefill_only"
    return Decision(
        request_id=choice.request.request_id,
        attempt=choice.attempt,
        at=now,
        policy=policy,
        decision="pair" if placement.prefill is not None else alone,
        reason=placement.reason,
        prompt_tokens=choice.request.num_prompt_tokens,
        prefill=placement.prefill.node_id if placement.prefill is not None else "",
        decode=placement.decode.node_id,
        bits=placement.decode.bits,
        continues_only_at=choice.origin.who if choice.origin is not None else "",
        way=choice.way,
        query=choice.query,
        standing=standing,
    )
