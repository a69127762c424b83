"""Decides whether rows of an input are fetched from a node that has them, or made here. No I/O, no clock.

Both are timed. Rows are fetched as long as that is expected to take less time than the encoder here would take, and
while one of the two times is not known. A fetch that was slow is forgotten after a while, so that it is tried again. A
fetch gets as much time as the encoder would need: so an input whose holder hangs takes at most twice as long as it
would without one.
"""

from __future__ import annotations

UNKNOWN_S = 2.0
"""Seconds for a fetch while it is not known how long the encoder takes."""
SHORTEST_S = 0.1
"""The least seconds for a fetch: connections are opened within them, also on a busy machine."""
AVOID_S = 10.0
"""For so many seconds nothing is fetched from a node that did not give what it should have."""
FORGET_S = 60.0
"""For so many seconds it is known how long fetches take."""
_MOST_AVOIDED = 64
_WEIGHT = 0.3
"""The weight of the last time in the mean of all times."""


class FetchPolicy:
    """What one node has learned of its encoder and of other nodes. Seconds on one clock."""

    def __init__(self) -> None:
        self._encode_s_per_row: float | None = None
        self._fetch_s_per_row: float | None = None
        self._fetched_at = 0.0
        self._avoided_until: dict[str, float] = {}

    def encoded(self, num_rows: int, seconds: float) -> None:
        """The encoder here took so long."""
        self._encode_s_per_row = _mean(self._encode_s_per_row, seconds / num_rows)

    def fetched(self, num_rows: int, seconds: float, now: float) -> None:
        """Rows came from another node in so many seconds."""
        self._fetch_s_per_row = _mean(self._known_fetch(now), seconds / num_rows)
        self._fetched_at = now

    def failed(self, incarnation: str, now: float) -> None:
        """A node did not give rows: it could not be reached, hung, or sent something else."""
        self._avoided_until = {peer: until for peer, until in self._avoided_until.items() if until > now}
        if len(self._avoided_until) < _MOST_AVOIDED:
            self._avoided_until[incarnation] = now + AVOID_S

    def seconds_for(self, incarnation: str, num_rows: int, now: float) -> float | None:
        """Seconds within which so many rows must come from this node; None: they are made here."""
        if self._avoided_until.get(incarnation, now) > now:
            return None
        encode, fetch = self._encode_s_per_row, self._known_fetch(now)
        if encode is None:
            return UNKNOWN_S
        if fetch is not None and fetch >= encode:
            return None
        return max(SHORTEST_S, encode * num_rows)

    def _known_fetch(self, now: float) -> float | None:
        return self._fetch_s_per_row if now < self._fetched_at + FORGET_S else None


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)
