"""The mover's records: one for each read that is not answered, one for each peer that is connected."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import TransferCause, TransferFailed
from kv_transfer.backends.base import PeerMemory


@dataclass(slots=True)
class ActiveRead:
    read_id: int
    incarnation: str
    blocks_left: int
    num_bytes: int
    called_at: float
    moved_at: float
    to_digest: frozenset[int]
    progress_at: float
    """As `ConnectedPeer.progress_at`."""
    is_stalled: bool = False
    """Its owner was told so."""
    post_s: float = 0.0
    num_ranges: int = 0
    pieces: int = 0
    failure: TransferFailed | None = None


@dataclass(slots=True)
class ConnectedPeer:
    memory: PeerMemory
    progress_at: float
    """When something of it was posted or arrived, in seconds for which the mover has looked at reads (`_looked_s`)."""
    pieces: int = 0
    closing: TransferFailed | None = None
    """Why no read is taken any more; the peer is dropped when its last piece has ended."""

    @property
    def lost(self) -> bool:
        return self.closing is not None and self.closing.cause is TransferCause.PEER_GONE
