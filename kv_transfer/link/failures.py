"""What a node remembers of peers that it can't exchange blocks with: the latest refusal of each peer's links, until one
opens, and the latest failure of each peer's probes. Counts how probes ended. Pure: a clock goes in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cachetools import FIFOCache

from baton.clock import Clock
from baton.errors import TransferCause
from baton.messages.node_report import FailedProbe, ProbeFault, RefusedLink

_MAX_PEERS = 8
_MAX_DETAIL_CHARS = 1024
"""The text comes from a peer and goes to routers, so its length is bounded."""
_REFUSALS = (TransferCause.LAYOUT_MISMATCH, TransferCause.REFUSED)
"""The causes for which a link does not open though both ends are there, so that the next one will not open either."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    cause: TransferCause
    detail: str
    at: float
    count: int


class RefusedLinks:
    """The refused links of one node, which may be at either end of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest: FIFOCache[str, _Refusal] = FIFOCache(_MAX_PEERS)

    def link_ended(self, peer: str, cause: TransferCause, detail: str) -> None:
        """A link between this node and `peer` ended, or did not open; remembered if it was refused.

        Of too many peers, the one whose refusal is the oldest is forgotten.
        """
        if cause not in _REFUSALS:
            return
        before = self._latest.pop(peer, None)
        count = before.count + 1 if before is not None else 1
        self._latest[peer] = _Refusal(cause, detail[:_MAX_DETAIL_CHARS], self._clock.monotonic(), count)

    def link_opened(self, peer: str) -> None:
        """A link to `peer` is open, so earlier refusals don't matter any more."""
        self._latest.pop(peer, None)

    def latest(self) -> list[RefusedLink]:
        """The latest refusal of each peer, latest first; ages in seconds."""
        now = self._clock.monotonic()
        return [
            RefusedLink(peer, refusal.cause.value, refusal.detail, now - refusal.at, refusal.count)
            for peer, refusal in reversed([*self._latest.items()])
        ]


MAX_SHOWN = 64
"""The number of failed probes that operators are shown."""
_MAX_OUTCOMES = 1024
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
    """The failed probes of one node, by the peer's incarnation."""

    def __init__(self, clock: Clock, kept_s: float | None = None, max_kept: int | None = None) -> None:
        """`kept_s`: a failure that is not repeated for so long is not shown any more; None: each is.

        `max_kept`: of more failures than these, the one that was not repeated for the longest time is forgotten; None:
        the owner forgets the peers that are gone.
        """
        self._clock = clock
        self._kept_s = kept_s
        self._max_kept = max_kept
        self._latest: dict[str, _Failure] = {}
        """The latest failure of each peer, by incarnation, in the order in which they began to fail."""

    def failed(self, incarnation: str, peer: str, fault: ProbeFault, detail: str) -> int:
        """A probe with this incarnation of the node `peer` failed. Returns how many have in a row."""
        peer = peer[:_MAX_NAME_CHARS]
        before = self._latest.get(incarnation)
        count = before.count + 1 if before is not None else 1
        self._forget_older(incarnation, peer)
        self._latest[incarnation] = _Failure(peer, fault, detail[:MAX_DETAIL_CHARS], self._clock.monotonic(), count)
        if self._max_kept is not None and len(self._latest) > self._max_kept:
            self.forget(min(self._latest, key=lambda name: self._latest[name].at))
        return count

    def passed(self, incarnation: str, peer: str) -> None:
        """A probe with this incarnation of the node `peer` passed, so earlier failures don't matter any more."""
        self.forget(incarnation)
        self._forget_older(incarnation, peer[:_MAX_NAME_CHARS])

    def forget(self, incarnation: str) -> None:
        """The incarnation is gone, or was never probed."""
        self._latest.pop(incarnation, None)

    def detail(self, incarnation: str) -> str | None:
        """The failure of this incarnation in words; None if there is none."""
        failure = self._latest.get(incarnation)
        return failure.detail if failure is not None else None

    def shown(self) -> list[FailedProbe]:
        """The latest failure of each peer, of at most MAX_SHOWN; the pair that began to fail first comes first. Ages in
        seconds."""
        now = self._clock.monotonic()
        failed = [
            FailedProbe(probe.peer, probe.fault, probe.detail, now - probe.at, probe.count)
            for probe in self._latest.values()
            if self._kept_s is None or now - probe.at < self._kept_s
        ]
        return failed[:MAX_SHOWN]

    def _forget_older(self, incarnation: str, peer: str) -> None:
        """Forget earlier incarnations of a node: they are gone."""
        for older in [name for name, failure in self._latest.items() if failure.peer == peer and name != incarnation]:
            self.forget(older)


def count_outcome(outcomes: Counter[tuple[str, str]], peer: str, outcome: str) -> None:
    """Count how a probe with a peer ended. Peers name themselves, so of too many names the rest is counted as one."""
    is_known = (peer, outcome) in outcomes or len(outcomes) < _MAX_OUTCOMES
    outcomes[peer if is_known else "others", outcome] += 1
