"""The states of a divided read, and what `PartsMerge` answers with."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kv_transfer.backends.base import PeerMemory
from kv_transfer.mover.part_mover import MoverEvent
from kv_transfer.piece_plan import ReadRange


class MergeState(enum.Enum):
    """How far a divided read is."""

    READING = "sub-reads are out, and none has failed"
    FAILING = "one has failed; the others are abandoned and may still write"
    DIGESTING = "all bytes are here, and some digests are to come"
    OVER = "nothing is to come"


class MergeEvent(enum.Enum):
    """What happens to a divided read."""

    ONE_DONE = "a sub-read is done, and others are out"
    ONE_FAILED = "a sub-read failed, and others are out"
    LAST_DONE = "the last sub-read is done"
    LAST_FAILED = "the last sub-read failed"
    DIGESTED = "digests were delivered, and others are to come"
    ALL_DIGESTED = "no more digests are to come"


_S, _E = MergeState, MergeEvent
MERGE_TABLE: dict[tuple[MergeState, MergeEvent], MergeState] = {
    (_S.READING, _E.ONE_DONE): _S.READING,
    (_S.READING, _E.ONE_FAILED): _S.FAILING,
    (_S.READING, _E.LAST_DONE): _S.DIGESTING,
    (_S.READING, _E.LAST_FAILED): _S.OVER,
    (_S.READING, _E.DIGESTED): _S.READING,
    (_S.READING, _E.ALL_DIGESTED): _S.READING,
    (_S.FAILING, _E.ONE_DONE): _S.FAILING,
    (_S.FAILING, _E.ONE_FAILED): _S.FAILING,
    (_S.FAILING, _E.LAST_DONE): _S.OVER,
    (_S.FAILING, _E.LAST_FAILED): _S.OVER,
    (_S.DIGESTING, _E.DIGESTED): _S.DIGESTING,
    (_S.DIGESTING, _E.ALL_DIGESTED): _S.OVER,
}


@dataclass(frozen=True, slots=True)
class ConnectPart:
    """Tell a part to connect to the memory of a peer's part."""

    part: int
    peer: PeerMemory


@dataclass(frozen=True, slots=True)
class DisconnectPart:
    """Tell a part to drop a peer's part."""

    part: int
    agent: str


@dataclass(frozen=True, slots=True)
class ReadPart:
    """Tell a part to start a sub-read."""

    part: int
    read_id: int
    agent: str
    ranges: Sequence[ReadRange]
    to_digest: Collection[int]
    digest_parts: int


@dataclass(frozen=True, slots=True)
class AbandonPart:
    """Tell a part to abandon a sub-read."""

    part: int
    read_id: int


@dataclass(frozen=True, slots=True)
class FillPart:
    """Tell a part to fill its part of a block."""

    part: int
    fill_id: int
    block: int
    seed: str
    group: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tell the node."""

    event: MoverEvent


MergeEffect = ConnectPart | DisconnectPart | ReadPart | AbandonPart | FillPart | Deliver
