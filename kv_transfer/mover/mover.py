"""The thread that owns a node's transfer agent: it posts, polls and pumps, and nobody else touches the agent.

The rules it keeps:

1. Every read is answered once, by ReadDone or ReadFailed, and the answer means that nothing of it writes any more. A
   peer that neither answers nor dies (SIGSTOP) leaves its reads in flight: they stay polled and counted, and their
   blocks stay the owner's to quarantine. So do those of a read that failed and may still write, until its peer is gone.
   Of such reads the owner hears ReadStalled once: of one of which no piece has arrived for `stall_s`, or, while it is
   queued behind others of its peer, none of theirs. Only time in which this thread looked counts.
2. A handle is released only when its read is over; a peer is dropped only when its reads are.
3. No CPU without work: the thread sleeps on its inbox when no read is in flight and no lease is out, looks every
   millisecond while a lease is out (peers' reads need it), and all the time while a read is in flight, with pauses
   that grow the longer nothing has arrived. It never spins: NIXL polls with the interpreter's lock held, and a thread
   that only polls would make the one that computes wait 5 ms for every single operation.
4. A fault of the thread, or of the one that computes digests, ends the process (`baton/background.py`): nothing would
   move any more, and nobody be told. So does a call into the agent that does not return (`watch_turns`). What concerns
   one read alone is that read's failure.
5. Digests of what was read are computed here, while the bytes are in the cache and after others were told of them:
   that costs no wake-up. While there is something to move a helper computes them, so that no byte waits for a digest.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor

from baton.background import current_watch
from baton.clock import Clock
from baton.errors import EngineFault, TransferCause, TransferFailed
from baton.failpoints import failpoint
from baton.runner.blocks.block_digests import BlockDigests
from kv_transfer.backends.base import (
    PeerGone,
    PeerMemory,
    ReadHandle,
    ReadRange,
    ReadState,
    ReadStuck,
    TransferBackend,
    check_ranges,
    let_go,
)
from kv_transfer.mover.digest_queue import DigestQueue
from kv_transfer.mover.mover_events import (
    Connected,
    ConnectFailed,
    MoverEvent,
    ReadDone,
    ReadFailed,
    ReadStalled,
)
from kv_transfer.mover.mover_records import ActiveRead, ConnectedPeer
from kv_transfer.mover.pacing import pause
from kv_transfer.mover.stuck_reads import StuckReads
from kv_transfer.mover.window import FairWindow, Piece, WindowLimits

__all__ = [
    "ConnectFailed",
    "Connected",
    "Mover",
    "MoverEvent",
    "ReadDone",
    "ReadFailed",
    "ReadStalled",
]

STUCK_AFTER_S = 1.0
STALL_S = 10.0
"""A piece of the longest kind (`WindowLimits`) takes so long at 2 MB/s, which is of no use for KV."""
_LONGEST_LOOK_S = 0.5
"""No more counts of the time between two looks at what is in flight: the thread was held up, or its process stopped."""
STOP_WITHIN_S = 2.0
_END_WITHIN_S = 10.0
"""From then on to the end of the thread: longer takes only a call into the agent that does not return."""
TURN_LOOK_S = 1.0
HUNG_LOOKS = 60
"""In a row in which the thread was in one and the same turn. Looks, not seconds: a process may be stopped."""

_NOT_RUNNING = TransferFailed(TransferCause.CANCELLED, "the mover is not running")

_log = logging.getLogger(__name__)


class Mover:
    """Moves blocks in one thread. Methods may be called from any thread, return at once, and answer by `deliver`.

    `backend_factory` is called in the mover's thread; `deliver` too, and must return at once: what it raises is a fault
    of the mover, since somebody waits for what was lost. What is said of digests it may hear from another thread.
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
        """`digests`: of this node's blocks. `helper` computes them in times of plenty; default: a thread of its own.

        `stall_s`: how long a read may make no progress before its owner hears that it is stalled.
        """
        self.agent_metadata = b""
        self.bytes_arrived = 0
        """Of all reads. With `arrived_at`, on the mover's clock, it tells whether anything moves."""
        self.arrived_at: float | None = None
        self.reads_in_flight = 0
        """Reads that may still write to their local blocks, queued ones not counted."""
        self.stuck = 0
        """Those of them that have made no progress for STUCK_AFTER_S, or failed in a way that may still write."""
        self.fault: BaseException | None = None
        """What ended the thread, should it ever end by itself; reads in flight then stay counted."""
        self._watch = current_watch.get()
        """Of whoever makes the mover: it hears of that fault."""
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
        self._open_leases = 0
        self._digest_queue = DigestQueue(digests, deliver, self._watch, helper)
        self._num_turns = 0
        self._in_turn = False
        """Whether the mover works on commands or reads, and does not wait for any."""
        self._moved = False
        """Something was posted or finished in this turn: more may be possible at once."""
        self._moved_at = 0.0
        self._counted_at = 0.0
        self._stall_s = stall_s
        self._looked_s = 0.0
        """For how long reads in flight were looked at."""
        self._looked_at = 0.0
        self._stop_by: float | None = None

    # Called from any thread.

    def start(self) -> None:
        """Make the agent; returns when it is up, raises its error."""
        self._thread.start()
        self._up.wait()
        if self._start_error is not None:
            raise self._start_error

    def connect(self, peer: PeerMemory) -> None:
        """Answered by Connected or ConnectFailed. Connecting again with equal values is fine."""
        if not self._tell(functools.partial(self._connect, peer)):
            self._deliver(ConnectFailed(peer.incarnation, _NOT_RUNNING))

    def read(
        self, read_id: int, incarnation: str, ranges: Sequence[ReadRange], to_digest: Collection[int] = ()
    ) -> None:
        """Answered by one ReadDone or ReadFailed, whenever nothing of it writes any more.

        If it is done, BlocksDigested has come or comes for each of its local blocks that are in `to_digest`, once, or
        NotDigested. Raises ValueError for a read id that is in use.
        """
        with self._gate:
            if read_id in self._read_ids:
                raise ValueError(f"read {read_id} is in flight")
            self._read_ids.add(read_id)
        called_at = self._clock.monotonic()
        command = functools.partial(self._read, read_id, incarnation, tuple(ranges), called_at, to_digest)
        if not self._tell(command):
            self._refuse(read_id, _NOT_RUNNING)

    def cancel(self, read_id: int) -> None:
        """Post no more of a read; what is in flight ends first, then it is answered. Unknown ones are fine."""
        self._tell(functools.partial(self._cancel, read_id))

    def disconnect(self, incarnation: str) -> None:
        """Drop a peer. Its reads fail with CANCELLED as soon as nothing of them is in flight; unknown ones are fine."""
        self._tell(functools.partial(self._disconnect, incarnation))

    def set_open_leases(self, num_leases: int) -> None:
        """Sender side: how many leases are out. Peers' reads make progress while there is one."""
        self._tell(functools.partial(self._set_open_leases, num_leases))

    def stop(self) -> None:
        """Cancel what is queued, wait up to STOP_WITHIN_S for reads in flight, end the thread.

        Reads still in flight then get no answer and stay counted; the agent and the memory live on with this object,
        until the process ends. Calls after this one are answered at once, from the calling thread.
        """
        with self._gate:
            if not self._accepting:
                return
            self._accepting = False
            self._inbox.put(self._begin_stop)
        self._thread.join(STOP_WITHIN_S + _END_WITHIN_S)
        if self._thread.is_alive():
            _log.error("the mover did not end: a call into the transfer agent does not return")
        self._digest_queue.close(wait=not self._thread.is_alive())

    async def watch_turns(self) -> None:
        """Raises EngineFault when the thread hangs in a turn; runs until cancelled otherwise. On a loop."""
        seen, looks = 0, 0
        while looks < HUNG_LOOKS:
            await asyncio.sleep(TURN_LOOK_S)
            looks = looks + 1 if self._in_turn and self._num_turns == seen else 0
            seen = self._num_turns
        raise EngineFault("a call into the transfer agent does not return")

    def _tell(self, command: Callable[[], None]) -> bool:
        with self._gate:
            if self._accepting:
                self._inbox.put(command)
            return self._accepting

    # Everything below runs in the mover's thread.

    def _run(self) -> None:
        try:
            self._begin()
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
        self._end()

    def _begin(self) -> None:
        self._backend = self._backend_factory()
        self.agent_metadata = self._backend.agent_metadata()
        self._window = FairWindow(self._limits, self._backend.memory.block_bytes)
        self._stuck = StuckReads(self._backend)
        self._accepting = True

    def _turn(self) -> bool:
        """Take commands, post one piece, look at all; says whether to go on."""
        self._take_commands()
        self._in_turn = True
        piece = self._window.take()
        if piece is not None:
            self._moved = True
            self._post(piece)
        self._poll()
        self._digest_queue.compute(lambda: self._has_to_move)
        if self._stuck:
            self._free_stuck()
        if self._open_leases:
            self._backend.pump()
        self._in_turn = False
        self._num_turns += 1
        if self._stop_by is None:
            return True
        return bool(self._in_flight) and self._clock.monotonic() < self._stop_by

    def _take_commands(self) -> None:
        try:
            if self._moved:
                self._moved = False
            else:
                command = self._inbox.get(timeout=self._pause())
                self._in_turn = True
                command()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _pause(self) -> float | None:
        now = self._clock.monotonic()
        quiet_s = now - self._moved_at if self._in_flight else None
        until_probe_s = self._stuck.pause(now)
        until_poll_s = pause(quiet_s, self._open_leases)
        return until_probe_s if until_poll_s is None else until_poll_s

    def _note_move(self, read: ActiveRead, peer: ConnectedPeer) -> None:
        self._moved_at = read.moved_at = self._clock.monotonic()
        read.progress_at = peer.progress_at = self._looked_s

    def _connect(self, peer: PeerMemory) -> None:
        known = self._peers.get(peer.incarnation)
        try:
            if known is None:
                self._backend.connect(peer)
                self._peers[peer.incarnation] = ConnectedPeer(peer, self._looked_s)
            elif known.memory != peer:
                raise TransferFailed(TransferCause.REFUSED, f"{peer.incarnation} changed its memory")
            elif known.lost:
                raise PeerGone(str(known.closing))
            else:
                known.closing = None
        except TransferFailed as error:
            self._deliver(ConnectFailed(peer.incarnation, error))
        except Exception as error:
            # What a peer published must not end the mover, whatever it does to the backend.
            _log.exception("%s can't be connected", peer.incarnation)
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
    ) -> None:
        refusal = self._refusal(incarnation, ranges)
        if refusal is not None:
            self._refuse(read_id, refusal)
            return
        num_blocks = sum(r.count for r in ranges)
        num_bytes = num_blocks * self._backend.memory.block_bytes
        self._reads[read_id] = ActiveRead(
            read_id, incarnation, num_blocks, num_bytes, called_at, called_at, frozenset(to_digest), self._looked_s
        )
        self._moved = True
        self._window.submit(read_id, incarnation, ranges)

    def _refusal(self, incarnation: str, ranges: tuple[ReadRange, ...]) -> TransferFailed | None:
        peer = self._peers.get(incarnation)
        if peer is None:
            return PeerGone(f"{incarnation} is not connected")
        if peer.closing is not None:
            return peer.closing
        try:
            check_ranges(ranges, self._backend.memory.num_blocks, peer.memory.num_blocks)
        except TransferFailed as error:
            return error
        return None

    def _cancel(self, read_id: int) -> None:
        read = self._reads.get(read_id)
        if read is not None and self._window.withdraw(read_id, read.incarnation):
            read.failure = read.failure or TransferFailed(TransferCause.CANCELLED, "cancelled by its owner")
            self._settle(read)

    def _disconnect(self, incarnation: str) -> None:
        self._close_peer(incarnation, TransferFailed(TransferCause.CANCELLED, f"{incarnation} was disconnected"))

    def _set_open_leases(self, num_leases: int) -> None:
        self._open_leases = num_leases

    def _begin_stop(self) -> None:
        self._stop_by = self._clock.monotonic() + STOP_WITHIN_S
        for incarnation in list(self._peers):
            self._close_peer(incarnation, TransferFailed(TransferCause.CANCELLED, "the mover stops"))

    def _close_peer(self, incarnation: str, why: TransferFailed) -> None:
        peer = self._peers.get(incarnation)
        if peer is None:
            return
        if not peer.lost:
            peer.closing = why
        for read in [r for r in self._reads.values() if r.incarnation == incarnation]:
            if self._window.withdraw(read.read_id, incarnation):
                read.failure = read.failure or why
                self._settle(read)
        self._drop_idle(peer)

    def _drop_idle(self, peer: ConnectedPeer) -> None:
        if peer.closing is not None and not peer.pieces:
            del self._peers[peer.memory.incarnation]
            self._backend.disconnect(peer.memory.incarnation)

    def _post(self, piece: Piece) -> None:
        read, peer = self._reads[piece.read_id], self._peers[piece.incarnation]
        before = self._clock.monotonic()
        if not self._in_flight:
            # There was nothing to look at.
            self._looked_at = before
        try:
            handle = self._backend.post_read(piece.incarnation, piece.ranges)
        except TransferFailed as error:
            self._window.finished(piece)
            self._lose(read, peer, error)
            return
        self._note_move(read, peer)
        read.post_s += self._moved_at - before
        read.num_ranges += len(piece.ranges)
        self.reads_in_flight += not read.pieces
        read.pieces += 1
        peer.pieces += 1
        self._in_flight[handle] = piece
        failpoint("read-posted")

    def _poll(self) -> None:
        if not self._in_flight:
            return
        now = self._clock.monotonic()
        self._looked_s += min(now - self._looked_at, _LONGEST_LOOK_S)
        self._looked_at = now
        for handle, piece in list(self._in_flight.items()):
            read, peer = self._reads[piece.read_id], self._peers[piece.incarnation]
            try:
                if self._backend.poll(handle) is ReadState.IN_PROGRESS:
                    continue
            except PeerGone as error:
                let_go(self._backend, handle)
                self._retire(self._in_flight.pop(handle), read, peer)
                self._lose(read, peer, error)
            except ReadStuck as error:
                self._stuck.add(handle, self._in_flight.pop(handle), now)
                read.failure = error
                self._tell_stalled(read, str(error))
                self._close_peer(piece.incarnation, error)
            else:
                failure = let_go(self._backend, handle)
                self._retire(self._in_flight.pop(handle), read, peer)
                self._note_move(read, peer)
                if failure is not None:
                    self._lose(read, peer, failure)
                else:
                    read.blocks_left -= piece.num_blocks
                    self.bytes_arrived += piece.num_blocks * self._backend.memory.block_bytes
                    self.arrived_at = now
                    self._note_blocks(read, piece)
                    self._settle(read)
                self._drop_idle(peer)
        if now - self._counted_at > STUCK_AFTER_S / 10 or not self._in_flight:
            self._count_stuck(now)
            self._look_for_stalled()

    def _look_for_stalled(self) -> None:
        for read in list(self._reads.values()):
            peer = self._peers.get(read.incarnation)
            # What is queued waits for its turn as long as those before it get on.
            is_queued = peer is not None and not read.pieces
            progress_at = max(read.progress_at, peer.progress_at) if peer and is_queued else read.progress_at
            if self._looked_s - progress_at >= self._stall_s:
                self._tell_stalled(
                    read, f"nothing arrived for {self._stall_s:g} s, {read.blocks_left} blocks are missing"
                )

    def _tell_stalled(self, read: ActiveRead, story: str) -> None:
        if not read.is_stalled:
            read.is_stalled = True
            self._deliver(ReadStalled(read.read_id, f"{read.incarnation}: {story}"))

    def _note_blocks(self, read: ActiveRead, piece: Piece) -> None:
        blocks = [block for r in piece.ranges for block in range(r.local_block, r.local_block + r.count)]
        if wanted := [block for block in blocks if block in read.to_digest]:
            self._digest_queue.add(read.read_id, wanted)

    @property
    def _has_to_move(self) -> bool:
        return bool(self._in_flight) or self._window.queued_reads > 0 or not self._inbox.empty()

    def _free_stuck(self) -> None:
        for piece, error in self._stuck.over(self._clock.monotonic()):
            read, peer = self._reads[piece.read_id], self._peers[piece.incarnation]
            self._retire(piece, read, peer)
            self._lose(read, peer, error)
            self._count_stuck(self._clock.monotonic())

    def _retire(self, piece: Piece, read: ActiveRead, peer: ConnectedPeer) -> None:
        """Nothing of the piece writes any more."""
        self._moved = True
        self._window.finished(piece)
        read.pieces -= 1
        peer.pieces -= 1
        self.reads_in_flight -= not read.pieces

    def _lose(self, read: ActiveRead, peer: ConnectedPeer, error: TransferFailed) -> None:
        """One piece of the read will never come; with the peer gone, nothing of it will."""
        self._window.withdraw(read.read_id, read.incarnation)
        read.failure = read.failure or error
        self._settle(read)
        if isinstance(error, PeerGone):
            self._close_peer(read.incarnation, error)

    def _settle(self, read: ActiveRead) -> None:
        """Answer a read of which nothing is in flight or to come."""
        if read.pieces or (read.failure is None and read.blocks_left):
            return
        del self._reads[read.read_id]
        if read.failure is not None:
            self._refuse(read.read_id, read.failure)
            return
        total_s = self._clock.monotonic() - read.called_at
        self._forget_id(read.read_id)
        self._deliver(ReadDone(read.read_id, read.num_bytes, read.post_s, total_s, read.num_ranges))

    def _count_stuck(self, now: float) -> None:
        in_flight = [read for read in self._reads.values() if read.pieces]
        self.stuck = sum(isinstance(r.failure, ReadStuck) or now - r.moved_at >= STUCK_AFTER_S for r in in_flight)
        self._counted_at = now

    def _forget_id(self, read_id: int) -> None:
        with self._gate:
            self._read_ids.discard(read_id)

    def _refuse(self, read_id: int, why: TransferFailed) -> None:
        self._forget_id(read_id)
        self._deliver(ReadFailed(read_id, why.cause, str(why)))

    def _end(self) -> None:
        """Nothing comes after this: answer what never began, and leave alone what may still write."""
        with self._gate:
            self._accepting = False
        try:
            while not self._inbox.empty():
                self._inbox.get_nowait()()
            self._begin_stop()
            if not self._in_flight and not self._stuck:
                self._backend.close()
        except Exception as error:
            _log.exception("the mover could not end in order")
            self.fault = self.fault or error
