"""The interface of the movers of a node's parts, of the one in this process (`mover.py`) and of those in others
(`remote_mover.py`), and the events by which they answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.errors import TransferCause, TransferFailed
from kv_transfer.backends.base import PeerMemory
from kv_transfer.piece_plan import ReadRange


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
    num_descriptors: int
    """Number of descriptors that were posted; a long read is posted in pieces, which may cut a range."""


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """A read brought nothing usable, and none of it writes to its local blocks any more."""

    read_id: int
    cause: TransferCause
    detail: str


@dataclass(frozen=True, slots=True)
class ReadStalled:
    """No piece of a read has arrived for too long. It may still write; if it ends, ReadDone or ReadFailed follows."""

    read_id: int
    detail: str


@dataclass(frozen=True, slots=True)
class BlocksDigested:
    """Digests of some sub-blocks of a read, as they were when it had filled them. Comes before or after ReadDone."""

    read_id: int
    digests: Mapping[int, int]
    """The digests, by local sub-block, which are counted as in the call of `read`."""


@dataclass(frozen=True, slots=True)
class DigestsFailed:
    """The digests of a read's blocks could not be computed."""

    read_id: int
    detail: str


@dataclass(frozen=True, slots=True)
class BlockFilled:
    """A block of this node holds the bytes that belong to a seed."""

    fill_id: int
    digests: Mapping[int, int]
    """Digests of its last sub-block, by the number of sub-blocks in a block; 1: of the whole block."""


@dataclass(frozen=True, slots=True)
class FillFailed:
    """A block of this node could not be filled."""

    fill_id: int
    detail: str


DigestEvent = BlocksDigested | DigestsFailed
MoverEvent = Connected | ConnectFailed | ReadDone | ReadFailed | ReadStalled | DigestEvent | BlockFilled | FillFailed
DeliverEvent = Callable[[MoverEvent], None]
"""Takes the events of a mover, in any thread, and returns at once."""


@dataclass(slots=True)
class ReadFigures:
    """What the reads of a mover have brought, and how many of them are not over."""

    bytes_arrived: int = 0
    """Bytes that all reads have brought."""
    arrived_at: float | None = None
    """When the last of them arrived, on the mover's clock; None before."""
    reads_in_flight: int = 0
    """Number of reads that may still write to their local blocks."""
    stuck_reads: int = 0
    """Number of those that have made no progress for `STUCK_AFTER_S`, or that failed and may still write."""


class PartMover(Protocol):
    """Reads blocks of peers into one memory, with an agent of its own. One contract suite runs over all of them.

    Methods may be called from any thread, return at once, and answer by events, `start` and `stop` excepted. The calls
    of one thread are executed in order.
    """

    @property
    def figures(self) -> ReadFigures:
        """What its reads have brought, and how many of them are not over."""
        ...

    @property
    def fault(self) -> BaseException | None:
        """What ended the mover, if it has ended by itself; reads in flight then stay counted."""
        ...

    def start(self) -> None:
        """Make the agent and return when it is up; raises what making it raised."""
        ...

    def published(self, name: str) -> PeerMemory:
        """This node's memory as it is published to readers, once the agent, which has that name, is up."""
        ...

    def connect(self, peer: PeerMemory) -> None:
        """Make a peer's blocks readable; answered by Connected or ConnectFailed. Connecting again with equal values
        changes nothing.
        """
        ...

    def read(
        self,
        read_id: int,
        incarnation: str,
        ranges: Sequence[ReadRange],
        to_digest: Collection[int] = (),
        digest_parts: int = 1,
    ) -> None:
        """Read sub-blocks of a peer; answered by one ReadDone or ReadFailed once none of it writes any more.

        Beside ReadDone, each of the local sub-blocks in `to_digest`, all of which are of these ranges, is in one
        BlocksDigested, or DigestsFailed comes. `digest_parts`: how many of those sub-blocks, which may be smaller than
        those that are read, a local block has. Raises ValueError for a read id that is in use. Negative ids are those
        of probes.
        """
        ...

    def fill(self, fill_id: int, block: int, seed: str, group: int = 0) -> None:
        """Fill one of this node's blocks with the bytes that belong to a seed, before any read that is ordered later
        is posted; answered by BlockFilled, with digests as of a block of this group of layers, or by FillFailed."""
        ...

    def abandon(self, read_id: int) -> None:
        """Post no more of a read; it is answered when what is in flight has ended. An unknown read changes nothing."""
        ...

    def disconnect(self, incarnation: str) -> None:
        """Drop a peer. Its reads fail with CANCELLED when what is in flight has ended. Unknown peers are fine."""
        ...

    def set_num_readers(self, num_readers: int) -> None:
        """Set the number of leases and probes that peers may be reading, on a sender. Their reads make progress while
        there is one."""
        ...

    def stop(self) -> None:
        """Cancel what is queued, wait for a while for reads in flight, and end.

        Reads that are still in flight then get no answer and stay counted; the agent and the memory live until the
        process ends. Calls after this one are answered at once, from the calling thread.
        """
        ...

    async def watch_turns(self) -> None:
        """Check, on an event loop until cancelled, that the mover goes on; raises EngineFault when it hangs."""
        ...
