"""Remembers which probes failed: the latest failure of each peer. Pure: a clock goes in."""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import FIFOCache

from baton.clock import Clock
from baton.messages.node_report import FailedProbe, ProbeFault

_MAX_PEERS = 64
_MAX_NAME_CHARS = 128
MAX_DETAIL_CHARS = 1024
"""The text may come from a peer and goes to routers, so its length is bounded."""


@dataclass(frozen=True, slots=True)
class _Failure:
    peer: str
    fault: ProbeFault
    detail: str
    at: float
    count: int


class FailedProbes:
    """The failed probes of one node, by the peer's incarnation; of too many, the oldest is forgotten."""

    def __init__(self, clock: Clock, kept_s: float | None = None) -> None:
        """`kept_s`: a failure that is not repeated for so long is forgotten; None: none is."""
        self._clock = clock
        self._kept_s = kept_s
        self._latest: FIFOCache[str, _Failure] = FIFOCache(_MAX_PEERS)

    def failed(self, incarnation: str, peer: str, fault: ProbeFault, detail: str) -> int:
        """A probe with this incarnation of the node `peer` failed. Returns how many have in a row."""
        peer = peer[:_MAX_NAME_CHARS]
        before = self._latest.pop(incarnation, None)
        count = before.count + 1 if before is not None else 1
        self._forget_older(incarnation, peer)
        self._latest[incarnation] = _Failure(peer, fault, detail[:MAX_DETAIL_CHARS], self._clock.monotonic(), count)
        return count

    def passed(self, incarnation: str, peer: str) -> None:
        """A probe with this incarnation of the node `peer` passed, so earlier failures don't matter any more."""
        self.forget(incarnation)
        self._forget_older(incarnation, peer)

    def forget(self, incarnation: str) -> None:
        """The incarnation is gone, or was never probed."""
        self._latest.pop(incarnation, None)

    def detail(self, incarnation: str) -> str | None:
        """The failure of this incarnation in words; None if there is none."""
        failure = self._latest.get(incarnation)
        return failure.detail if failure is not None else None

    def latest(self) -> list[FailedProbe]:
        """The latest failure of each peer, latest first; ages in seconds."""
        now = self._clock.monotonic()
        failed = [
            FailedProbe(each.peer, each.fault, each.detail, now - each.at, each.count)
            for each in reversed([*self._latest.values()])
        ]
        return [each for each in failed if self._kept_s is None or each.age_s < self._kept_s]

    def _forget_older(self, incarnation: str, peer: str) -> None:
        """Forget earlier incarnations of a node: they are gone."""
        for other in [name for name, each in self._latest.items() if each.peer == peer and name != incarnation]:
            self.forget(other)
