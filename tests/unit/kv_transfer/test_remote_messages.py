"""The messages of a part's stream are the same after encoding and decoding, and anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest

from baton.errors import TransferCause
from baton.v1 import part_mover_pb2
from kv_transfer.backends.base import PeerMemory
from kv_transfer.mover.message_stream import MAX_FRAME, StreamLost
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
from kv_transfer.mover.remote_messages import (
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
    read_to_part,
    write_from_part,
    write_to_part,
)
from kv_transfer.piece_plan import ReadRange

BIG = 2**64 - 1
RANGES = [ReadRange(3, 5, 2, 1), ReadRange(0, 1 << 40, 1)]
PEER = PeerMemory("p/1", b"\x00agent", 1 << 63, 64, 4096, "DRAM", 0, 4, 16, range(3, 7))
TO_PART: list[ToPart] = [
    StartMover("d0.first/1", 2.5),
    PEER,
    PeerMemory("p", b"agent", 4096, 64, 4096, "VRAM", 7),
    DisconnectPeer("p/1"),
    ReadBlocks.of(-(1 << 48), "p/1", RANGES, (6, 7), 4),
    CancelRead(7),
    FillBlock(-3, 65, "seed", 2),
    SetNumReaders(9),
    DigestBlocks(5, (1, 2, 1 << 40), 4, 2),
    AskTurns(8),
    StopMover(),
]
FROM_PART: list[FromPart] = [
    MoverUp(b"agent", 1 << 63, 64, 4, "DRAM", 3, range(3, 7)),
    MoverNotUp("no device"),
    Connected("p/1"),
    *(PeerNotConnected("p/1", cause, "why") for cause in TransferCause),
    ReadDone(1 << 48, 1 << 40, 0.25, 1.5, 12),
    *(ReadFailed(-1, cause, "why") for cause in TransferCause),
    ReadStalled(7, "why"),
    BlocksDigested(7, {0: BIG, 1 << 40: 0}),
    DigestsFailed(7, "why"),
    BlockFilled(-3, {1: BIG, 16: 3}),
    FillFailed(-3, "why"),
    DigestsFound(5, (BIG, 0)),
    DigestsNotFound(5, "why"),
    Turns(8, 1 << 40, True, 2),
    MoverFault("why"),
    MoverStopped(),
]


def test_each_message_is_tried() -> None:
    assert {type(message) for message in TO_PART} == set(get_args(ToPart))
    assert {type(message) for message in FROM_PART} == set(get_args(FromPart))


@pytest.mark.parametrize("message", TO_PART, ids=lambda message: type(message).__name__)
def test_what_a_node_says_is_read_as_it_was_written(message: ToPart) -> None:
    read = read_to_part(write_to_part(message))
    if isinstance(message, ReadBlocks):
        assert isinstance(read, ReadBlocks)
        assert (read.ranges, read.read_id, list(read.to_digest)) == (RANGES, message.read_id, [6, 7])
    else:
        assert read == message


@pytest.mark.parametrize("message", FROM_PART, ids=lambda message: type(message).__name__)
def test_what_a_part_says_is_read_as_it_was_written(message: FromPart) -> None:
    assert read_from_part(write_from_part(message)) == message


@pytest.mark.parametrize("read", [read_to_part, read_from_part])
@pytest.mark.parametrize("frame", [b"", b"\xff", b"GET / HTTP/1.1", b"\x0a\xff", b"\xfa\x01\x00"])
def test_bytes_that_are_no_message_are_refused(read: Callable[[bytes], Any], frame: bytes) -> None:
    with pytest.raises(StreamLost):
        read(frame)


def test_a_cause_of_no_version_is_refused() -> None:
    frame = part_mover_pb2.FromPart(not_read=part_mover_pb2.BlocksNotRead(cause=99)).SerializeToString()  # type: ignore[arg-type]
    with pytest.raises(StreamLost):
        read_from_part(frame)


def test_a_read_of_very_many_ranges_is_one_message() -> None:
    ranges = [ReadRange(2 * n, 3 * n, 1) for n in range(100_000)]
    frame = write_to_part(ReadBlocks.of(1, "p", ranges, range(200_000), 2))
    assert len(frame) < MAX_FRAME // 8
