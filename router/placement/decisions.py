"""Decisions that placement took: why, what became of them, and what would have been best. Bounded; no I/O.

Afterwards a decision is judged with what was known when it was taken, at the rates that were learnt since. For the way
that was taken what was measured takes the place of what was predicted. Its regret is what it cost more than the way
that looks cheapest now; none if that is the one that was taken, however wrong its prediction was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cachetools import FIFOCache

from baton.messages.node import StageTimings
from baton.observe.metrics import Distribution, Figure, Histogram
from router.placement.cost_model import Found, Question, Terms

_KEPT = 2048
_REGRET_BUCKETS_S = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""The first has those that were the best."""
_MOST_ATTEMPTS = 16
"""Of one request that are kept."""


@dataclass(frozen=True, slots=True)
class Actual:
    """What became of a request."""

    timings: StageTimings
    first_token_ms: float
    """From its arrival at the router."""


@dataclass(slots=True)
class Decision:
    """One placement of one attempt."""

    request_id: str
    attempt: int
    at: float
    """Seconds on the router's clock."""
    policy: str
    decision: str
    """pair, decode_only or prefill_only."""
    reason: str
    prompt_tokens: int
    prefill: str
    """Names of the nodes."""
    decode: str
    found: Found | None = None
    """None for policies that predict nothing..."""
    question: Question | None = None
    """... and so is this."""
    actual: Actual | None = None
    """None until it has ended well."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision as it looks now."""

    decision: Decision
    ways: Sequence[Terms] = ()
    """As predicted when it was taken, the cheapest first: see `ways_beside`."""
    best: Terms | None = None
    """The cheapest way in hindsight; None until it has ended well."""
    regret_ms: float = 0.0


def regret_ms(taken: Terms, actual: Actual, best: Found) -> float:
    """What was lost. `taken`: its cost at the rates that are known now."""
    if (taken.prefill, taken.decode) == (best.terms.prefill, best.terms.decode):
        return 0.0
    measured = taken.total_ms - taken.first_token_ms + actual.timings.queue_ms + actual.timings.prefill_ms
    return max(0.0, measured - best.terms.total_ms)


class DecisionLog:
    """The latest decisions by request, and totals of all."""

    def __init__(self, kept: int = _KEPT) -> None:
        """`kept`: requests; 0: nobody asks, and nothing is recorded."""
        self._kept = kept
        self._by_request: FIFOCache[str, list[Decision]] = FIFOCache(kept)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._regrets_s = Histogram(_REGRET_BUCKETS_S)

    def record(self, decision: Decision) -> None:
        """One more; nothing where none are kept."""
        if not self._kept:
            return
        self._counts[decision.decision, reason_code(decision.reason)] += 1
        attempts = self._by_request.get(decision.request_id, [])
        if attempts and attempts[-1].attempt >= decision.attempt:
            attempts.clear()  # another request of that name
        attempts.append(decision)
        del attempts[:-_MOST_ATTEMPTS]
        self._by_request[decision.request_id] = attempts

    @property
    def is_kept(self) -> bool:
        """Whether anything is recorded."""
        return self._kept > 0

    def of(self, request_id: str) -> Sequence[Decision]:
        """The decisions of a request, in order; none if it is unknown or long ago."""
        return tuple(self._by_request.get(request_id, ()))

    def last(self, request_id: str, attempt: int) -> Decision | None:
        """The decision of this attempt, if it is the request's latest."""
        attempts = self._by_request.get(request_id)
        return attempts[-1] if attempts and attempts[-1].attempt == attempt else None

    def regretted(self, regret_ms: float) -> None:
        """A decision was judged."""
        self._regrets_s.observe(regret_ms / 1e3)

    def figures(self) -> Iterable[Figure | Distribution]:
        """For the metrics page."""
        name, text = "router_decisions_total", "Placements, by kind and reason."
        for (decision, reason), count in sorted(self._counts.items()):
            yield Figure(name, text, count, {"decision": decision, "reason": reason})
        text = "What a placement cost more than the best one in hindsight, of those that were judged."
        yield self._regrets_s.now("router_placement_regret_seconds", text)


def reason_code(reason: str) -> str:
    """The reason without what differs from request to request."""
    return reason.partition(":")[0].partition("(")[0].strip().replace(" ", "_")
