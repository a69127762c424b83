"""What a node and the process of one of its parts say to each other about the mover there, as plain values, and as
Protocol Buffers and back.

The node asks with these values and with `PeerMemory`, which means connect. The part answers with these values and with
the events of its mover. Reading checks shapes; what numbers mean is checked by whoever uses them. All codecs are
derived from the fields of the classes and of the messages in `part_mover.proto`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from baton.errors import InvalidRequest, TransferCause
from baton.v1 import part_mover_pb2
from baton.wire.codec.derived import Codec, OneOfCodec
from kv_transfer.backends.base import PeerMemory
from kv_transfer.link.link_codec import LAYERS
from kv_transfer.mover.message_stream import StreamLost
from kv_transfer.mover.part_mover import (
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


T = TypeVar("T")
M = TypeVar("M", bound=Message)
_TO_PART: OneOfCodec[ToPart, part_mover_pb2.ToPart] = OneOfCodec(
    part_mover_pb2.ToPart,
    Codec(StartMover, part_mover_pb2.StartMover),
    Codec(PeerMemory, part_mover_pb2.ConnectPeer, LAYERS),
    Codec(DisconnectPeer, part_mover_pb2.DisconnectPeer),
    Codec(ReadBlocks, part_mover_pb2.ReadBlocks),
    Codec(CancelRead, part_mover_pb2.CancelRead),
    Codec(FillBlock, part_mover_pb2.FillBlock),
    Codec(SetNumReaders, part_mover_pb2.SetNumReaders),
    Codec(DigestBlocks, part_mover_pb2.DigestBlocks),
    Codec(AskTurns, part_mover_pb2.AskTurns),
    Codec(StopMover, part_mover_pb2.StopMover),
)
_FROM_PART: OneOfCodec[FromPart, part_mover_pb2.FromPart] = OneOfCodec(
    part_mover_pb2.FromPart,
    Codec(MoverUp, part_mover_pb2.MoverUp, LAYERS),
    Codec(MoverNotUp, part_mover_pb2.MoverNotUp),
    Codec(Connected, part_mover_pb2.PeerConnected),
    Codec(PeerNotConnected, part_mover_pb2.PeerNotConnected),
    Codec(ReadDone, part_mover_pb2.BlocksRead),
    Codec(ReadFailed, part_mover_pb2.BlocksNotRead),
    Codec(ReadStalled, part_mover_pb2.BlocksStalled),
    Codec(BlocksDigested, part_mover_pb2.DigestsOfRead),
    Codec(DigestsFailed, part_mover_pb2.NoDigestsOfRead),
    Codec(BlockFilled, part_mover_pb2.BlockIsFilled),
    Codec(FillFailed, part_mover_pb2.BlockNotFilled),
    Codec(DigestsFound, part_mover_pb2.DigestsFound),
    Codec(DigestsNotFound, part_mover_pb2.DigestsNotFound),
    Codec(Turns, part_mover_pb2.Turns),
    Codec(MoverFault, part_mover_pb2.MoverFault),
    Codec(MoverStopped, part_mover_pb2.MoverStopped),
)


def write_to_part(message: ToPart) -> bytes:
    """A node's message. Raises ValueError for numbers that are out of its fields' bounds."""
    return _TO_PART.to_pb(message).SerializeToString()


def read_to_part(frame: bytes) -> ToPart:
    """Raises StreamLost for bytes that are no such message."""
    return _read(_TO_PART, part_mover_pb2.ToPart, frame)


def write_from_part(message: FromPart) -> bytes:
    """A part's message."""
    return _FROM_PART.to_pb(message).SerializeToString()


def read_from_part(frame: bytes) -> FromPart:
    """Raises StreamLost for bytes that are no such message."""
    return _read(_FROM_PART, part_mover_pb2.FromPart, frame)


def _read(codec: OneOfCodec[T, M], kind: type[M], frame: bytes) -> T:
    try:
        message = codec.from_pb(kind.FromString(frame))
    except (DecodeError, InvalidRequest) as error:
        raise StreamLost(f"{len(frame)} bytes that are no message: {error}") from error
    if message is None:
        raise StreamLost("a message that is none of this version")
    return message
