"""What moves bytes between two nodes' KV caches: the contract that every backend keeps.

The rules, which one contract suite checks over all backends:

1. A read is one-sided: the receiver names blocks on both sides, the sender takes no decision. It moves only while the
   receiver polls, and with some transports only while the sender pumps, too.
2. A posted read can't be taken back. Until `poll` says DONE or raises `PeerGone` it may write to its local blocks,
   whatever else is called; so nothing releases it before, and its owner keeps those blocks out of use.
3. Nothing is posted for ranges that don't fit: numbers that a peer sent are checked here, before they become addresses.
4. A backend belongs to one thread, the one that made it.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from baton.engine.runner import KVMemory
from baton.errors import TransferCause, TransferFailed

MEMORY_KINDS = frozenset({"DRAM", "VRAM"})
MAX_AGENT_METADATA = 64 * 1024
_MAX_NAME = 128
_MAX_DEVICE_ID = 1 << 16
_ADDRESS_SPACE = 1 << 64

_log = logging.getLogger(__name__)

ReadHandle = NewType("ReadHandle", int)
"""Names one posted read of one backend; never reused within the backend's life."""


class PeerGone(TransferFailed):
    """The peer can't be read any more, and no read from it writes any more."""

    def __init__(self, story: str = "") -> None:
        super().__init__(TransferCause.PEER_GONE, story)


class BadRange(TransferFailed):
    """Blocks that don't exist or overlap; nothing was posted."""

    def __init__(self, story: str) -> None:
        super().__init__(TransferCause.REFUSED, story)


class ReadStuck(TransferFailed):
    """The read failed in a way that does not rule out that it still writes: nobody uses its blocks until its peer is
    gone."""

    def __init__(self, story: str) -> None:
        super().__init__(TransferCause.PEER_GONE, story)


class ReadsInFlight(Exception):
    """A handle, a peer or an agent was to be dropped while a read may still write: a fault of the caller."""


class ReadState(enum.Enum):
    """Where a posted read stands; failures are raised."""

    IN_PROGRESS = "in_progress"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A sender's KV memory as it is published to receivers. What comes from a peer is checked by `check` before use."""

    incarnation: str
    """Also the name of the sender's transfer agent."""
    agent_metadata: bytes
    """The agent's description of itself; opaque to everything but the backend."""
    base_address: int
    num_blocks: int
    block_bytes: int
    kind: str
    """DRAM or VRAM."""
    device_id: int

    @classmethod
    def of(cls, memory: KVMemory, incarnation: str, agent_metadata: bytes) -> PeerMemory:
        """Describe our own memory for receivers."""
        return cls(
            incarnation=incarnation,
            agent_metadata=agent_metadata,
            base_address=memory.base_address,
            num_blocks=memory.num_blocks,
            block_bytes=memory.block_bytes,
            kind=memory.kind,
            device_id=memory.device_id,
        )

    def check(self, block_bytes: int) -> None:
        """Raise TransferFailed unless this is usable by a receiver whose blocks have `block_bytes` bytes.

        LAYOUT_MISMATCH for another block size, REFUSED for values that no sane sender publishes.
        """
        if self.block_bytes != block_bytes:
            raise TransferFailed(
                TransferCause.LAYOUT_MISMATCH,
                f"blocks of {self.incarnation!r} have {self.block_bytes} bytes, ours {block_bytes}",
            )
        for name, value, low, high in (
            ("length of the incarnation", len(self.incarnation), 1, _MAX_NAME),
            ("length of the agent metadata", len(self.agent_metadata), 1, MAX_AGENT_METADATA),
            ("base address", self.base_address, 1, _ADDRESS_SPACE - 1),
            ("number of blocks", self.num_blocks, 1, _ADDRESS_SPACE // block_bytes),
            ("end of the memory", self.base_address + self.num_blocks * block_bytes, 1, _ADDRESS_SPACE),
            ("device id", self.device_id, 0, _MAX_DEVICE_ID),
        ):
            if not low <= value <= high:
                raise TransferFailed(TransferCause.REFUSED, f"{name} of {self.incarnation[:_MAX_NAME]!r} is {value}")
        if self.kind not in MEMORY_KINDS:
            raise TransferFailed(TransferCause.REFUSED, f"memory of unknown kind {self.kind[:_MAX_NAME]!r}")


@dataclass(frozen=True, slots=True)
class ReadRange:
    """`count` neighbouring blocks: remote ones from `remote_block` on go to local ones from `local_block` on."""

    local_block: int
    remote_block: int
    count: int


def coalesce(local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> list[ReadRange]:
    """Pair the blocks by position and merge pairs that are neighbours on both sides; order is kept.

    Raises ValueError when the two lists differ in length.
    """
    ranges: list[ReadRange] = []
    start_local = start_remote = count = 0
    for local, remote in zip(local_blocks, remote_blocks, strict=True):
        if count and local == start_local + count and remote == start_remote + count:
            count += 1
            continue
        if count:
            ranges.append(ReadRange(start_local, start_remote, count))
        start_local, start_remote, count = local, remote, 1
    if count:
        ranges.append(ReadRange(start_local, start_remote, count))
    return ranges


def cut_ranges(ranges: deque[ReadRange], num_blocks: int) -> tuple[ReadRange, ...]:
    """Remove up to `num_blocks` blocks from the front, splitting a range if need be."""
    taken: list[ReadRange] = []
    while ranges and num_blocks:
        first = ranges.popleft()
        count = min(first.count, num_blocks)
        taken.append(ReadRange(first.local_block, first.remote_block, count))
        if count < first.count:
            rest = ReadRange(first.local_block + count, first.remote_block + count, first.count - count)
            ranges.appendleft(rest)
        num_blocks -= count
    return tuple(taken)


def check_ranges(ranges: Sequence[ReadRange], num_local_blocks: int, num_remote_blocks: int) -> None:
    """Raise BadRange unless every range lies inside both memories and no local block is written twice."""
    if not ranges:
        raise BadRange("a read of no blocks")
    for r in ranges:
        if r.count < 1:
            raise BadRange(f"{r.count} blocks in a range")
        if not 0 <= r.local_block <= num_local_blocks - r.count:
            raise BadRange(f"local blocks {r.local_block}+{r.count} outside of 0..{num_local_blocks - 1}")
        if not 0 <= r.remote_block <= num_remote_blocks - r.count:
            raise BadRange(f"remote blocks {r.remote_block}+{r.count} outside of 0..{num_remote_blocks - 1}")
    ordered = sorted(ranges, key=lambda r: r.local_block)
    for before, after in itertools.pairwise(ordered):
        if before.local_block + before.count > after.local_block:
            raise BadRange(f"local block {after.local_block} is written twice")


class TransferBackend(Protocol):
    """One transfer agent over one node's KV memory. Every method belongs to the thread that made the backend."""

    @property
    def name(self) -> str:
        """Both sides of a transfer must use backends of the same name."""
        ...

    @property
    def memory(self) -> KVMemory:
        """The memory that it was made for and keeps alive."""
        ...

    def agent_metadata(self) -> bytes:
        """What a receiver needs to `connect` to this agent, besides the shape of the memory."""
        ...

    def connect(self, peer: PeerMemory) -> None:
        """Make the peer's blocks readable. Raises TransferFailed: LAYOUT_MISMATCH, REFUSED (also: already connected)
        or PEER_GONE; then nothing has changed."""
        ...

    def post_read(self, incarnation: str, ranges: Sequence[ReadRange]) -> ReadHandle:
        """Start one read; some transports copy here, others while it is polled.

        Raises BadRange, or PeerGone for a peer that is not connected; then nothing was posted. Once anything may have
        been posted, failures come from `poll`.
        """
        ...

    def poll(self, handle: ReadHandle) -> ReadState:
        """Let reads progress and say where this one stands; DONE stays DONE until it is released.

        Raises PeerGone when the read can neither complete nor write any more, now and at every later call; ReadStuck
        when it failed and may still write, until any call has found its peer gone: from then on PeerGone. KeyError for
        a handle that was never given or is released.
        """
        ...

    def release(self, handle: ReadHandle) -> None:
        """Forget a read that is DONE or raised PeerGone; raises ReadsInFlight (and forgets nothing) for any other.

        Whatever else it raises concerns this one read, which is forgotten all the same (see `release_read`).
        """
        ...

    def pump(self) -> None:
        """Let reads progress: ours, and those of peers that read from us. Drops whatever peers sent beside data."""
        ...

    def disconnect(self, incarnation: str) -> None:
        """Forget a peer; unknown ones are fine. Raises ReadsInFlight while reads from it are not released."""
        ...

    def close(self) -> None:
        """End the agent; peers that read from it see it gone. Raises ReadsInFlight like `disconnect`."""
        ...


def release_read(backend: TransferBackend, handle: ReadHandle) -> TransferFailed | None:
    """Release a read that is over; returns why that failed, if it did.

    Such a failure leaves it in doubt what the read brought, and says nothing of any other read. Raises ReadsInFlight.
    """
    try:
        backend.release(handle)
    except ReadsInFlight:
        raise
    except Exception as error:
        _log.exception("the transfer agent can't release a read that is over")
        return TransferFailed(TransferCause.REFUSED, f"the transfer agent can't release a read that is over: {error!r}")
    return None
