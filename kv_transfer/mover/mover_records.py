"""The mover's records: one for each read that is not answered, one for each peer that is connected."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import TransferCause, TransferFailed
from kv_transfer.backends.base import PeerMemory
from kv_transfer.piece_plan import PiecePlan


@dataclass(slots=True)
class ActiveRead:
    """A read that is queued or in flight."""

    read_id: int
    incarnation: str
    blocks_left: int
    """Sub-blocks that have not arrived."""
    num_bytes: int
    called_at: float
    """When `Mover.read` was called, on the mover's clock."""
    moved_at: float
    """When a piece of it was posted or arrived, on the mover's clock."""
    to_digest: frozenset[int]
    """The local sub-blocks whose digests are wanted."""
    digest_parts: int
    """How many of these sub-blocks a local block has."""
    progress_at: float
    """When a piece of it was posted or arrived, in seconds for which the mover has polled reads in flight."""
    is_stalled: bool = False
    """ReadStalled was delivered."""
    post_s: float = 0.0
    num_descriptors: int = 0
    pieces: int = 0
    """Pieces in flight."""
    failure: TransferFailed | None = None


@dataclass(slots=True)
class ConnectedPeer:
    """A peer whose memory is connected."""

    memory: PeerMemory
    plan: PiecePlan
    progress_at: float
    """When a piece of any of its reads was posted or arrived; the same time as `ActiveRead.progress_at`."""
    pieces: int = 0
    """Pieces in flight."""
    closing: TransferFailed | None = None
    """Why no further read is accepted; None: reads are. The peer is dropped when its last piece has ended."""

    @property
    def is_gone(self) -> bool:
        return self.closing is not None and self.closing.cause is TransferCause.PEER_GONE
