"""What a node and the process of one of its parts say to each other about the mover there, as plain values.

The node asks with these values and with `PeerMemory`, which means connect. The part answers with these values and with
the events of its mover.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from baton.errors import TransferCause
from kv_transfer.backends.base import PeerMemory
from kv_transfer.mover.mover_events import (
    BlockFilled,
    BlocksDigested,
    Connected,
    DigestsFailed,
    FillFailed,
    ReadDone,
    ReadFailed,
    ReadStalled,
)
from kv_transfer.piece_plan import ReadRange

STOP_WITHIN_S = 20.0
"""How long a part may take to stop its mover: `Mover.stop` waits for reads in flight, and then for a thread."""


@dataclass(frozen=True, slots=True)
class StartMover:
    """Node: make an agent of this name. `MoverUp` or `MoverNotUp` answers."""

    agent: str
    stall_s: float
    """Seconds without progress after which a read is reported as stalled."""


@dataclass(frozen=True, slots=True)
class DisconnectPeer:
    """Node: drop the peer with this agent."""

    agent: str


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Node: read these sub-blocks. Each of the first lists has an element for each range."""

    read_id: int
    agent: str
    local_blocks: Sequence[int]
    remote_blocks: Sequence[int]
    counts: Sequence[int]
    groups: Sequence[int]
    to_digest: Sequence[int]
    digest_parts: int

    @classmethod
    def of(
        cls, read_id: int, agent: str, ranges: Sequence[ReadRange], to_digest: Collection[int], digest_parts: int
    ) -> ReadBlocks:
        """The message about these ranges."""
        return cls(
            read_id,
            agent,
            [r.local_block for r in ranges],
            [r.remote_block for r in ranges],
            [r.count for r in ranges],
            [r.group for r in ranges],
            list(to_digest),
            digest_parts,
        )

    @property
    def ranges(self) -> Sequence[ReadRange]:
        """The ranges. Raises ValueError if the lists differ in length."""
        lists = (self.local_blocks, self.remote_blocks, self.counts, self.groups)
        return [ReadRange(*values) for values in zip(*lists, strict=True)]


@dataclass(frozen=True, slots=True)
class CancelRead:
    """Node: post no more of a read."""

    read_id: int


@dataclass(frozen=True, slots=True)
class FillBlock:
    """Node: fill a block with the bytes that belong to a seed."""

    fill_id: int
    block: int
    seed: str
    group: int
    """The group of layers of which digests are answered."""


@dataclass(frozen=True, slots=True)
class SetNumReaders:
    """Node: so many leases and probes may be read."""

    num_readers: int


@dataclass(frozen=True, slots=True)
class DigestBlocks:
    """Node: compute the digests of these sub-blocks. `DigestsFound` or `DigestsNotFound` answers."""

    question: int
    ids: Sequence[int]
    parts: int
    group: int


@dataclass(frozen=True, slots=True)
class AskTurns:
    """Node: does your thread go on? `Turns` answers."""

    question: int


@dataclass(frozen=True, slots=True)
class StopMover:
    """Node: stop the mover. `MoverStopped` answers."""


@dataclass(frozen=True, slots=True)
class MoverUp:
    """Part: the agent is up, over this memory."""

    agent_metadata: bytes
    base_address: int
    num_blocks: int
    num_probe_blocks: int
    kind: str
    device_id: int
    layers: range | None


@dataclass(frozen=True, slots=True)
class MoverNotUp:
    """Part: the agent could not be made."""

    detail: str


@dataclass(frozen=True, slots=True)
class PeerNotConnected:
    """Part: a peer's blocks can't be read."""

    incarnation: str
    """The name of its agent."""
    cause: TransferCause
    detail: str


@dataclass(frozen=True, slots=True)
class DigestsFound:
    """Part: the digests that were asked for."""

    question: int
    digests: Sequence[int]


@dataclass(frozen=True, slots=True)
class DigestsNotFound:
    """Part: those digests can't be computed."""

    question: int
    detail: str


@dataclass(frozen=True, slots=True)
class Turns:
    """Part: how far the mover's thread is."""

    question: int
    num_turns: int
    in_turn: bool
    """Whether it works, and does not wait for something to do."""
    stuck_reads: int


@dataclass(frozen=True, slots=True)
class MoverFault:
    """Part: the mover has ended by itself."""

    detail: str


@dataclass(frozen=True, slots=True)
class MoverStopped:
    """Part: the mover was stopped, and may be started again."""


ToPart = (
    StartMover
    | PeerMemory
    | DisconnectPeer
    | ReadBlocks
    | CancelRead
    | FillBlock
    | SetNumReaders
    | DigestBlocks
    | AskTurns
    | StopMover
)
FromPart = (
    MoverUp
    | MoverNotUp
    | Connected
    | PeerNotConnected
    | ReadDone
    | ReadFailed
    | ReadStalled
    | BlocksDigested
    | DigestsFailed
    | BlockFilled
    | FillFailed
    | DigestsFound
    | DigestsNotFound
    | Turns
    | MoverFault
    | MoverStopped
)
