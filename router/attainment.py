"""How many requests kept their latency targets, by class: what a client asked for, or else the router's own targets."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterator
from itertools import product

from baton.messages.generation import Finished
from baton.observe.metrics import Figure
from router.admission.service_class import ServiceClass
from router.placement.cost_model import ServiceLevel


class Kept(enum.Enum):
    """Which targets a request kept."""

    GOOD = "good"
    LATE = "late"
    """Its first token came too late."""
    SLOW = "slow"
    """Its tokens came too slowly."""
    LATE_AND_SLOW = "late_and_slow"
    FAILED = "failed"
    """The request had an error that was not its client's."""

    @property
    def is_late(self) -> bool:
        """Whether its first token came too late."""
        return self in (Kept.LATE, Kept.LATE_AND_SLOW, Kept.FAILED)

    @property
    def is_slow(self) -> bool:
        """Whether its tokens came too slowly."""
        return self in (Kept.SLOW, Kept.LATE_AND_SLOW)


def kept_by(level: ServiceLevel, finished: Finished | None) -> Kept | None:
    """Which of its targets a request kept; None: it had none. `finished`: None for one that ended with an error."""
    if level.first_token_ms == math.inf and level.token_ms == math.inf:
        return None
    if finished is None:
        return Kept.FAILED
    num_later, later_ms = finished.completion_tokens - 1, finished.total_ms - finished.ttft_ms
    is_late, is_slow = finished.ttft_ms > level.first_token_ms, later_ms > level.token_ms * max(0, num_later)
    if num_later < 1 or not is_slow:
        return Kept.LATE if is_late else Kept.GOOD
    return Kept.LATE_AND_SLOW if is_late else Kept.SLOW


class Attainment:
    """Counts the requests of a router that have targets."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[ServiceClass, Kept]] = Counter()

    def count(self, service_class: ServiceClass, kept: Kept) -> None:
        """A request of this class has ended."""
        self._counts[service_class, kept] += 1

    def figures(self) -> Iterator[Figure]:
        """The metrics, for the metrics page."""
        text = "Requests with latency targets, by whether they kept these."
        for service_class, kept in product(ServiceClass, Kept):
            labels = {"class": service_class.name.lower(), "result": kept.value}
            yield Figure("slo_requests_total", text, self._counts[service_class, kept], labels)
