"""Which of several routers is asked: whoever, so that they share the load, but nobody that was just found dead."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

DOUBT_S = 3.0
"""How long a router that did not answer is asked last."""


class Rota:
    """The addresses of one cluster's routers. Pure: time is an argument."""

    def __init__(self, addresses: Sequence[str], rng: Random) -> None:
        if not addresses:
            raise ValueError("a client needs the address of a router")
        self.addresses = tuple(addresses)
        self._rng = rng
        self.has_answered = False
        """Somebody has: there is a cluster at these addresses."""
        self._doubted_until = dict.fromkeys(range(len(addresses)), 0.0)

    def __len__(self) -> int:
        return len(self.addresses)

    def first(self, now: float) -> int:
        """The place at which a new request begins."""
        good = [place for place in range(len(self)) if self._doubted_until[place] <= now]
        return self._rng.choice(good or range(len(self)))

    def after(self, place: int, now: float) -> int:
        """Where a request goes that failed there: the next one that nobody doubts, else the next one."""
        others = [(place + step) % len(self) for step in range(1, len(self))]
        good = [other for other in others if self._doubted_until[other] <= now]
        return (good or others or [place])[0]

    def doubt(self, place: int, now: float) -> None:
        """It did not answer."""
        self._doubted_until[place] = now + DOUBT_S
