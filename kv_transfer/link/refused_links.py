"""Links that were refused: the latest one of each peer, until a link to that peer opens. Pure: a clock in."""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import FIFOCache

from baton.clock import Clock
from baton.errors import TransferCause
from baton.messages.node_report import RefusedLink

_MAX_PEERS = 8
_MAX_STORY_CHARS = 1024
"""Peers write stories, and routers get them."""
_REFUSALS = (TransferCause.LAYOUT_MISMATCH, TransferCause.REFUSED)
"""Why a link does not open though both ends are there. Other ends of links say nothing against the next one."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    cause: TransferCause
    story: str
    at: float
    count: int


class RefusedLinks:
    """Of one node, on either side."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest: FIFOCache[str, _Refusal] = FIFOCache(_MAX_PEERS)

    def ended(self, peer: str, cause: TransferCause, story: str) -> None:
        """A link between this node and `peer` ended; noted if it was refused.

        Of too many peers the one whose refusal is longest past is forgotten.
        """
        if cause not in _REFUSALS:
            return
        before = self._latest.pop(peer, None)
        count = before.count + 1 if before is not None else 1
        self._latest[peer] = _Refusal(cause, story[:_MAX_STORY_CHARS], self._clock.monotonic(), count)

    def opened(self, peer: str) -> None:
        """A link to `peer` is open: what was refused before is settled."""
        self._latest.pop(peer, None)

    def latest(self) -> list[RefusedLink]:
        """Latest first."""
        now = self._clock.monotonic()
        return [
            RefusedLink(peer, refusal.cause.value, refusal.story, now - refusal.at, refusal.count)
            for peer, refusal in reversed([*self._latest.items()])
        ]
