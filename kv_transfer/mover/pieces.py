"""Which part of which read is posted next, and what becomes of parts that got stuck.

A read is cut into pieces. Each peer has a window of bytes and of pieces in flight, whichever of its parts they are read
from. Within it the reads of a peer take turns piece by piece, and so do the peers, so that a short read never waits for
the end of a long one.

A read that failed and may still write ends only when its peer is gone. A backend raises PeerGone for a peer as a whole
(no read from it writes any more), but only when something is read from that peer. So the mover probes: now and then it
reads once more a block that a stuck read was to fill, and that is lost anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kv_transfer.backends.base import (
    PeerGone,
    ReadHandle,
    ReadState,
    ReadStuck,
    TransferBackend,
    release_read,
    take_ranges,
)
from kv_transfer.layout import node_of
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
    """The name of the agent from which it is read."""
    ranges: tuple[ReadRange, ...]
    num_blocks: int
    """Number of sub-blocks."""
    num_bytes: int
    """How much of the window it takes: its bytes, or more where sub-blocks of some groups are smaller."""


@dataclass(slots=True)
class _QueuedRead:
    read_id: int
    incarnation: str
    ranges: deque[ReadRange]
    """The sub-blocks that are not posted yet."""
    sub_block_bytes: int
    piece_blocks: int
    """The most sub-blocks of a piece."""


@dataclass(slots=True)
class _PeerWindow:
    queue: deque[_QueuedRead] = field(default_factory=deque)
    posts: int = 0
    """Pieces in flight."""
    num_bytes: int = 0
    """Bytes of the pieces in flight."""


class FairWindow:
    """Queues reads and hands out their pieces. Call `finished` for every piece that `pop_next` returned."""

    def __init__(self, limits: WindowLimits) -> None:
        self._limits = limits
        self._peers: dict[str, _PeerWindow] = {}
        """By incarnation, of which each part has an agent."""
        self._rotation: deque[str] = deque()
        """The peers, the next one first."""

    @property
    def queued_reads(self) -> int:
        """Number of reads of which something is not posted yet."""
        return sum(len(peer.queue) for peer in self._peers.values())

    def submit(self, read_id: int, incarnation: str, ranges: Sequence[ReadRange], plan: PiecePlan) -> None:
        """Queue a read from this agent, by this plan, behind the others of its peer."""
        node = node_of(incarnation)
        peer = self._peers.get(node)
        if peer is None:
            peer = self._peers[node] = _PeerWindow()
            self._rotation.append(node)
        limits, size = self._limits, plan.sub_block_bytes
        most = min(limits.piece_bytes // size, limits.descriptors // plan.max_pieces)
        peer.queue.append(_QueuedRead(read_id, incarnation, deque(ranges), size, max(1, most)))

    def pop_next(self) -> Piece | None:
        """The piece to post next; None when nothing is queued or every window with something queued is full."""
        for _ in range(len(self._rotation)):
            peer = self._peers[self._rotation[0]]
            self._rotation.rotate(-1)
            room = self._room(peer)
            if room < 1:
                continue
            queued = peer.queue.popleft()
            ranges = take_ranges(queued.ranges, min(room, queued.piece_blocks))
            if queued.ranges:
                peer.queue.append(queued)
            num_blocks = sum(r.count for r in ranges)
            num_bytes = num_blocks * queued.sub_block_bytes
            peer.posts += 1
            peer.num_bytes += num_bytes
            return Piece(queued.read_id, queued.incarnation, ranges, num_blocks, num_bytes)
        return None

    def _room(self, peer: _PeerWindow) -> int:
        """How many sub-blocks of the peer's next read may be posted."""
        if not peer.queue or peer.posts >= self._limits.posts_in_flight:
            return 0
        room = (self._limits.bytes_in_flight - peer.num_bytes) // peer.queue[0].sub_block_bytes
        return room if peer.posts else max(1, room)

    def finished(self, piece: Piece) -> None:
        """A piece is over and writes no more: its part of the window is free again."""
        node = node_of(piece.incarnation)
        peer = self._peers[node]
        peer.posts -= 1
        peer.num_bytes -= piece.num_bytes
        self._forget_idle(node)

    def withdraw(self, read_id: int, incarnation: str) -> bool:
        """Drop what is not posted yet of a read; returns whether there was anything."""
        node = node_of(incarnation)
        peer = self._peers.get(node)
        queued = next((q for q in peer.queue if q.read_id == read_id), None) if peer else None
        if peer is None or queued is None:
            return False
        peer.queue.remove(queued)
        self._forget_idle(node)
        return True

    def _forget_idle(self, node: str) -> None:
        peer = self._peers[node]
        if not peer.queue and not peer.posts:
            del self._peers[node]
            self._rotation.remove(node)


PROBE_INTERVAL_S = 1.0
MAX_PROBE_INTERVAL_S = 60.0
"""The interval between probes doubles from the first to the second value."""


@dataclass(frozen=True, slots=True)
class _StuckPiece:
    piece: Piece
    is_probe: bool = False
    """The piece was posted as a probe, and got stuck as well: nobody waits for it."""


class StuckReads:
    """The pieces of one mover whose reads are stuck. Belongs to the thread that owns the backend."""

    def __init__(self, backend: TransferBackend) -> None:
        self._backend = backend
        self._stuck: dict[ReadHandle, _StuckPiece] = {}
        self._probes: dict[str, ReadHandle] = {}
        """Probes in flight, by peer."""
        self._interval_s = PROBE_INTERVAL_S
        self._due = 0.0

    def __len__(self) -> int:
        return len(self._stuck)

    def add(self, handle: ReadHandle, piece: Piece, now: float) -> None:
        """Follow a piece for which `poll` has raised ReadStuck. `now`: seconds on the mover's clock."""
        self._stuck[handle] = _StuckPiece(piece)
        self._interval_s = PROBE_INTERVAL_S
        self._due = now + PROBE_INTERVAL_S

    def pause(self, now: float) -> float | None:
        """Seconds until `pop_ended` is to be called again; None without stuck reads."""
        return max(0.0, self._due - now) if self._stuck else None

    def pop_ended(self, now: float) -> list[tuple[Piece, PeerGone]]:
        """Probe, if it is time, and remove the pieces that don't write any more because their peer is gone."""
        if not self._stuck or now < self._due:
            return []
        self._interval_s = min(2 * self._interval_s, MAX_PROBE_INTERVAL_S)
        self._due = now + self._interval_s
        for piece in {stuck.piece.incarnation: stuck.piece for stuck in self._stuck.values()}.values():
            self._probe(piece)
        ended = []
        for handle, stuck in list(self._stuck.items()):
            error = None if stuck.piece.incarnation in self._probes else self._release(handle)
            if error is not None and not stuck.is_probe:
                ended.append((stuck.piece, error))
        return ended

    def _release(self, handle: ReadHandle) -> PeerGone | None:
        """Release a read if its peer is gone, and return that error; None: it may still write."""
        try:
            self._backend.poll(handle)
        except PeerGone as error:
            release_read(self._backend, handle)
            del self._stuck[handle]
            return error
        except ReadStuck:
            pass
        return None

    def _probe(self, piece: Piece) -> None:
        """Read a block that is lost already, so that the backend finds out whether the peer is gone."""
        handle = self._probes.pop(piece.incarnation, None)
        try:
            handle = handle or self._post(piece)
            if self._backend.poll(handle) is ReadState.IN_PROGRESS:
                self._probes[piece.incarnation] = handle
                return
        except ReadStuck:
            assert handle is not None
            self._stuck[handle] = _StuckPiece(piece, is_probe=True)
            return
        except PeerGone:
            if handle is None:
                return
        release_read(self._backend, handle)

    def _post(self, piece: Piece) -> ReadHandle:
        lost = piece.ranges[0]
        return self._backend.post_read(piece.incarnation, (replace(lost, count=1),))
