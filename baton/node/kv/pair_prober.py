"""Carries out join probes: brings time and the mover's events to `JoinProbes`, and does what it says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from baton.background import current_watch
from baton.errors import TransferFailed
from baton.messages.ids import Peer
from baton.messages.node_report import KV_PAIR_SLOW, KV_PROBE_FAILED
from baton.observe.log_limit import LimitedLog
from kv_transfer.link.link_messages import ReaderMessage
from kv_transfer.mover.part_mover import (
    BlockFilled,
    BlocksDigested,
    DigestsFailed,
    FillFailed,
    MoverEvent,
    ReadDone,
    ReadFailed,
    ReadStalled,
)
from kv_transfer.mover.parts_mover import PartsMover
from kv_transfer.piece_plan import ReadRange
from kv_transfer.receiver.join_probe import JoinProbes
from kv_transfer.receiver.probe_values import (
    EndLink,
    PairProven,
    ProbeAgain,
    ProbeEffect,
    ReadProbe,
    RefuseWaiting,
    ReportFailure,
    ReportSlow,
)
from kv_transfer.receiver.transfer_values import AbandonRead, TellSender

_log = logging.getLogger(__name__)


class PairProber:
    """The shell of one reader's probes. Belongs to the event loop."""

    def __init__(
        self,
        probes: JoinProbes,
        mover: PartsMover,
        tell: Callable[[str, ReaderMessage], None],
        proven: Callable[[str], None],
        end_link: Callable[[str, TransferFailed], None],
        open_link: Callable[[Peer], None],
        refuse: Callable[[str, TransferFailed], None],
        lane: Callable[[], str] = str,
    ) -> None:
        """`tell` sends a message on the link to an incarnation. `proven` is called when an incarnation may be used.
        `end_link` ends a link with an error; `open_link` opens one, unless there is one. `refuse` refuses
        the requests that wait for an incarnation. `lane` names the transport of the latest read, as far as it is known.
        """
        self.probes = probes
        self._mover = mover
        self._tell = tell
        self._proven = proven
        self._end_link = end_link
        self._open_link = open_link
        self._refuse = refuse
        self._lane = lane
        self._watch = current_watch.get()
        self._log = LimitedLog(_log)
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        """When the timer fires, on the loop's clock."""
        self._closed = False

    def started(self) -> None:
        """The mover is up."""
        # The first one is filled for the readers of this node.
        self.probes.local_blocks = self._mover.probe_blocks[1:]

    def close(self) -> None:
        """Carry nothing out any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def handle(self, event: MoverEvent) -> bool:
        """Take an event of the mover; False: it is not about a probe."""
        match event:
            case BlockFilled(read_id, digests):
                effects = self.probes.filled(read_id, digests)
            case FillFailed(read_id, detail):
                effects = self.probes.failed(read_id, detail)
            case ReadDone(read_id, num_bytes, _, seconds) if read_id < 0:
                effects = self.probes.read_done(read_id, num_bytes, seconds, self._lane())
            case BlocksDigested(read_id, digests) if read_id < 0:
                effects = self.probes.digested(read_id, digests)
            case DigestsFailed(read_id, detail) if read_id < 0:
                effects = self.probes.failed(read_id, detail)
            case ReadFailed(read_id, cause, detail) if read_id < 0:
                effects = self.probes.read_failed(read_id, cause, detail)
            case ReadStalled(read_id, detail) if read_id < 0:
                effects = self.probes.read_stalled(read_id, detail)
            case _:
                return False
        self.carry_out(effects)
        return True

    def carry_out(self, effects: Iterable[ProbeEffect]) -> None:
        """Do what the probes say, and set the timer for what they wait for."""
        for effect in effects if not self._closed else ():
            match effect:
                case TellSender(incarnation, message):
                    self._tell(incarnation, message)
                case ReadProbe(read_id, incarnation) as read:
                    local = read.local_sub_block
                    ranges = [ReadRange(local, read.remote_sub_block, 1, read.group)]
                    if read.seed:
                        self._mover.fill(read_id, read.local_block, read.seed, read.group)
                    self._mover.read(read_id, incarnation, ranges, (local,) if read.seed else (), read.local_parts)
                case AbandonRead(read_id):
                    self._mover.abandon(read_id)
                case PairProven(incarnation):
                    self._proven(incarnation)
                case EndLink(incarnation, error):
                    self._end_link(incarnation, error)
                case RefuseWaiting(incarnation, error):
                    self._refuse(incarnation, error)
                case ProbeAgain(source):
                    self._open_link(source)
                case ReportSlow(detail):
                    self._log.happened("%s: %s", KV_PAIR_SLOW, detail)
                case ReportFailure(detail, count):
                    self._log.happened("%s, %d in a row: %s", KV_PROBE_FAILED, count, detail)
        self._set_timer()

    def _set_timer(self) -> None:
        loop, pause_s = asyncio.get_running_loop(), self.probes.next_tick_s()
        if self._closed or pause_s is None:
            return
        due = loop.time() + pause_s
        if self._due is not None and self._due <= due:
            # A timer that fires too early finds nothing to do, and sets the next one.
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = loop.call_at(due, self._watch.guarded(self._tick, "probes"))

    def _tick(self) -> None:
        self._timer = self._due = None
        self.carry_out(self.probes.tick())
