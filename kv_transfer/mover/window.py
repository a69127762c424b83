"""Which part of which read is posted next: round robin among peers and their reads, within a window for each peer.

A read is cut into pieces. Each peer has a window of bytes and of pieces in flight. Within it the reads of a peer take
turns piece by piece, and so do the peers, so that a short read never waits for the end of a long one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.backends.base import cut_ranges
from kv_transfer.piece_plan import PiecePlan, ReadRange


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """Bounds on what is posted and not finished. A piece holds at least one sub-block, however large."""

    bytes_in_flight: int = 32 << 20
    """For each peer."""
    posts_in_flight: int = 8
    """Pieces in flight for each peer."""
    piece_bytes: int = 16 << 20
    """The longest piece, which a short read may have to wait for. Over shared memory a piece costs 0.2 ms beside its
    copy, which is a sixth of the bandwidth at 4 MiB and a fourteenth at 16 MiB."""
    descriptors: int = 8192
    """The most descriptors of a piece. A sub-block has many between different block sizes."""

    def __post_init__(self) -> None:
        if min(self.bytes_in_flight, self.posts_in_flight, self.piece_bytes, self.descriptors) < 1:
            raise ValueError(f"each bound of a window must be 1 or more: {self}")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a read that is posted by one call."""

    read_id: int
    incarnation: str
    ranges: tuple[ReadRange, ...]
    num_blocks: int
    """Number of sub-blocks."""


@dataclass(slots=True)
class _QueuedRead:
    read_id: int
    ranges: deque[ReadRange]
    """The sub-blocks that are not posted yet."""


@dataclass(slots=True)
class _PeerWindow:
    max_blocks: int
    """The most sub-blocks in flight."""
    piece_blocks: int
    """The most sub-blocks of a piece."""
    queue: deque[_QueuedRead] = field(default_factory=deque)
    posts: int = 0
    """Pieces in flight."""
    num_blocks: int = 0
    """Sub-blocks of the pieces in flight."""


class FairWindow:
    """Queues reads and hands out their pieces. Call `finished` for every piece that `pop_next` returned."""

    def __init__(self, limits: WindowLimits) -> None:
        self._limits = limits
        self._peers: dict[str, _PeerWindow] = {}
        self._rotation: deque[str] = deque()
        """The peers, the next one first."""

    @property
    def queued_reads(self) -> int:
        """Number of reads of which something is not posted yet."""
        return sum(len(peer.queue) for peer in self._peers.values())

    def submit(self, read_id: int, incarnation: str, ranges: Sequence[ReadRange], plan: PiecePlan) -> None:
        """Queue a read behind the others of its peer, which has this plan."""
        peer = self._peers.get(incarnation)
        if peer is None:
            limits, size = self._limits, plan.sub_block_bytes
            most = min(limits.piece_bytes // size, limits.descriptors // plan.max_pieces)
            peer = self._peers[incarnation] = _PeerWindow(max(1, limits.bytes_in_flight // size), max(1, most))
            self._rotation.append(incarnation)
        peer.queue.append(_QueuedRead(read_id, deque(ranges)))

    def pop_next(self) -> Piece | None:
        """The piece to post next; None when nothing is queued or every window with something queued is full."""
        for _ in range(len(self._rotation)):
            incarnation = self._rotation[0]
            self._rotation.rotate(-1)
            peer = self._peers[incarnation]
            room = self._room(peer)
            if not peer.queue or room < 1:
                continue
            queued = peer.queue.popleft()
            ranges = cut_ranges(queued.ranges, min(room, peer.piece_blocks))
            if queued.ranges:
                peer.queue.append(queued)
            piece = Piece(queued.read_id, incarnation, ranges, sum(r.count for r in ranges))
            peer.posts += 1
            peer.num_blocks += piece.num_blocks
            return piece
        return None

    def _room(self, peer: _PeerWindow) -> int:
        return peer.max_blocks - peer.num_blocks if peer.posts < self._limits.posts_in_flight else 0

    def finished(self, piece: Piece) -> None:
        """A piece is over and writes no more: its part of the window is free again."""
        peer = self._peers[piece.incarnation]
        peer.posts -= 1
        peer.num_blocks -= piece.num_blocks
        self._forget_idle(piece.incarnation)

    def withdraw(self, read_id: int, incarnation: str) -> bool:
        """Drop what is not posted yet of a read; returns whether there was anything."""
        peer = self._peers.get(incarnation)
        queued = next((q for q in peer.queue if q.read_id == read_id), None) if peer else None
        if peer is None or queued is None:
            return False
        peer.queue.remove(queued)
        self._forget_idle(incarnation)
        return True

    def _forget_idle(self, incarnation: str) -> None:
        peer = self._peers[incarnation]
        if not peer.queue and not peer.posts:
            del self._peers[incarnation]
            self._rotation.remove(incarnation)
