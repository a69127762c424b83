"""The thread that owns a node's transfer agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.clock import Clock
from baton.errors import TransferCause, TransferFailed
from kv_transfer.backends.base import PeerMemory, ReadRange, TransferBackend


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


MoverEvent = Connected | ConnectFailed | ReadDone | ReadFailed


class Mover:
    """Posts, polls and pumps in one thread; every method may be called from any thread and returns at once."""

    agent_metadata: bytes

    def __init__(
        self,
        backend_factory: Callable[[], TransferBackend],
        deliver: Callable[[MoverEvent], None],
        clock: Clock,
    ) -> None:
        raise NotImplementedError

    @property
    def reads_in_flight(self) -> int:
        """Reads that may still write to their local blocks, queued ones not counted."""
        raise NotImplementedError

    @property
    def stuck(self) -> int:
        """Those of them that have made no progress for a second, or failed in a way that may still write."""
        raise NotImplementedError

    def start(self) -> None:
        """Make the agent; returns when it is up, raises its error."""
        raise NotImplementedError

    def connect(self, peer: PeerMemory) -> None:
        """Answered by Connected or ConnectFailed."""
        raise NotImplementedError

    def read(self, read_id: int, incarnation: str, ranges: Sequence[ReadRange]) -> None:
        """Answered by exactly one ReadDone or ReadFailed, unless the peer neither answers nor dies.

        Raises ValueError for a read id that is in use.
        """
        raise NotImplementedError

    def disconnect(self, incarnation: str) -> None:
        """Drop a peer. Its queued reads fail with CANCELLED; those in flight end first and are reported as usual."""
        raise NotImplementedError

    def set_open_leases(self, num_leases: int) -> None:
        """Sender side: how many leases are out. Pumps while there is one."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the thread and the agent; waits a bounded time for reads in flight."""
        raise NotImplementedError
