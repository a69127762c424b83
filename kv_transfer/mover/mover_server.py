"""The end of a part's stream in the process that holds the part: it runs a mover for the node at the other end.

One thread talks (`MoverServer.serve`). What takes time, making and stopping the agent and computing digests that the
node asks for, is done one after the other by a second thread, which may hang in a call into the agent or a device: then
the process ends without it. The third is the mover's own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from socket import socket

from baton.background import BackgroundWatch, current_watch
from baton.clock import Clock, SystemClock
from baton.engine.runner import KVMemory
from baton.errors import BackgroundFault
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.digest_definition import BlockDigests
from baton.runner.blocks.sub_blocks import Division
from kv_transfer.backends.base import PeerMemory, TransferBackend
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.mover.digest_thread import DaemonWorker
from kv_transfer.mover.message_stream import MessageStream, StreamEnded, StreamLost
from kv_transfer.mover.mover import Mover
from kv_transfer.mover.part_mover import ConnectFailed, MoverEvent
from kv_transfer.mover.pieces import WindowLimits
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
    read_to_part,
    write_from_part,
)
from kv_transfer.piece_plan import ReadRange

_log = logging.getLogger(__name__)


class MoverServer:
    """Serves one stream with one mover at a time."""

    def __init__(
        self,
        stream: socket,
        memory: KVMemory,
        make_backend: Callable[[str, KVMemory], TransferBackend] = NixlBackend,
        digests: BlockDigests | None = None,
        clock: Clock | None = None,
        window: WindowLimits | None = None,
        stop_within_s: float = STOP_WITHIN_S,
    ) -> None:
        """`memory` is the part's, with its layers and the layout of the model. `make_backend` makes an agent of a name
        over it. `digests` computes digests of its blocks; None: the usual way. `stop_within_s`: how long `serve` waits
        for the mover to stop.
        """
        self._stream = MessageStream(stream)
        self._memory = memory
        self._make_backend = make_backend
        self._digests = digests or block_digests(memory)
        self._clock = clock or SystemClock()
        self._window = window
        self._stop_within_s = stop_within_s
        self._mover: Mover | None = None
        self._speaking = threading.Lock()
        """Guards the next one, while an event of that mover is queued."""
        self._speaker: object = None
        """Stands for the mover whose events the node is told. One that was stopped may go on in a call into its agent,
        and must not speak into the stream of the next one."""
        self._worker = DaemonWorker("baton-part")
        self._watch = BackgroundWatch(self._work_failed)
        self.counters: Counter[str] = Counter()
        """Calls for which there was no mover, and events of movers that were stopped, by kind."""

    def serve(self) -> None:
        """Do what the node says until the stream ends. Then the mover is stopped, and nothing of it writes any more
        unless it did not stop in time. What hangs here does not hold up the end of the process.

        Raises StreamLost if what came is no message.
        """
        try:
            self._stream.run(lambda frame: self._received(read_to_part(frame)))
        except StreamEnded as end:
            _log.info("the node of this part is gone: %s", end)
        finally:
            self._worker.submit(self._stop_mover)
            self._worker.shutdown(wait=False)
            if not self._worker.join(self._stop_within_s):
                _log.error("the mover of this part did not stop within %g s: its process must end", self._stop_within_s)

    def _received(self, message: ToPart) -> None:
        match message:
            case StartMover(agent, stall_s):
                self._in_worker(lambda: self._start_mover(agent, stall_s))
            case StopMover():
                self._in_worker(self._stop_and_say)
            case DigestBlocks():
                self._in_worker(lambda: self._answer_digests(message))
            case _ if (mover := self._mover) is not None:
                self._tell(mover, message)
            case _:
                self.counters[f"{type(message).__name__}_unknown"] += 1

    def _tell(self, mover: Mover, message: ToPart) -> None:
        match message:
            case PeerMemory():
                mover.connect(message)
            case DisconnectPeer(agent):
                mover.disconnect(agent)
            case ReadBlocks(read_id, agent, to_digest=to_digest, digest_parts=digest_parts):
                mover.read(read_id, agent, self._ranges(message), to_digest, digest_parts)
            case CancelRead(read_id):
                mover.abandon(read_id)
            case FillBlock(fill_id, block, seed, group):
                if not 0 <= block < self._memory.num_all_blocks:
                    raise StreamLost(f"block {block} is to be filled, and there are {self._memory.num_all_blocks}")
                if group >= self._num_groups:
                    raise StreamLost(f"a block of group {group} is to be filled, and there are {self._num_groups}")
                mover.fill(fill_id, block, seed, group)
            case SetNumReaders(num_readers):
                mover.set_num_readers(num_readers)
            case AskTurns(question):
                self._say(Turns(question, *mover.turns, mover.figures.stuck_reads))

    def _ranges(self, message: ReadBlocks) -> Sequence[ReadRange]:
        """The ranges of a message whose numbers are in bounds; the mover checks those of blocks."""
        if not 1 <= message.digest_parts <= self._block_size:
            raise StreamLost(f"a block of {self._block_size} tokens has no {message.digest_parts} digests")
        if message.groups and max(message.groups) >= self._num_groups:
            raise StreamLost(f"a read is of group {max(message.groups)}, and there are {self._num_groups}")
        try:
            return message.ranges
        except ValueError as error:
            raise StreamLost(f"a read has ranges without some of their numbers: {error}") from error

    @property
    def _num_groups(self) -> int:
        return len(self._memory.layout.groups) if self._memory.layout is not None else 1

    @property
    def _block_size(self) -> int:
        return self._memory.layout.block_size if self._memory.layout is not None else 1

    def _say(self, message: FromPart) -> None:
        self._stream.send(write_from_part(message))

    # Below: called by the mover.

    def _deliver(self, speaker: object, event: MoverEvent) -> None:
        with self._speaking:
            if speaker is not self._speaker:
                self.counters[f"{type(event).__name__}_late"] += 1
            elif isinstance(event, ConnectFailed):
                self._say(PeerNotConnected(event.incarnation, event.error.cause, event.error.detail))
            else:
                self._say(event)

    def _work_failed(self, fault: BackgroundFault) -> None:
        try:
            self._say(MoverFault(str(fault)))
        except StreamLost:
            _log.error("the node of this part can't be told of a fault, which ends it: %s", fault)
            self._stream.cut()

    # Below: called by the worker's thread.

    def _in_worker(self, work: Callable[[], None]) -> None:
        self._worker.submit(self._watch.guarded(work, "part"))

    def _start_mover(self, agent: str, stall_s: float) -> None:
        token = current_watch.set(self._watch)
        try:
            self._stop_mover()
            make, speaker = partial(self._make_backend, agent, self._memory), object()
            deliver = partial(self._deliver, speaker)
            mover = Mover(make, deliver, self._clock, self._window, self._digests, stall_s=stall_s)
            mover.start()
        except Exception as error:
            _log.exception("could not make a transfer agent")
            self._say(MoverNotUp(f"{type(error).__name__}: {error}"))
        else:
            # The new mover is told nothing before this, so it has said nothing.
            self._speaker = speaker
            self._mover = mover
            memory = self._memory
            counts = (memory.num_blocks, memory.num_probe_blocks, memory.kind, memory.device_id)
            self._say(MoverUp(mover.agent_metadata, memory.base_address, *counts, memory.layers))
        finally:
            current_watch.reset(token)

    def _stop_and_say(self) -> None:
        self._stop_mover()
        self._say(MoverStopped())

    def _stop_mover(self) -> None:
        mover, self._mover = self._mover, None
        if mover is not None:
            mover.stop()
            with self._speaking:
                self._speaker = None

    def _answer_digests(self, asked: DigestBlocks) -> None:
        try:
            self._check_asked(asked)
            digests = self._digests(asked.ids, Division(asked.parts, asked.group))
        except Exception as error:
            _log.exception("could not compute digests of blocks here")
            self._say(DigestsNotFound(asked.question, repr(error)))
        else:
            self._say(DigestsFound(asked.question, digests))

    def _check_asked(self, asked: DigestBlocks) -> None:
        num_sub_blocks = self._memory.num_all_blocks * asked.parts
        if not (1 <= asked.parts <= self._block_size and 0 <= asked.group < self._num_groups):
            raise ValueError(f"blocks have no {asked.parts} parts of group {asked.group}")
        if asked.ids and not 0 <= min(asked.ids) <= max(asked.ids) < num_sub_blocks:
            raise ValueError(f"sub-blocks {min(asked.ids)}..{max(asked.ids)} are not all in 0..{num_sub_blocks - 1}")
