"""Remembers which links were refused: the latest refusal of each peer, until a link to that peer opens. Pure: a clock
goes in."""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import FIFOCache

from baton.clock import Clock
from baton.errors import TransferCause
from baton.messages.node_report import RefusedLink

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
