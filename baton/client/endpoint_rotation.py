"""The choice among several routers: at random, to share the load, and those that just failed to answer last."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

DOUBT_S = 3.0
"""Seconds for which a router that did not answer is tried last."""


class EndpointRotation:
    """The addresses of a cluster's routers, and which of them to call next. Does no I/O; time is an argument."""

    def __init__(self, addresses: Sequence[str], rng: Random) -> None:
        if not addresses:
            raise ValueError("a client needs the address of a router")
        self.addresses = tuple(addresses)
        self._rng = rng
        self.has_answered = False
        """Whether any router has answered, so that there is a cluster at these addresses."""
        self._doubted_until = dict.fromkeys(range(len(addresses)), 0.0)

    def __len__(self) -> int:
        return len(self.addresses)

    def first(self, now: float) -> int:
        """The index of the router at which a new request begins."""
        good = [place for place in range(len(self)) if self._doubted_until[place] <= now]
        return self._rng.choice(good or range(len(self)))

    def after(self, place: int, now: float) -> int:
        """The index of the router at which a request that failed at `place` continues: the next one not in doubt, or
        else the next one."""
        others = [(place + step) % len(self) for step in range(1, len(self))]
        good = [other for other in others if self._doubted_until[other] <= now]
        return (good or others or [place])[0]

    def doubt(self, place: int, now: float) -> None:
        """Note that this router did not answer."""
        self._doubted_until[place] = now + DOUBT_S
