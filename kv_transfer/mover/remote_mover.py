"""The node's end of a mover in another process, which holds some layers of the node's KV cache.

It is to the node what `Mover` is (`PartMover`). The rules it keeps:

1. A call is a message and returns at once; what the other mover says is delivered by the thread that reads the stream.
   The calls of one thread are executed in order.
2. The other process is one of this node, but what it says comes over a network: nothing is used that is out of bounds,
   and an answer that nobody waits for is counted and changes nothing.
3. When the stream ends, the other mover fails, it computes no digests in time, or something arrives that is no message,
   the node can't go on: that is a fault as one of its own mover's would be. Reads then get no answer and stay counted,
   since they may still write.
4. `stop` leaves the stream to the next mover over it: a node that changes its role keeps its processes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from socket import socket
from typing import Any

from baton.background import current_watch
from baton.clock import Clock
from baton.engine.runner import KVLayout, KVMemory
from baton.errors import BatonError, ConfigError, EngineFault, TransferCause, TransferFailed
from baton.runner.blocks.digest_definition import DIGEST_MODULUS, BlockDigests
from baton.runner.blocks.sub_blocks import WHOLE, Division
from kv_transfer.backends.base import PeerMemory
from kv_transfer.digests import AskedDigests
from kv_transfer.mover.agent_reads import STALL_S
from kv_transfer.mover.message_stream import MessageStream, StreamEnded, StreamLost
from kv_transfer.mover.mover import HANG_CHECK_INTERVAL_S, MAX_HANG_CHECKS
from kv_transfer.mover.part_mover import (
    BlockFilled,
    BlocksDigested,
    Connected,
    ConnectFailed,
    DeliverEvent,
    DigestsFailed,
    FillFailed,
    MoverEvent,
    ReadDone,
    ReadFailed,
    ReadFigures,
    ReadStalled,
)
from kv_transfer.mover.remote_messages import (
    STOP_WITHIN_S,
    AskTurns,
    CancelRead,
    DigestBlocks,
    DigestsFound,
    DigestsNotFound,
    DisconnectPeer,
    FillBlock,
    FromPart,
    MoverFault,
    MoverNotUp,
    MoverStopped,
    MoverUp,
    PeerNotConnected,
    ReadBlocks,
    SetNumReaders,
    StartMover,
    StopMover,
    ToPart,
    Turns,
    read_from_part,
    write_to_part,
)
from kv_transfer.piece_plan import ReadRange

START_WITHIN_S = 120.0
"""How long the other process may take to make its agent: it registers its memory, which may be large."""
DIGEST_WITHIN_S = 30.0
"""How long it may take to compute digests; those of a whole prompt take much less than a second."""
_MAX_BLOCKS = 1 << 32

_NOT_RUNNING = TransferFailed(TransferCause.CANCELLED, "the mover is not running")
_log = logging.getLogger(__name__)


class RemoteMover:
    """The mover of a part of this node, in another process at the other end of a stream (`MoverServer`)."""

    def __init__(
        self,
        stream: socket,
        agent: str,
        layers: range,
        layout: KVLayout,
        deliver: DeliverEvent,
        clock: Clock,
        stall_s: float = STALL_S,
        start_within_s: float = START_WITHIN_S,
        digest_within_s: float = DIGEST_WITHIN_S,
        stop_within_s: float = STOP_WITHIN_S,
    ) -> None:
        """`stream`: a connected socket, which nobody else uses meanwhile. `agent`: the name of the agent that the other
        process is to make. `layers`: those that it must hold. `layout`: of a block of all layers.
        """
        self.figures = ReadFigures()
        """The figures that the other mover sent last; some of the reads in flight may only be queued there."""
        self.fault: BaseException | None = None
        """Why the other mover can't be used any more, if it can't."""
        self.counters: Counter[str] = Counter()
        """Messages that nobody waited for, by kind."""
        self._socket = stream
        self._agent = agent
        self._layers = layers
        self._layout = layout
        self._deliver = deliver
        self._clock = clock
        self._stall_s = stall_s
        self._start_within_s = start_within_s
        self._digest_within_s = digest_within_s
        self._stop_within_s = stop_within_s
        self._watch = current_watch.get()
        self._lock = threading.Lock()
        """Guards what follows."""
        self._stream: MessageStream
        self._part: KVMemory | None = None
        """The part's memory, once its agent is up; nothing here reads or writes it."""
        self._thread = threading.Thread(target=self._run, name="baton-remote-mover", daemon=True)
        self._accepting = False
        self._reads: dict[int, set[int]] = {}
        """The sub-blocks whose digests are to come, of each read that is not answered."""
        self._digesting: dict[int, set[int]] = {}
        """The same, of each read that is done."""
        self._up: Future[PeerMemory] = Future()
        self._stopped: Future[None] = Future()
        self._questions = itertools.count(1)
        self._digests: dict[int, tuple[int, Future[Sequence[int]]]] = {}
        """How many digests were asked for in each question, and where they go."""
        self._turns: Turns | None = None
        self._cut_for: BatonError | None = None
        """Why this end has cut the stream, if it has."""

    # Called from any thread.

    def start(self) -> None:
        """Start the mover in the other process, as `PartMover.start` does.

        Raises ConfigError if the agent can't be made, or is not over the memory that it should be; StreamLost or
        EngineFault if the other process is gone or does not answer.
        """
        self._stream = MessageStream(self._socket)
        self._thread.start()
        self._send(StartMover(self._agent, self._stall_s))
        try:
            self._memory = self._up.result(self._start_within_s)
        except TimeoutError:
            fault = EngineFault(f"a part of this node made no transfer agent within {self._start_within_s:g} s")
            self._cut(fault)
            raise fault from None
        except ConfigError:
            self._stream.leave()
            self._thread.join()
            raise

    def published(self, name: str) -> PeerMemory:
        return replace(self._memory, incarnation=name)

    def connect(self, peer: PeerMemory) -> None:
        # What the peer has published is checked before it is sent on, and ends nothing here.
        failure: TransferFailed | None = None
        try:
            if self._part is not None:
                peer.plan_for(self._part)
            frame = write_to_part(peer)
            with self._lock:
                if self._accepting:
                    self._stream.send(frame)
                else:
                    failure = _NOT_RUNNING
        except TransferFailed as error:
            failure = error
        except (ValueError, TypeError, StreamLost) as error:
            # A peer published values that no message holds, or so much that the other process did not read it in time.
            failure = TransferFailed(TransferCause.REFUSED, repr(error))
        if failure is not None:
            self._deliver(ConnectFailed(peer.incarnation, failure))

    def read(
        self,
        read_id: int,
        incarnation: str,
        ranges: Sequence[ReadRange],
        to_digest: Collection[int] = (),
        digest_parts: int = 1,
    ) -> None:
        with self._lock:
            if read_id in self._reads:
                raise ValueError(f"read {read_id} is in flight")
            self._reads[read_id] = set(to_digest)
            self.figures.reads_in_flight += 1
        failure: TransferFailed | None = None
        try:
            if not self._tell(ReadBlocks.of(read_id, incarnation, ranges, to_digest, digest_parts)):
                failure = _NOT_RUNNING
        except ValueError as error:
            failure = TransferFailed(TransferCause.REFUSED, repr(error))
        if failure is not None:
            with self._lock:
                del self._reads[read_id]
                self.figures.reads_in_flight -= 1
            self._deliver(ReadFailed(read_id, failure.cause, str(failure)))

    def fill(self, fill_id: int, block: int, seed: str, group: int = 0) -> None:
        if not self._tell(FillBlock(fill_id, block, seed, group)):
            self._deliver(FillFailed(fill_id, str(_NOT_RUNNING)))

    def abandon(self, read_id: int) -> None:
        self._tell(CancelRead(read_id))

    def disconnect(self, incarnation: str) -> None:
        self._tell(DisconnectPeer(incarnation))

    def set_num_readers(self, num_readers: int) -> None:
        self._tell(SetNumReaders(num_readers))

    def ask_digests(self, ids: Sequence[int], division: Division = WHOLE) -> Callable[[], Sequence[int]]:
        """Ask for the digests of sub-blocks of the part's blocks, of the layers there.

        Returns a function that waits for them. It raises EngineFault if they can't be computed. If they don't come in
        time, that is a fault of the mover, too: whoever asks next would wait as long, and mostly it is the engine.
        """
        if division.layers is not None:
            raise ValueError(f"a part has digests of all its layers, not of {division.layers} alone")
        answer: Future[Sequence[int]] = Future()
        question = next(self._questions)
        with self._lock:
            self._digests[question] = len(ids), answer
        if not self._tell(DigestBlocks(question, ids, division.parts, division.group)):
            self._forget_question(question)
            raise EngineFault("a part of this node computes no digests: its mover is not running")
        return lambda: self._await_digests(question, answer)

    def stop(self) -> None:
        """Have the mover stopped, as `PartMover.stop` says, and leave the stream to the next one."""
        with self._lock:
            if not self._accepting:
                return
            self._accepting = False
            self._send(StopMover())
        try:
            self._stopped.result(self._stop_within_s)
        except (TimeoutError, BatonError) as error:
            _log.error("the mover of a part of this node did not stop: its process must end")
            self._cut(EngineFault(f"the mover of a part of this node did not stop: {error!r}"))
        self._thread.join()

    async def watch_turns(self) -> None:
        """Check that the mover goes on, as `PartMover.watch_turns` does; a process that does not answer hangs, too."""
        last: Turns | None = None
        num_unchanged = 0
        while num_unchanged < MAX_HANG_CHECKS:
            self._tell(AskTurns(next(self._questions)))
            await asyncio.sleep(HANG_CHECK_INTERVAL_S)
            turns = self._turns
            answered = turns is not last and turns is not None
            goes_on = answered and not (turns and last and turns.in_turn and turns.num_turns == last.num_turns)
            num_unchanged = 0 if goes_on else num_unchanged + 1
            last = turns
        raise EngineFault("a part of this node does not answer, or a call into its transfer agent does not return")

    def _tell(self, message: ToPart) -> bool:
        """Send a message; False: the mover is not running."""
        with self._lock:
            if self._accepting:
                self._send(message)
            return self._accepting

    def _send(self, message: ToPart) -> None:
        frame = write_to_part(message)
        try:
            self._stream.send(frame)
        except StreamLost as error:
            self._cut(error)

    def _cut(self, why: BatonError) -> None:
        self._cut_for = self._cut_for or why
        self._stream.cut()

    def _await_digests(self, question: int, answer: Future[Sequence[int]]) -> Sequence[int]:
        try:
            return answer.result(self._digest_within_s)
        except TimeoutError:
            fault = EngineFault(f"a part of this node computed no digests within {self._digest_within_s:g} s")
            self._cut(fault)
            raise fault from None
        finally:
            self._forget_question(question)

    def _forget_question(self, question: int) -> None:
        with self._lock:
            self._digests.pop(question, None)

    # Everything below runs in the thread that reads the stream.

    def _run(self) -> None:
        try:
            self._stream.run(lambda frame: self._received(read_from_part(frame)))
        except StreamEnded as error:
            self._failed(self._cut_for or error)
        except BaseException as error:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            was_accepting, self._accepting = self._accepting, False
            waiting: list[Future[Any]] = [pending for _, pending in self._digests.values()]
        for future in [*waiting, self._up, self._stopped]:
            if not future.done():
                future.set_exception(error)
        if was_accepting:
            self.fault = error
            # The end of the other process is no fault of this one, so a traceback would show nothing.
            self._watch.failed("mover", error.with_traceback(None) if isinstance(error, StreamEnded) else error)

    def _received(self, message: FromPart) -> None:
        match message:
            case MoverUp() | MoverNotUp():
                self._answered_start(message)
            case MoverStopped():
                if self._accepting:
                    raise StreamLost("a mover stopped that was not told to")
                self._stream.leave()
                self._stopped.set_result(None)
            case MoverFault(detail):
                raise EngineFault(f"the mover of a part of this node has failed: {detail}")
            case Turns():
                self._turns, self.figures.stuck_reads = message, message.stuck_reads
            case DigestsFound() | DigestsNotFound():
                self._answered_question(message)
            case PeerNotConnected(incarnation, cause, detail):
                self._deliver(ConnectFailed(incarnation, TransferFailed(cause, detail)))
            case Connected() | FillFailed():
                self._deliver(message)
            case BlockFilled(_, digests):
                if not all(1 <= parts <= self._layout.block_size for parts in digests):
                    raise StreamLost("a filled block has digests of parts that no block has")
                self._deliver(message)
            case _:
                self._read_event(message)

    def _answered_start(self, answer: MoverUp | MoverNotUp) -> None:
        if self._up.done():
            raise StreamLost("a mover started that was not told to")
        try:
            memory = self._checked(answer)
        except (ConfigError, TransferFailed) as error:
            self._up.set_exception(ConfigError(str(error)))
            return
        with self._lock:
            self._accepting = True
        self._up.set_result(memory)

    def _checked(self, answer: MoverUp | MoverNotUp) -> PeerMemory:
        """The part's memory, whose values are in bounds."""
        if isinstance(answer, MoverNotUp):
            raise ConfigError(f"a part of this node could not make its transfer agent: {answer.detail}")
        if answer.layers != self._layers:
            raise ConfigError(f"a part of this node holds the layers {answer.layers}, not {self._layers}")
        memory = KVMemory(
            answer.base_address,
            answer.num_blocks,
            self._layout.part(self._layers).block_bytes,
            answer.kind,
            answer.device_id,
            owner=None,
            num_probe_blocks=answer.num_probe_blocks,
            layout=self._layout,
            layers=self._layers,
        )
        published = PeerMemory.of(memory, self._agent, answer.agent_metadata)
        # It checks the bounds of all values.
        published.plan_for(memory)
        self._part = memory
        return published

    def _answered_question(self, answer: DigestsFound | DigestsNotFound) -> None:
        with self._lock:
            count, future = self._digests.pop(answer.question, (0, None))
        if future is None:
            self.counters["digests_unknown"] += 1
        elif isinstance(answer, DigestsNotFound):
            future.set_exception(EngineFault(f"a part of this node could not compute digests: {answer.detail}"))
        elif len(answer.digests) != count:
            future.set_exception(EngineFault(f"a part of this node sent {len(answer.digests)} digests, not {count}"))
        else:
            future.set_result(answer.digests)

    def _read_event(self, event: ReadDone | ReadFailed | ReadStalled | BlocksDigested | DigestsFailed) -> None:
        said = self._checked_read_event(event)
        if said is None:
            self.counters[f"{type(event).__name__}_unknown"] += 1
        else:
            self._deliver(said)

    def _checked_read_event(
        self, event: ReadDone | ReadFailed | ReadStalled | BlocksDigested | DigestsFailed
    ) -> MoverEvent | None:
        """What is to be delivered of an event; None: nobody waits for it."""
        read_id = event.read_id
        with self._lock:
            is_open, to_come = read_id in self._reads, self._reads.get(read_id) or self._digesting.get(read_id)
            match event:
                case BlocksDigested(_, digests):
                    if to_come is None:
                        return None
                    wanted = {block: digest for block, digest in digests.items() if block in to_come}
                    to_come.difference_update(wanted)
                    self._forget_digested(read_id)
                    return BlocksDigested(read_id, wanted) if wanted else None
                case DigestsFailed():
                    if to_come is not None:
                        to_come.clear()
                    self._forget_digested(read_id)
                    return None if to_come is None else event
                case ReadStalled():
                    return event if is_open else None
            if not is_open:
                return None
            if isinstance(event, ReadDone) and not (math.isfinite(event.post_s) and math.isfinite(event.total_s)):
                raise StreamLost(f"a read took {event.total_s} s, of which posting took {event.post_s} s")
            left = self._reads.pop(read_id)
            self.figures.reads_in_flight -= 1
            if isinstance(event, ReadDone):
                if left:
                    self._digesting[read_id] = left
                self.figures.bytes_arrived += event.num_bytes
                self.figures.arrived_at = self._clock.monotonic()
        return event

    def _forget_digested(self, read_id: int) -> None:
        if not self._digesting.get(read_id, True):
            del self._digesting[read_id]


def digests_of_parts(here: BlockDigests, elsewhere: Callable[[], Sequence[RemoteMover]]) -> AskedDigests:
    """The digests of blocks whose layers lie here and in other processes: the sum of the digests of the parts.

    `elsewhere` is called for each question, because movers are made anew. The digests raise EngineFault if a part
    computes none.
    """

    def ask(ids: Sequence[int], division: Division) -> Callable[[], Sequence[int]]:
        waiting = [part.ask_digests(ids, division) for part in elsewhere()]

        def add_up() -> Sequence[int]:
            total = here(ids, division)
            for theirs in waiting:
                total = [(mine + their) % DIGEST_MODULUS for mine, their in zip(total, theirs(), strict=True)]
            return total

        return add_up

    return AskedDigests(ask)
