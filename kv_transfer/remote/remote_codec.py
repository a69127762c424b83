"""The messages of a part's stream as Protocol Buffers and back. Reading checks shapes; what numbers mean is checked by
whoever uses them.

All codecs are derived from the fields of the classes and of the messages in `part_mover.proto`.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from baton.errors import InvalidRequest
from baton.v1 import part_mover_pb2
from baton.wire.codec.derived import Codec, OneOfCodec
from kv_transfer.backends.base import PeerMemory
from kv_transfer.link.link_codec import LAYERS
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
from kv_transfer.remote import remote_messages as said
from kv_transfer.remote.message_stream import StreamLost
from kv_transfer.remote.remote_messages import FromPart, ToPart

T = TypeVar("T")
M = TypeVar("M", bound=Message)
_TO_PART: OneOfCodec[ToPart, part_mover_pb2.ToPart] = OneOfCodec(
    part_mover_pb2.ToPart,
    Codec(said.StartMover, part_mover_pb2.StartMover),
    Codec(PeerMemory, part_mover_pb2.ConnectPeer, LAYERS),
    Codec(said.DisconnectPeer, part_mover_pb2.DisconnectPeer),
    Codec(said.ReadBlocks, part_mover_pb2.ReadBlocks),
    Codec(said.CancelRead, part_mover_pb2.CancelRead),
    Codec(said.FillBlock, part_mover_pb2.FillBlock),
    Codec(said.SetNumReaders, part_mover_pb2.SetNumReaders),
    Codec(said.DigestBlocks, part_mover_pb2.DigestBlocks),
    Codec(said.AskTurns, part_mover_pb2.AskTurns),
    Codec(said.StopMover, part_mover_pb2.StopMover),
)
_FROM_PART: OneOfCodec[FromPart, part_mover_pb2.FromPart] = OneOfCodec(
    part_mover_pb2.FromPart,
    Codec(said.MoverUp, part_mover_pb2.MoverUp, LAYERS),
    Codec(said.MoverNotUp, part_mover_pb2.MoverNotUp),
    Codec(Connected, part_mover_pb2.PeerConnected),
    Codec(said.PeerNotConnected, part_mover_pb2.PeerNotConnected),
    Codec(ReadDone, part_mover_pb2.BlocksRead),
    Codec(ReadFailed, part_mover_pb2.BlocksNotRead),
    Codec(ReadStalled, part_mover_pb2.BlocksStalled),
    Codec(BlocksDigested, part_mover_pb2.DigestsOfRead),
    Codec(DigestsFailed, part_mover_pb2.NoDigestsOfRead),
    Codec(BlockFilled, part_mover_pb2.BlockIsFilled),
    Codec(FillFailed, part_mover_pb2.BlockNotFilled),
    Codec(said.DigestsFound, part_mover_pb2.DigestsFound),
    Codec(said.DigestsNotFound, part_mover_pb2.DigestsNotFound),
    Codec(said.Turns, part_mover_pb2.Turns),
    Codec(said.MoverFault, part_mover_pb2.MoverFault),
    Codec(said.MoverStopped, part_mover_pb2.MoverStopped),
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
