"""Chooses among several routers: at random, to share the load; routers that just failed to answer come last."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

AVOID_S = 3.0
"""Seconds for which a router that did not answer is tried only after the others."""


class EndpointRotation:
    """The addresses of a cluster's routers, and which of them to call next. Does no I/O; time is an argument."""

    def __init__(self, addresses: Sequence[str], rng: Random) -> None:
        if not addresses:
            raise ValueError("a client needs the address of a router")
        self.addresses = tuple(addresses)
        self._rng = rng
        self.has_answered = False
        """Whether any router has answered, so that there is a cluster at these addresses."""
        self._avoided_until = dict.fromkeys(range(len(addresses)), 0.0)

    def __len__(self) -> int:
        return len(self.addresses)

    def pick_first(self, now: float) -> int:
        """The index of the router to which a new request is sent."""
        good = [index for index in range(len(self)) if self._avoided_until[index] <= now]
        return self._rng.choice(good or range(len(self)))

    def pick_next(self, failed: int, now: float) -> int:
        """The index of the router that is tried after router `failed`: the next one that is not avoided at present, or
        the next one if all are."""
        others = [(failed + step) % len(self) for step in range(1, len(self))]
        good = [other for other in others if self._avoided_until[other] <= now]
        return (good or others or [failed])[0]

    def note_failure(self, index: int, now: float) -> None:
        """Note that this router did not answer: it is avoided for AVOID_S seconds."""
        self._avoided_until[index] = now + AVOID_S
