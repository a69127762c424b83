"""The states of a join probe on its reader, its record, and what `JoinProbes` answers with. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.errors import TransferFailed
from baton.machine import Machine
from baton.messages.ids import Peer
from baton.messages.node_report import ProbeFault
from kv_transfer.receiver.block_map import BlockMap
from kv_transfer.receiver.pair_rates import ReadTiming
from kv_transfer.receiver.transfer_values import AbandonRead, TellSender


class ProbeState(enum.Enum):
    """The states of a join probe: how far the known bytes have come."""

    ASKED = enum.auto()
    """The sender was asked to fill a probe block with known bytes."""
    WAITING = enum.auto()
    """The known bytes are there. They can't be read yet: the sender's memory is not connected, no probe block is free
    here, or an earlier probe's read from this sender still runs."""
    READING = enum.auto()
    """The known bytes are being read, or their digest is being computed, or they are read again to be timed."""
    PASSED = enum.auto()
    """The bytes that were read are the known ones: the pair may be used."""
    FAILED = enum.auto()
    """The pair can't be used, and its link ends."""


class ProbeEvent(enum.Enum):
    """What can happen to a join probe, and who reports it."""

    READY = enum.auto()
    """Reported by the sender: the known bytes are there."""
    START = enum.auto()
    """Reported by the probes: the read was ordered."""
    NEXT_GROUP = enum.auto()
    """Reported by the mover: the bytes that were read are the known ones, and there are more groups of layers."""
    MATCH = enum.auto()
    """Reported by the mover: the bytes that were read are the known ones, of the last group of layers."""
    FAIL = enum.auto()
    """Reported by the mover or the probes: other bytes came, or none, or the read failed."""


PROBE_TABLE: dict[tuple[ProbeState, ProbeEvent], ProbeState] = {
    (ProbeState.ASKED, ProbeEvent.READY): ProbeState.WAITING,
    (ProbeState.ASKED, ProbeEvent.FAIL): ProbeState.FAILED,
    (ProbeState.WAITING, ProbeEvent.START): ProbeState.READING,
    (ProbeState.WAITING, ProbeEvent.FAIL): ProbeState.FAILED,
    (ProbeState.READING, ProbeEvent.NEXT_GROUP): ProbeState.ASKED,
    (ProbeState.READING, ProbeEvent.MATCH): ProbeState.PASSED,
    (ProbeState.READING, ProbeEvent.FAIL): ProbeState.FAILED,
}


@dataclass(frozen=True, slots=True)
class ReadProbe:
    """Fill this node's block with the bytes of the seed, then read the sender's block into it and digest it.

    Between blocks of different sizes the last sub-block of each is read and digested.

    These answer with the id: `filled` for the filling; `read_done`, `read_failed` or `read_stalled` for the read;
    `digested` for the digest; `failed` for a filling or a digest that failed.
    """

    read_id: int
    """Negative; the ids of transfers' reads are positive."""
    incarnation: str
    local_block: int
    remote_block: int
    seed: str
    """Empty: read alone, to be timed; nothing is filled or digested."""
    local_parts: int = 1
    """Sub-blocks in a local block: the last one is filled by the read. 1: it is the whole block."""
    remote_parts: int = 1
    """Sub-blocks in a block of the sender, of which the last one is read."""
    group: int = 0
    """The group of layers as a block of which it is read."""

    @property
    def local_sub_block(self) -> int:
        """The sub-block that is filled, by the numbers of `kv_transfer/piece_plan.py`."""
        return (self.local_block + 1) * self.local_parts - 1

    @property
    def remote_sub_block(self) -> int:
        """The sub-block that is read."""
        return (self.remote_block + 1) * self.remote_parts - 1


@dataclass(frozen=True, slots=True)
class PairProven:
    """The sender may be used for requests, as long as its link lives."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class EndLink:
    """End the link to this sender with this error, if there is one."""

    incarnation: str
    error: TransferFailed


@dataclass(frozen=True, slots=True)
class RefuseWaiting:
    """Refuse the requests that wait for this sender; its link stays."""

    incarnation: str
    error: TransferFailed


@dataclass(frozen=True, slots=True)
class ProbeAgain:
    """Open a link to this sender, unless there is one."""

    source: Peer


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Log that a probe failed, and how often it has in a row."""

    detail: str
    count: int


@dataclass(frozen=True, slots=True)
class ReportSlow:
    """Log that a pair of GPUs moves KV through the host."""

    detail: str


ProbeEffect = (
    TellSender
    | ReadProbe
    | AbandonRead
    | PairProven
    | EndLink
    | RefuseWaiting
    | ProbeAgain
    | ReportFailure
    | ReportSlow
)


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """Bounds of a probe's waits and pauses."""

    tick_s: float = 1.0
    """The interval between two ticks."""
    max_quiet_ticks: int = 5
    """A probe times out after so many ticks in which nothing was heard of it, like a handshake after HANDSHAKE_S."""
    max_spared: int = 10
    """How often a probe is spared whose sender is silent and runs, as often as a link is: MAX_SPARED."""
    first_pause_s: float = 1.0
    max_pause_s: float = 60.0
    """The pause before a pair is probed again doubles from `first_pause_s` up to this value."""


@dataclass(slots=True)
class Probe:
    source: Peer
    number: int
    machine: Machine[ProbeState, ProbeEvent]
    sizes: BlockMap
    num_groups: int
    """How many groups of layers are probed, one after the other."""
    memory_kind: str = ""
    """Kind of the sender's memory."""
    group: int = 0
    """The one that is probed now."""
    is_connected: bool = False
    """The sender's memory is connected here."""
    remote_block: int = 0
    """The sender's block with the known bytes."""
    known_digest: int = 0
    read_id: int = 0
    """The id of the read; 0 before there is one."""
    local_block: int = 0
    digest_before: int | None = None
    """Digest of what the local block was filled with before the read."""
    digest: int | None = None
    """Digest of what was read; None: not known yet."""
    is_read: bool = False
    is_right: bool = False
    """The bytes of all groups are the known ones, and are read again to be timed."""
    order: ReadProbe | None = None
    """The read that was ordered."""
    timing: ReadTiming = field(default_factory=ReadTiming)
    quiet_ticks: int = 0
    num_spared: int = 0
    next_tick_at: float = 0.0
    """From when on a tick counts for this probe, on the clock."""
    fault: ProbeFault | None = None
    detail: str = ""
    may_be_gone: bool = False
    """The probe failed in a way in which one fails whose sender dies."""

    @property
    def state(self) -> ProbeState:
        return self.machine.state
