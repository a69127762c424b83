"""The thread that owns a node's transfer agent: it posts reads, polls and pumps. No other thread touches the agent.

The rules it keeps:

1. Every read is answered once, by ReadDone or ReadFailed, and the answer means that none of it writes any more. A peer
   that neither answers nor dies (SIGSTOP) leaves its reads in flight: they stay polled and counted, and their blocks
   stay with their owner, which quarantines them. The same holds for a read that failed and may still write, until its
   peer is gone. Such a read is reported once by ReadStalled: when no piece of it has arrived for `stall_s`, or, while
   it is queued behind others of its peer, no piece of any of them. Only time in which this thread polled counts.
2. A handle is released only when its read is over; a peer is dropped only when its reads are.
3. No CPU time without work: the thread sleeps on its inbox when no read is in flight and no lease is open. It pumps
   every millisecond while a lease is open (peers' reads need it). While a read is in flight it polls, with pauses that
   grow the longer nothing has arrived. It never spins: NIXL polls with the interpreter's lock held, and a thread that
   only polls would make the one that computes wait 5 ms for every single operation.
4. A fault of the thread, or of the one that computes digests, ends the process (`baton/background.py`), because nothing
   would be read any more and nobody would be told. A call into the agent that does not return does so, too
   (`watch_turns`). A fault that concerns one read alone is that read's failure.
5. Digests of what was read are computed here, while the bytes are in the processor's cache, and after ReadDone was
   delivered: that wakes no further thread. While there is something to move, a helper thread computes them instead, so
   that no byte waits for a digest.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from baton.background import current_watch
from baton.clock import Clock
from baton.errors import EngineFault, TransferCause, TransferFailed
from baton.failpoints import failpoint
from baton.runner.blocks.block_digests import BlockDigests
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
    FillFailed,
    MoverEvent,
    ReadDone,
    ReadFailed,
    ReadStalled,
)
from kv_transfer.mover.pieces import FairWindow, Piece, StuckReads, WindowLimits
from kv_transfer.piece_plan import PiecePlan, ReadRange

READER_PUMP_S = 0.001
"""Pause between two pumps while there are readers and no read of this node is in flight."""
SHORTEST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 0.001
"""Bounds of the pause between two polls of reads in flight."""
_PAUSE_SHARE = 0.01
"""The pause as a share of the time since the last progress."""


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


STUCK_AFTER_S = 1.0
"""A read in flight that has made no progress for so long is counted as stuck."""
STALL_S = 10.0
"""A read that has made no progress for so long is reported as stalled. The longest piece (`WindowLimits`) takes that
long at 2 MB/s, which is of no use for KV."""
_LONGEST_POLL_GAP_S = 0.5
"""The most that counts of the time between two polls: more means that the thread was delayed or its process stopped."""
STOP_WITHIN_S = 2.0
"""How long `stop` waits for reads in flight."""
_END_WITHIN_S = 10.0
"""How long the thread may then take to end; it takes longer only in a call into the agent that does not return."""
HANG_CHECK_INTERVAL_S = 1.0
MAX_HANG_CHECKS = 60
"""A thread that so many checks in a row found in the same turn hangs. Checks and not seconds are counted, because the
process may be stopped."""

_NOT_RUNNING = TransferFailed(TransferCause.CANCELLED, "the mover is not running")

_log = logging.getLogger(__name__)


class Mover:
    """Reads blocks of peers in one thread. Methods may be called from any thread, return at once, and answer by
    `deliver`.

    `backend_factory` and `deliver` are called in the mover's thread; `deliver` must return at once. An exception that
    it raises is a fault of the mover, since somebody waits for the event that was lost. Events about digests may be
    delivered from another thread.
    """

    def __init__(
        self,
        backend_factory: Callable[[], TransferBackend],
        deliver: Callable[[MoverEvent], None],
        clock: Clock,
        window: WindowLimits | None = None,
        digests: BlockDigests | None = None,
        helper: Executor | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        """`digests` computes digests of this node's blocks; None: there are none. `helper` runs it while the mover
        has something to move; default: a thread of its own. `stall_s`: how long a read may make no progress before
        it is reported as stalled.
        """
        self.agent_metadata = b""
        self.probe_blocks: Sequence[int] = ()
        """The ids of this node's probe blocks, once the agent is up."""
        self.bytes_arrived = 0
        """Bytes that all reads have brought."""
        self.arrived_at: float | None = None
        """When the last of them arrived, on the mover's clock; None before."""
        self.reads_in_flight = 0
        """Number of reads that may still write to their local blocks; those that are only queued are not counted."""
        self.stuck_reads = 0
        """Number of those that have made no progress for STUCK_AFTER_S, or that failed and may still write."""
        self.fault: BaseException | None = None
        """The exception that ended the thread, if it ended by itself; reads in flight then stay counted."""
        self._watch = current_watch.get()
        """The fault is reported to the watch of whoever made the mover."""
        self._backend_factory = backend_factory
        self._deliver = deliver
        self._clock = clock
        self._limits = window or WindowLimits()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="baton-mover", daemon=True)
        self._up = threading.Event()
        self._start_error: Exception | None = None
        self._gate = threading.Lock()
        self._accepting = False
        self._read_ids: set[int] = set()
        self._backend: TransferBackend
        self._window: FairWindow
        self._stuck: StuckReads
        self._peers: dict[str, ConnectedPeer] = {}
        self._reads: dict[int, ActiveRead] = {}
        self._in_flight: dict[ReadHandle, Piece] = {}
        self._num_readers = 0
        self._fill_block: FillBlock | None = None
        self._digest_queue = DigestQueue(digests, deliver, self._watch, helper)
        self._num_turns = 0
        self._in_turn = False
        """Whether the thread works on commands or reads, and does not wait for a command."""
        self._moved = False
        """Something was posted or finished in the last turn, so the next one may find more to do at once."""
        self._moved_at = 0.0
        self._counted_at = 0.0
        self._stall_s = stall_s
        self._polled_s = 0.0
        """Seconds in which reads in flight were polled, added up."""
        self._polled_at = 0.0
        self._stop_by: float | None = None

    # Called from any thread.

    def start(self) -> None:
        """Make the agent and return when it is up; raises what making it raised."""
        self._thread.start()
        self._up.wait()
        if self._start_error is not None:
            raise self._start_error

    def published(self, name: str) -> PeerMemory:
        """This node's memory as it is published to readers, once the agent, which has that name, is up."""
        return PeerMemory.of(self._backend.memory, name, self.agent_metadata)

    def connect(self, peer: PeerMemory) -> None:
        """Make a peer's blocks readable; answered by Connected or ConnectFailed. Connecting again with equal values
        changes nothing.
        """
        if not self._enqueue(functools.partial(self._connect, peer)):
            self._deliver(ConnectFailed(peer.incarnation, _NOT_RUNNING))

    def read(
        self,
        read_id: int,
        incarnation: str,
        ranges: Sequence[ReadRange],
        to_digest: Collection[int] = (),
        digest_parts: int = 1,
    ) -> None:
        """Read sub-blocks of a peer; answered by one ReadDone or ReadFailed once none of it writes any more.

        Beside ReadDone, each of the local sub-blocks in `to_digest` is in one BlocksDigested, or DigestsFailed comes.
        `digest_parts`: how many of those sub-blocks, which may be smaller than those that are read, a local block has.
        Raises ValueError for a read id that is in use. Negative ids are those of probes.
        """
        with self._gate:
            if read_id in self._read_ids:
                raise ValueError(f"read {read_id} is in flight")
            self._read_ids.add(read_id)
        called_at = self._clock.monotonic()
        command = functools.partial(self._read, read_id, incarnation, tuple(ranges), called_at, to_digest, digest_parts)
        if not self._enqueue(command):
            self._answer_failed(read_id, _NOT_RUNNING)

    def fill(self, fill_id: int, block: int, seed: str, group: int = 0) -> None:
        """Fill one of this node's blocks with the bytes that belong to a seed, before any read that is ordered later
        is posted; answered by BlockFilled, with digests as of a block of this group of layers, or by FillFailed."""
        if not self._enqueue(functools.partial(self._fill, fill_id, block, seed, group)):
            self._deliver(FillFailed(fill_id, str(_NOT_RUNNING)))

    def cancel(self, read_id: int) -> None:
        """Post no more of a read; it is answered when what is in flight has ended. An unknown read changes nothing."""
        self._enqueue(functools.partial(self._cancel, read_id))

    def disconnect(self, incarnation: str) -> None:
        """Drop a peer. Its reads fail with CANCELLED when what is in flight has ended. Unknown peers are fine."""
        self._enqueue(functools.partial(self._disconnect, incarnation))

    def set_num_readers(self, num_readers: int) -> None:
        """Set the number of leases and probes that peers may be reading, on a sender. Their reads make progress while
        there is one."""
        self._enqueue(functools.partial(self._set_num_readers, num_readers))

    def stop(self) -> None:
        """Cancel what is queued, wait up to STOP_WITHIN_S for reads in flight, and end the thread.

        Reads that are still in flight then get no answer and stay counted; the agent and the memory live until the
        process ends. Calls after this one are answered at once, from the calling thread.
        """
        with self._gate:
            if not self._accepting:
                return
            self._accepting = False
            self._inbox.put(self._begin_stop)
        self._thread.join(STOP_WITHIN_S + _END_WITHIN_S)
        if self._thread.is_alive():
            _log.error("the mover's thread did not end: a call into the transfer agent does not return")
        self._digest_queue.close(wait=not self._thread.is_alive())

    @property
    def turns(self) -> tuple[int, bool]:
        """How many turns the thread has made, and commands it has run in them, and whether it is in a turn."""
        return self._num_turns, self._in_turn

    async def watch_turns(self) -> None:
        """Check, on an event loop until cancelled, that the thread goes on; raises EngineFault when it hangs."""
        last_turn, num_unchanged = 0, 0
        while num_unchanged < MAX_HANG_CHECKS:
            await asyncio.sleep(HANG_CHECK_INTERVAL_S)
            num_unchanged = num_unchanged + 1 if self._in_turn and self._num_turns == last_turn else 0
            last_turn = self._num_turns
        raise EngineFault("a call into the transfer agent does not return")

    def _enqueue(self, command: Callable[[], None]) -> bool:
        with self._gate:
            if self._accepting:
                self._inbox.put(command)
            return self._accepting

    # Everything below runs in the mover's thread.

    def _run(self) -> None:
        try:
            self._make_agent()
        except Exception as error:
            self._start_error = error
            return
        finally:
            self._up.set()
        try:
            while self._turn():
                pass
        except BaseException as error:
            self.fault = error
            self._watch.failed("mover", error)
        self._shut_down()

    def _make_agent(self) -> None:
        self._backend = self._backend_factory()
        self.agent_metadata = self._backend.agent_metadata()
        memory = self._backend.memory
        self.probe_blocks = range(memory.num_blocks, memory.num_all_blocks)
        self._window = FairWindow(self._limits)
        self._stuck = StuckReads(self._backend)
        self._accepting = True

    def _turn(self) -> bool:
        """Run the commands in the inbox, post one piece, poll all pieces; returns whether to go on."""
        self._run_commands()
        self._in_turn = True
        piece = self._window.pop_next()
        if piece is not None:
            self._moved = True
            self._post(piece)
        self._poll()
        self._digest_queue.compute(lambda: self._has_to_move)
        if self._stuck:
            self._end_stuck_reads()
        if self._num_readers:
            self._backend.pump()
        self._in_turn = False
        self._num_turns += 1
        if self._stop_by is None:
            return True
        return bool(self._in_flight) and self._clock.monotonic() < self._stop_by

    def _run_commands(self) -> None:
        try:
            if self._moved:
                self._moved = False
            else:
                self._run_command(self._inbox.get(timeout=self._pause()))
            while True:
                self._run_command(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _run_command(self, command: Callable[[], None]) -> None:
        self._in_turn = True
        command()
        # Many long ones, as connecting to all parts of a peer may be, are no hang.
        self._num_turns += 1

    def _pause(self) -> float | None:
        now = self._clock.monotonic()
        quiet_s = now - self._moved_at if self._in_flight else None
        until_probe_s = self._stuck.pause(now)
        until_poll_s = pause(quiet_s, self._num_readers)
        return until_probe_s if until_poll_s is None else until_poll_s

    def _note_progress(self, read: ActiveRead, peer: ConnectedPeer) -> None:
        self._moved_at = read.moved_at = self._clock.monotonic()
        read.progress_at = peer.progress_at = self._polled_s

    def _connect(self, peer: PeerMemory) -> None:
        known = self._peers.get(peer.incarnation)
        try:
            if known is None:
                plan = peer.plan_for(self._backend.memory)
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

    def _read(
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
        self._moved = True
        self._window.submit(read_id, incarnation, ranges, plan)

    def _objection(self, incarnation: str, ranges: tuple[ReadRange, ...]) -> TransferFailed | None:
        peer = self._peers.get(incarnation)
        if peer is None:
            return PeerGone(f"{incarnation} is not connected")
        if peer.closing is not None:
            return peer.closing
        try:
            counts = self._backend.memory.num_all_blocks, peer.memory.num_all_blocks
            check_ranges(ranges, *peer.plan.count_sub_blocks(*counts))
        except TransferFailed as error:
            return error
        return None

    def _fill(self, fill_id: int, block: int, seed: str, group: int) -> None:
        try:
            if self._fill_block is None:
                self._fill_block = block_filler(self._backend.memory)
            digests = self._fill_block(block, seed, group)
        except Exception as error:
            _log.exception("could not fill block %d with known bytes: a probe fails", block)
            self._deliver(FillFailed(fill_id, repr(error)))
        else:
            self._deliver(BlockFilled(fill_id, digests))

    def _cancel(self, read_id: int) -> None:
        read = self._reads.get(read_id)
        if read is not None and self._window.withdraw(read_id, read.incarnation):
            read.failure = read.failure or TransferFailed(TransferCause.CANCELLED, "cancelled by its owner")
            self._answer_if_over(read)

    def _disconnect(self, incarnation: str) -> None:
        self._close_peer(incarnation, TransferFailed(TransferCause.CANCELLED, f"{incarnation} was disconnected"))

    def _set_num_readers(self, num_readers: int) -> None:
        self._num_readers = num_readers

    def _begin_stop(self) -> None:
        self._stop_by = self._clock.monotonic() + STOP_WITHIN_S
        for incarnation in list(self._peers):
            self._close_peer(incarnation, TransferFailed(TransferCause.CANCELLED, "the mover stops"))

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
        self.reads_in_flight += not read.pieces
        read.pieces += 1
        peer.pieces += 1
        self._in_flight[handle] = piece
        failpoint("read-posted" if piece.read_id > 0 else "probe-read-posted")

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
                    self.bytes_arrived += peer.plan.num_bytes(piece.ranges)
                    self.arrived_at = now
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

    @property
    def _has_to_move(self) -> bool:
        return bool(self._in_flight) or self._window.queued_reads > 0 or not self._inbox.empty()

    def _end_stuck_reads(self) -> None:
        for piece, error in self._stuck.pop_ended(self._clock.monotonic()):
            read, peer = self._reads[piece.read_id], self._peers[piece.incarnation]
            self._piece_ended(piece, read, peer)
            self._piece_failed(read, error)
            self._count_stuck(self._clock.monotonic())

    def _piece_ended(self, piece: Piece, read: ActiveRead, peer: ConnectedPeer) -> None:
        """None of the piece writes any more."""
        self._moved = True
        self._window.finished(piece)
        read.pieces -= 1
        peer.pieces -= 1
        self.reads_in_flight -= not read.pieces

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
        self._forget_id(read.read_id)
        self._deliver(ReadDone(read.read_id, read.num_bytes, read.post_s, total_s, read.num_descriptors))

    def _count_stuck(self, now: float) -> None:
        in_flight = [read for read in self._reads.values() if read.pieces]
        self.stuck_reads = sum(isinstance(r.failure, ReadStuck) or now - r.moved_at >= STUCK_AFTER_S for r in in_flight)
        self._counted_at = now

    def _forget_id(self, read_id: int) -> None:
        with self._gate:
            self._read_ids.discard(read_id)

    def _answer_failed(self, read_id: int, why: TransferFailed) -> None:
        self._forget_id(read_id)
        self._deliver(ReadFailed(read_id, why.cause, str(why)))

    def _shut_down(self) -> None:
        """End the thread's work: answer reads that are not in flight, and leave alone those that may still write."""
        with self._gate:
            self._accepting = False
        try:
            while not self._inbox.empty():
                self._inbox.get_nowait()()
            self._begin_stop()
            if not self._in_flight and not self._stuck:
                self._backend.close()
        except Exception as error:
            _log.exception("the mover could not shut down in order")
            self.fault = self.fault or error
