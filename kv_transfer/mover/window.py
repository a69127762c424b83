"""What is posted next: a window per peer, and turns within it.

A read is cut into pieces. Each peer has a window of bytes and of posts in flight; within it the reads of a peer take
turns piece by piece, and so do the peers, so that a short transfer never waits for the end of a long one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.backends.base import ReadRange, cut_ranges


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """Bounds on what is posted and not finished. A piece always holds one block at least, however long."""

    bytes_in_flight: int = 32 << 20
    """Per peer."""
    posts_in_flight: int = 8
    """Per peer."""
    piece_bytes: int = 16 << 20
    """Longest piece: a short read waits for one of them. Over shared memory a piece costs 0.2 ms beside its copy, which
    is a sixth of the bandwidth at 4 MiB and a fourteenth at 16."""

    def __post_init__(self) -> None:
        if min(self.bytes_in_flight, self.posts_in_flight, self.piece_bytes) < 1:
            raise ValueError(f"a window must let something through: {self}")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a read that is posted at once."""

    read_id: int
    incarnation: str
    ranges: tuple[ReadRange, ...]
    num_blocks: int


@dataclass(slots=True)
class _Queued:
    read_id: int
    ranges: deque[ReadRange]


@dataclass(slots=True)
class _PeerWindow:
    queue: deque[_Queued] = field(default_factory=deque)
    posts: int = 0
    num_blocks: int = 0


class FairWindow:
    """Holds reads until their turn. Every piece that was taken must come back by `finished`."""

    def __init__(self, limits: WindowLimits, block_bytes: int) -> None:
        self._max_posts = limits.posts_in_flight
        self._max_blocks = max(1, limits.bytes_in_flight // block_bytes)
        self._piece_blocks = max(1, limits.piece_bytes // block_bytes)
        self._peers: dict[str, _PeerWindow] = {}
        self._turns: deque[str] = deque()

    @property
    def queued_reads(self) -> int:
        """Reads of which something is not taken yet."""
        return sum(len(peer.queue) for peer in self._peers.values())

    def submit(self, read_id: int, incarnation: str, ranges: Sequence[ReadRange]) -> None:
        """Queue a read behind the others of its peer."""
        peer = self._peers.get(incarnation)
        if peer is None:
            peer = self._peers[incarnation] = _PeerWindow()
            self._turns.append(incarnation)
        peer.queue.append(_Queued(read_id, deque(ranges)))

    def take(self) -> Piece | None:
        """The piece whose turn it is, or None when nothing is queued or every window is full."""
        for _ in range(len(self._turns)):
            incarnation = self._turns[0]
            self._turns.rotate(-1)
            peer = self._peers[incarnation]
            room = self._room(peer)
            if not peer.queue or room < 1:
                continue
            queued = peer.queue.popleft()
            ranges = cut_ranges(queued.ranges, min(room, self._piece_blocks))
            if queued.ranges:
                peer.queue.append(queued)
            piece = Piece(queued.read_id, incarnation, ranges, sum(r.count for r in ranges))
            peer.posts += 1
            peer.num_blocks += piece.num_blocks
            return piece
        return None

    def _room(self, peer: _PeerWindow) -> int:
        return self._max_blocks - peer.num_blocks if peer.posts < self._max_posts else 0

    def finished(self, piece: Piece) -> None:
        """The piece no longer writes; its part of the window is free again."""
        peer = self._peers[piece.incarnation]
        peer.posts -= 1
        peer.num_blocks -= piece.num_blocks
        self._forget_idle(piece.incarnation)

    def withdraw(self, read_id: int, incarnation: str) -> bool:
        """Take back what was not taken of a read; says whether there was anything."""
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
            self._turns.remove(incarnation)
