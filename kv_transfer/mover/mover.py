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
import logging
import queue
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor

from baton.background import current_watch
from baton.clock import Clock
from baton.errors import EngineFault, TransferCause, TransferFailed
from baton.runner.blocks.digest_definition import BlockDigests
from kv_transfer.backends.base import PeerMemory, TransferBackend
from kv_transfer.mover.agent_reads import STALL_S, AgentReads
from kv_transfer.mover.digest_thread import DigestQueue
from kv_transfer.mover.part_mover import ConnectFailed, FillFailed, MoverEvent, ReadFailed, ReadFigures
from kv_transfer.mover.pieces import WindowLimits
from kv_transfer.piece_plan import ReadRange

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
    """Reads blocks of peers in one thread (`PartMover`).

    `backend_factory` and `deliver` are called in the mover's thread; `deliver` must return at once. An exception that
    it raises is a fault of the mover, since somebody waits for the event that was lost (`PartsMover` catches those of
    its own `deliver`, and has a fault of its own). Events about digests may be delivered from another thread.
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
        self.figures = ReadFigures()
        self.fault: BaseException | None = None
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
        self._reads: AgentReads
        self._digest_queue = DigestQueue(digests, deliver, self._watch, helper)
        self._num_turns = 0
        self._in_turn = False
        """Whether the thread works on commands or reads, and does not wait for a command."""
        self._stall_s = stall_s
        self._stop_by: float | None = None

    # Called from any thread.

    def start(self) -> None:
        self._thread.start()
        self._up.wait()
        if self._start_error is not None:
            raise self._start_error

    def published(self, name: str) -> PeerMemory:
        return PeerMemory.of(self._reads.memory, name, self.agent_metadata)

    def connect(self, peer: PeerMemory) -> None:
        if not self._enqueue(lambda: self._reads.connect(peer)):
            self._deliver(ConnectFailed(peer.incarnation, _NOT_RUNNING))

    def read(
        self,
        read_id: int,
        incarnation: str,
        ranges: Sequence[ReadRange],
        to_digest: Collection[int] = (),
        digest_parts: int = 1,
    ) -> None:
        with self._gate:
            if read_id in self._read_ids:
                raise ValueError(f"read {read_id} is in flight")
            self._read_ids.add(read_id)
        called_at, ranges = self._clock.monotonic(), tuple(ranges)
        if not self._enqueue(
            lambda: self._reads.read(read_id, incarnation, ranges, called_at, to_digest, digest_parts)
        ):
            self._forget_id(read_id)
            self._deliver(ReadFailed(read_id, _NOT_RUNNING.cause, str(_NOT_RUNNING)))

    def fill(self, fill_id: int, block: int, seed: str, group: int = 0) -> None:
        if not self._enqueue(lambda: self._reads.fill(fill_id, block, seed, group)):
            self._deliver(FillFailed(fill_id, str(_NOT_RUNNING)))

    def abandon(self, read_id: int) -> None:
        self._enqueue(lambda: self._reads.abandon(read_id))

    def disconnect(self, incarnation: str) -> None:
        self._enqueue(lambda: self._reads.disconnect(incarnation))

    def set_num_readers(self, num_readers: int) -> None:
        self._enqueue(lambda: self._reads.set_num_readers(num_readers))

    def stop(self) -> None:
        """Wait up to STOP_WITHIN_S for reads in flight, and end the thread, as `PartMover.stop` says."""
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
        backend = self._backend_factory()
        self.agent_metadata = backend.agent_metadata()
        self._reads = AgentReads(
            backend,
            self._deliver,
            self._clock,
            self._limits,
            self._digest_queue,
            self._stall_s,
            self.figures,
            self._forget_id,
        )
        self._accepting = True

    def _turn(self) -> bool:
        """Run the commands in the inbox, and work on the reads; returns whether to go on."""
        self._run_commands()
        self._in_turn = True
        self._reads.work(lambda: self._has_to_move)
        self._in_turn = False
        self._num_turns += 1
        if self._stop_by is None:
            return True
        return self._reads.is_in_flight and self._clock.monotonic() < self._stop_by

    def _run_commands(self) -> None:
        try:
            if self._reads.moved:
                self._reads.moved = False
            else:
                self._run_command(self._inbox.get(timeout=self._reads.pause()))
            while True:
                self._run_command(self._inbox.get_nowait())
        except queue.Empty:
            return

    @property
    def _has_to_move(self) -> bool:
        return self._reads.has_to_move or not self._inbox.empty()

    def _begin_stop(self) -> None:
        self._stop_by = self._clock.monotonic() + STOP_WITHIN_S
        self._reads.disconnect_all(TransferFailed(TransferCause.CANCELLED, "the mover stops"))

    def _forget_id(self, read_id: int) -> None:
        with self._gate:
            self._read_ids.discard(read_id)

    def _run_command(self, command: Callable[[], None]) -> None:
        self._in_turn = True
        command()
        # Many long ones, as connecting to all parts of a peer may be, are no hang.
        self._num_turns += 1

    def _shut_down(self) -> None:
        """End the thread's work: answer reads that are not in flight, and leave alone those that may still write."""
        with self._gate:
            self._accepting = False
        try:
            while not self._inbox.empty():
                self._inbox.get_nowait()()
            self._begin_stop()
            self._reads.close()
        except Exception as error:
            _log.exception("the mover could not shut down in order")
            self.fault = self.fault or error
