"""The reads of one transfer agent: posted in pieces, polled, digested, and answered when none of them writes any more.

Belongs to the mover's thread, whose rules are in `mover.py`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from baton.clock import Clock
from baton.errors import TransferCause, TransferFailed
from baton.failpoints import failpoint
from baton.runner.blocks.known_bytes import FillBlock, block_filler
from baton.runner.blocks.sub_blocks import Division
from kv_transfer.backends.base import (
    PeerGone,
    PeerMemory,
    ReadHandle,
    ReadState,
    ReadStuck,
    TransferBackend,
    check_ranges,
    release_read,
)
from kv_transfer.mover.digest_thread import DigestQueue
from kv_transfer.mover.part_mover import (
    BlockFilled,
    Connected,
    ConnectFailed,
    DeliverEvent,
    FillFailed,
    ReadDone,
    ReadFailed,
    ReadFigures,
    ReadStalled,
)
from kv_transfer.mover.pieces import FairWindow, Piece, StuckReads, WindowLimits
from kv_transfer.piece_plan import PiecePlan, ReadRange

STUCK_AFTER_S = 1.0
"""A read in flight that has made no progress for so long is counted as stuck."""
STALL_S = 10.0
"""A read that has made no progress for so long is reported as stalled. The longest piece (`WindowLimits`) takes that
long at 2 MB/s, which is of no use for KV."""
_LONGEST_POLL_GAP_S = 0.5
"""The most that counts of the time between two polls: more means that the thread was delayed or its process stopped."""
READER_PUMP_S = 0.001
"""Pause between two pumps while there are readers and no read of this node is in flight."""
SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 0.001
"""Bounds of the pause between two polls of reads in flight."""
_PAUSE_SHARE = 0.01
"""The pause as a share of the time since the last progress."""

_log = logging.getLogger(__name__)


def pause(quiet_s: float | None, num_readers: int) -> float | None:
    """Seconds that the mover waits for a command before it polls again; None: until a command comes.

    `quiet_s` is the time since a piece of a read was posted or finished; None: no read is in flight. A pause is 1 % of
    it, so that polling delays no completion by more than that share of the time it took (or by the shortest pause).
    """
    if quiet_s is not None:
        return min(max(quiet_s * _PAUSE_SHARE, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
    return READER_PUMP_S if num_readers else None


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


class AgentReads:
    """All that is read through one agent, and the peers from which it is read. Belongs to the thread that made it."""

    def __init__(
        self,
        backend: TransferBackend,
        deliver: DeliverEvent,
        clock: Clock,
        limits: WindowLimits,
        digests: DigestQueue,
        stall_s: float,
        figures: ReadFigures,
        answered: Callable[[int], None],
    ) -> None:
        """`figures` are counted here. `answered` is called with the id of each read before its answer is delivered."""
        self.memory = backend.memory
        self.figures = figures
        self._num_readers = 0
        self.moved = False
        """Something was posted or finished in the last turn, so the next one may find more to do at once."""
        self._backend = backend
        self._deliver = deliver
        self._clock = clock
        self._window = FairWindow(limits)
        self._stuck = StuckReads(backend)
        self._digest_queue = digests
        self._stall_s = stall_s
        self._answered = answered
        self._peers: dict[str, ConnectedPeer] = {}
        self._reads: dict[int, ActiveRead] = {}
        self._in_flight: dict[ReadHandle, Piece] = {}
        self._fill_block: FillBlock | None = None
        self._moved_at = 0.0
        self._counted_at = 0.0
        self._polled_s = 0.0
        """Seconds in which reads in flight were polled, added up."""
        self._polled_at = 0.0

    @property
    def is_in_flight(self) -> bool:
        """Whether a piece is in flight."""
        return bool(self._in_flight)

    @property
    def has_to_move(self) -> bool:
        """Whether a piece is in flight or to be posted."""
        return bool(self._in_flight) or self._window.queued_reads > 0

    def work(self, is_busy: Callable[[], bool]) -> None:
        """Post one piece, poll all pieces, and digest what has arrived; by the helper while `is_busy`."""
        piece = self._window.pop_next()
        if piece is not None:
            self.moved = True
            self._post(piece)
        self._poll()
        self._digest_queue.compute(is_busy)
        if self._stuck:
            self._end_stuck_reads()
        if self._num_readers:
            self._backend.pump()

    def pause(self) -> float | None:
        """Seconds after which `work` is to be called again; None: not before something is told."""
        now = self._clock.monotonic()
        quiet_s = now - self._moved_at if self._in_flight else None
        until_probe_s = self._stuck.pause(now)
        until_poll_s = pause(quiet_s, self._num_readers)
        return until_probe_s if until_poll_s is None else until_poll_s

    def connect(self, peer: PeerMemory) -> None:
        known = self._peers.get(peer.incarnation)
        try:
            if known is None:
                plan = peer.plan_for(self.memory)
                self._backend.connect(peer)
                self._peers[peer.incarnation] = ConnectedPeer(peer, plan, self._polled_s)
            elif known.memory != peer:
                raise TransferFailed(TransferCause.REFUSED, f"{peer.incarnation} changed its memory")
            elif known.is_gone:
                raise PeerGone(str(known.closing))
            else:
                known.closing = None
        except TransferFailed as error:
            self._deliver(ConnectFailed(peer.incarnation, error))
        except Exception as error:
            # Values that a peer published must not end the mover, whatever they do to the backend.
            _log.exception("could not connect to the memory of %s: its hand-offs will fail", peer.incarnation)
            self._deliver(ConnectFailed(peer.incarnation, TransferFailed(TransferCause.REFUSED, repr(error))))
        else:
            self._deliver(Connected(peer.incarnation))

    def read(
        self,
        read_id: int,
        incarnation: str,
        ranges: tuple[ReadRange, ...],
        called_at: float,
        to_digest: Collection[int],
        digest_parts: int,
    ) -> None:
        objection = self._objection(incarnation, ranges)
        if objection is not None:
            self._answer_failed(read_id, objection)
            return
        num_blocks, plan = sum(r.count for r in ranges), self._peers[incarnation].plan
        self._reads[read_id] = ActiveRead(
            read_id,
            incarnation,
            blocks_left=num_blocks,
            num_bytes=plan.num_bytes(ranges),
            called_at=called_at,
            moved_at=called_at,
            to_digest=frozenset(to_digest),
            digest_parts=digest_parts,
            progress_at=self._polled_s,
        )
        self.moved = True
        self._window.submit(read_id, incarnation, ranges, plan)

    def fill(self, fill_id: int, block: int, seed: str, group: int) -> None:
        try:
            if self._fill_block is None:
                self._fill_block = block_filler(self.memory)
            digests = self._fill_block(block, seed, group)
        except Exception as error:
            _log.exception("could not fill block %d with known bytes: a probe fails", block)
            self._deliver(FillFailed(fill_id, repr(error)))
        else:
            self._deliver(BlockFilled(fill_id, digests))

    def abandon(self, read_id: int) -> None:
        read = self._reads.get(read_id)
        if read is not None and self._window.withdraw(read_id, read.incarnation):
            read.failure = read.failure or TransferFailed(TransferCause.CANCELLED, "cancelled by its owner")
            self._answer_if_over(read)

    def disconnect(self, incarnation: str) -> None:
        self._close_peer(incarnation, TransferFailed(TransferCause.CANCELLED, f"{incarnation} was disconnected"))

    def set_num_readers(self, num_readers: int) -> None:
        self._num_readers = num_readers

    def disconnect_all(self, why: TransferFailed) -> None:
        """Drop all peers."""
        for incarnation in list(self._peers):
            self._close_peer(incarnation, why)

    def close(self) -> None:
        """Close the agent, unless reads may still write."""
        if not self._in_flight and not self._stuck:
            self._backend.close()

    def _objection(self, incarnation: str, ranges: tuple[ReadRange, ...]) -> TransferFailed | None:
        peer = self._peers.get(incarnation)
        if peer is None:
            return PeerGone(f"{incarnation} is not connected")
        if peer.closing is not None:
            return peer.closing
        try:
            counts = self.memory.num_all_blocks, peer.memory.num_all_blocks
            check_ranges(ranges, *peer.plan.count_sub_blocks(*counts))
        except TransferFailed as error:
            return error
        return None

    def _close_peer(self, incarnation: str, why: TransferFailed) -> None:
        peer = self._peers.get(incarnation)
        if peer is None:
            return
        if not peer.is_gone:
            peer.closing = why
        for read in [r for r in self._reads.values() if r.incarnation == incarnation]:
            if self._window.withdraw(read.read_id, incarnation):
                read.failure = read.failure or why
                self._answer_if_over(read)
        self._drop_idle(peer)

    def _drop_idle(self, peer: ConnectedPeer) -> None:
        if peer.closing is not None and not peer.pieces:
            del self._peers[peer.memory.incarnation]
            self._backend.disconnect(peer.memory.incarnation)

    def _post(self, piece: Piece) -> None:
        read, peer = self._reads[piece.read_id], self._peers[piece.incarnation]
        before = self._clock.monotonic()
        if not self._in_flight:
            # Nothing was polled until now.
            self._polled_at = before
        try:
            handle = self._backend.post_read(piece.incarnation, piece.ranges)
        except TransferFailed as error:
            self._window.finished(piece)
            self._piece_failed(read, error)
            return
        self._note_progress(read, peer)
        read.post_s += self._moved_at - before
        read.num_descriptors += peer.plan.count_pieces(piece.ranges)
        self.figures.reads_in_flight += not read.pieces
        read.pieces += 1
        peer.pieces += 1
        self._in_flight[handle] = piece
        failpoint("read-posted" if piece.read_id > 0 else "probe-read-posted")

    def _note_progress(self, read: ActiveRead, peer: ConnectedPeer) -> None:
        self._moved_at = read.moved_at = self._clock.monotonic()
        read.progress_at = peer.progress_at = self._polled_s

    def _poll(self) -> None:
        if not self._in_flight:
            return
        now = self._clock.monotonic()
        self._polled_s += min(now - self._polled_at, _LONGEST_POLL_GAP_S)
        self._polled_at = now
        for handle, piece in list(self._in_flight.items()):
            read, peer = self._reads[piece.read_id], self._peers[piece.incarnation]
            try:
                if self._backend.poll(handle) is ReadState.IN_PROGRESS:
                    continue
            except PeerGone as error:
                release_read(self._backend, handle)
                self._piece_ended(self._in_flight.pop(handle), read, peer)
                self._piece_failed(read, error)
            except ReadStuck as error:
                self._stuck.add(handle, self._in_flight.pop(handle), now)
                read.failure = error
                self._report_stalled(read, str(error))
                self._close_peer(piece.incarnation, error)
            else:
                failure = release_read(self._backend, handle)
                self._piece_ended(self._in_flight.pop(handle), read, peer)
                self._note_progress(read, peer)
                if failure is not None:
                    self._piece_failed(read, failure)
                else:
                    read.blocks_left -= piece.num_blocks
                    self.figures.bytes_arrived += peer.plan.num_bytes(piece.ranges)
                    self.figures.arrived_at = now
                    self._queue_digests(read, piece, peer.plan)
                    self._answer_if_over(read)
                self._drop_idle(peer)
        if now - self._counted_at > STUCK_AFTER_S / 10 or not self._in_flight:
            self._count_stuck(now)
            self._report_stalled_reads()

    def _report_stalled_reads(self) -> None:
        for read in list(self._reads.values()):
            peer = self._peers.get(read.incarnation)
            # A queued read waits for those before it, and is not stalled while they make progress.
            is_queued = peer is not None and not read.pieces
            progress_at = max(read.progress_at, peer.progress_at) if peer and is_queued else read.progress_at
            if self._polled_s - progress_at >= self._stall_s:
                self._report_stalled(
                    read, f"nothing arrived for {self._stall_s:g} s, {read.blocks_left} blocks are missing"
                )

    def _report_stalled(self, read: ActiveRead, detail: str) -> None:
        if not read.is_stalled:
            read.is_stalled = True
            self._deliver(ReadStalled(read.read_id, f"{read.incarnation}: {detail}"))

    def _queue_digests(self, read: ActiveRead, piece: Piece, plan: PiecePlan) -> None:
        """Queue what is to be digested of a piece, of the layers that it brought."""
        # How many digests a sub-block that was read has.
        digests_each = read.digest_parts // plan.local_parts
        wanted: defaultdict[int, list[int]] = defaultdict(list)
        for r in piece.ranges:
            span = range(r.local_block * digests_each, (r.local_block + r.count) * digests_each)
            wanted[r.group] += [block for block in span if block in read.to_digest]
        for group, blocks in wanted.items():
            if blocks:
                self._digest_queue.add(read.read_id, blocks, Division(read.digest_parts, group, plan.common_layers))

    def _end_stuck_reads(self) -> None:
        for piece, error in self._stuck.pop_ended(self._clock.monotonic()):
            read, peer = self._reads[piece.read_id], self._peers[piece.incarnation]
            self._piece_ended(piece, read, peer)
            self._piece_failed(read, error)
            self._count_stuck(self._clock.monotonic())

    def _piece_ended(self, piece: Piece, read: ActiveRead, peer: ConnectedPeer) -> None:
        """None of the piece writes any more."""
        self.moved = True
        self._window.finished(piece)
        read.pieces -= 1
        peer.pieces -= 1
        self.figures.reads_in_flight -= not read.pieces

    def _piece_failed(self, read: ActiveRead, error: TransferFailed) -> None:
        """One piece of the read will never come; if its peer is gone, the others won't either."""
        self._window.withdraw(read.read_id, read.incarnation)
        read.failure = read.failure or error
        self._answer_if_over(read)
        if isinstance(error, PeerGone):
            self._close_peer(read.incarnation, error)

    def _answer_if_over(self, read: ActiveRead) -> None:
        """Answer a read if none of its pieces is in flight, and none is to be posted."""
        if read.pieces or (read.failure is None and read.blocks_left):
            return
        del self._reads[read.read_id]
        if read.failure is not None:
            self._answer_failed(read.read_id, read.failure)
            return
        total_s = self._clock.monotonic() - read.called_at
        self._answered(read.read_id)
        self._deliver(ReadDone(read.read_id, read.num_bytes, read.post_s, total_s, read.num_descriptors))

    def _count_stuck(self, now: float) -> None:
        in_flight = [read for read in self._reads.values() if read.pieces]
        self.figures.stuck_reads = sum(
            isinstance(r.failure, ReadStuck) or now - r.moved_at >= STUCK_AFTER_S for r in in_flight
        )
        self._counted_at = now

    def _answer_failed(self, read_id: int, why: TransferFailed) -> None:
        self._answered(read_id)
        self._deliver(ReadFailed(read_id, why.cause, str(why)))
