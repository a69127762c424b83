"""What the mover answers. Delivered from its thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.errors import TransferCause, TransferFailed


@dataclass(frozen=True, slots=True)
class Connected:
    """The peer's blocks can be read."""

    incarnation: str


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    """The peer's blocks can't be read."""

    incarnation: str
    error: TransferFailed


@dataclass(frozen=True, slots=True)
class ReadDone:
    """All bytes of a read are here."""

    read_id: int
    num_bytes: int
    post_s: float
    """Seconds spent in the backend's post calls."""
    total_s: float
    """Seconds from the call of `read` on."""
    num_ranges: int
    """Ranges that were posted (a long read is posted in pieces)."""


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A read brought nothing usable, and nothing of it writes to its local blocks any more."""

    read_id: int
    cause: TransferCause
    story: str


@dataclass(frozen=True, slots=True)
class ReadStalled:
    """Nothing of a read has arrived for too long. It may still write: ReadDone or ReadFailed answers it, if ever."""

    read_id: int
    story: str


@dataclass(frozen=True, slots=True)
class BlocksDigested:
    """Of some blocks of a read, as they were when it had filled them; may come before or after ReadDone."""

    read_id: int
    digests: Mapping[int, int]
    """By local block."""


@dataclass(frozen=True, slots=True)
class NotDigested:
    """The digests of a read's blocks can't be computed."""

    read_id: int
    story: str


DigestEvent = BlocksDigested | NotDigested
MoverEvent = Connected | ConnectFailed | ReadDone | ReadFailed | ReadStalled | DigestEvent
