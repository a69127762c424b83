"""Circuit breakers: a node that failed is passed over for a while, then tried with one request. Pure.

There is a breaker for each node that failed, by its name, so that a node that dies again and again is known, and one
for each pair of a prefill and a decode node between which KV was lost.

    CLOSED      takes requests
    OPEN        failed several times in a row: passed over until its back-off is over
    HALF_OPEN   may take one request, whose end decides

Back-offs double with each failed probe, up to a bound. A breaker is advice: a node that is passed over still gets
requests if no other one is left.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from baton.machine import Machine

FAILURES = 3
"""So many failures in a row open a node's breaker."""
PAIR_FAILURES = 2
"""So many failures in a row open a pair's breaker."""
_FIRST_BACK_OFF_S = 1.0
_LAST_BACK_OFF_S = 60.0
_MOST_BREAKERS = 4096
"""The most breakers that are kept; beyond that the oldest is dropped, since its node may never come back."""
_PROBE_S = 30.0
"""A probe without a result after so long counts no more."""


class BreakerState(enum.Enum):
    """The state of a breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class BreakerStep(enum.Enum):
    """The events of the table."""

    FAILED_OFTEN = enum.auto()
    BACK_OFF_OVER = enum.auto()
    SUCCEEDED = enum.auto()
    FAILED = enum.auto()


_S, _E = BreakerState, BreakerStep
BREAKER_TABLE: Final[dict[tuple[BreakerState, BreakerStep], BreakerState]] = {
    (_S.CLOSED, _E.FAILED): _S.CLOSED,
    (_S.CLOSED, _E.FAILED_OFTEN): _S.OPEN,
    (_S.CLOSED, _E.SUCCEEDED): _S.CLOSED,
    # These requests were sent before it opened.
    (_S.OPEN, _E.FAILED): _S.OPEN,
    (_S.OPEN, _E.SUCCEEDED): _S.OPEN,
    (_S.OPEN, _E.BACK_OFF_OVER): _S.HALF_OPEN,
    (_S.HALF_OPEN, _E.SUCCEEDED): _S.CLOSED,
    (_S.HALF_OPEN, _E.FAILED): _S.OPEN,
}


class Breaker:
    """The breaker of one node or one pair. Seconds on the caller's clock."""

    def __init__(self, name: str, failures: int) -> None:
        self._machine = Machine(f"breaker {name}", BreakerState.CLOSED, BREAKER_TABLE)
        self._limit = failures
        self._in_a_row = 0
        self._back_off_s = _FIRST_BACK_OFF_S
        self._until = 0.0
        self._probe_until = 0.0

    @property
    def is_fresh(self) -> bool:
        """Whether it is closed, with no failure since the last success."""
        return self._machine.state is BreakerState.CLOSED and self._in_a_row == 0

    def state(self, now: float) -> BreakerState:
        """The state at this time."""
        if self._machine.state is BreakerState.OPEN and now >= self._until:
            self._machine.feed(BreakerStep.BACK_OFF_OVER)
        return self._machine.state

    def allows(self, now: float) -> bool:
        """Whether its node or pair may get a request."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and now >= self._probe_until)

    def chosen(self, now: float) -> None:
        """Its node or pair gets a request, which is the probe if it is half open."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._probe_until = now + _PROBE_S

    def succeeded(self, now: float) -> None:
        """A request ended well there."""
        self.state(now)
        if self._machine.feed(BreakerStep.SUCCEEDED) is BreakerState.CLOSED:
            self._in_a_row, self._back_off_s = 0, _FIRST_BACK_OFF_S

    def failed(self, now: float) -> None:
        """A request was lost or refused there."""
        was = self.state(now)
        self._in_a_row += 1
        often = was is BreakerState.CLOSED and self._in_a_row >= self._limit
        if self._machine.feed(BreakerStep.FAILED_OFTEN if often else BreakerStep.FAILED) is was:
            return
        if was is BreakerState.HALF_OPEN:
            self._back_off_s = min(2 * self._back_off_s, _LAST_BACK_OFF_S)
        self._until, self._probe_until = now + self._back_off_s, 0.0


K = TypeVar("K", bound=Hashable)


class Breakers(Generic[K]):
    """The breakers of all nodes, or of all pairs; one that never failed has none."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._breakers: dict[K, Breaker] = {}

    def __len__(self) -> int:
        return len(self._breakers)

    def not_allowed(self, now: float) -> frozenset[K]:
        """The nodes or pairs that are to be passed over."""
        if not self._breakers:
            return frozenset()
        return frozenset(key for key, breaker in self._breakers.items() if not breaker.allows(now))

    def state(self, key: K, now: float) -> BreakerState:
        """The state of one breaker at this time."""
        breaker = self._breakers.get(key)
        return BreakerState.CLOSED if breaker is None else breaker.state(now)

    def chosen(self, key: K, now: float) -> None:
        """The node or pair gets a request."""
        breaker = self._breakers.get(key)
        if breaker is not None:
            breaker.chosen(now)

    def succeeded(self, key: K, now: float) -> None:
        """A request ended well there."""
        breaker = self._breakers.get(key)
        if breaker is not None:
            breaker.succeeded(now)
            if breaker.is_fresh:
                del self._breakers[key]

    def failed(self, key: K, now: float) -> None:
        """A request was lost or refused there."""
        if key not in self._breakers:
            if len(self._breakers) >= _MOST_BREAKERS:
                del self._breakers[next(iter(self._breakers))]
            self._breakers[key] = Breaker(str(key), self._failures)
        self._breakers[key].failed(now)

    def open_ones(self, now: float) -> list[K]:
        """The nodes or pairs whose breakers are not closed."""
        return [key for key, breaker in self._breakers.items() if breaker.state(now) is not BreakerState.CLOSED]

    def num_open(self, now: float) -> int:
        """Number of breakers that are not closed."""
        return len(self.open_ones(now))
