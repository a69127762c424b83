"""The interface of backends, which move bytes between the KV caches of two nodes.

The rules, which one contract suite checks for all backends:

1. A read is one-sided: the receiver names the sub-blocks on both sides (`kv_transfer/piece_plan.py`), and the sender
   decides nothing. A read makes progress only while the receiver polls and, with some transports, only while the sender
   pumps, too.
2. A posted read can't be cancelled. Until `poll` returns DONE or raises `PeerGone` it may write to its local blocks,
   whatever else is called. So nothing releases it before, and its owner keeps those blocks out of use.
3. Nothing is posted for ranges that don't fit: numbers that a peer sent are checked before they become addresses.
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
from kv_transfer.piece_plan import PiecePlan, ReadRange

MEMORY_KINDS = frozenset({"DRAM", "VRAM"})
MAX_AGENT_METADATA = 64 * 1024
"""Bytes."""
_MAX_NAME = 128
_MAX_AGENT_NAME = _MAX_NAME + 3
"""The agent of a part is named by the incarnation and a number (`part_name` in `kv_transfer/layout.py`)."""
_MAX_DEVICE_ID = 1 << 16
_MAX_PROBE_BLOCKS = 1 << 10
_MAX_BLOCK_TOKENS = 1 << 16
_ADDRESS_SPACE = 1 << 64

_log = logging.getLogger(__name__)

ReadHandle = NewType("ReadHandle", int)
"""Identifies one posted read of one backend; a backend never uses a handle twice."""


class PeerGone(TransferFailed):
    """The peer can't be read any more, and no read from it writes any more."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(TransferCause.PEER_GONE, detail)


class BadRange(TransferFailed):
    """A read names blocks that don't exist or that overlap; nothing was posted."""

    def __init__(self, detail: str) -> None:
        super().__init__(TransferCause.REFUSED, detail)


class ReadStuck(TransferFailed):
    """A read failed and may still write: nobody may use its blocks until its peer is gone."""

    def __init__(self, detail: str) -> None:
        super().__init__(TransferCause.PEER_GONE, detail)


class ReadsInFlight(Exception):
    """The caller tried to drop a handle, a peer or an agent while a read may still write: a fault of the caller."""


class ReadState(enum.Enum):
    """The progress of a posted read; failures are raised instead."""

    IN_PROGRESS = "in_progress"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A sender's KV memory, as it is published to receivers. A receiver calls `plan_for` before it uses one."""

    incarnation: str
    """The sender's incarnation, which is also the name of its transfer agent."""
    agent_metadata: bytes
    """The agent's description of itself, which only the backend understands."""
    base_address: int
    num_blocks: int
    block_bytes: int
    kind: str
    """Kind of the memory: DRAM or VRAM."""
    device_id: int
    num_probe_blocks: int = 0
    """Number of probe blocks behind the `num_blocks` of the cache."""
    block_size: int | None = None
    """Tokens in a block; None: as many as in one of the receiver."""
    layers: range | None = None
    """The layers that this memory holds of each block; None: all of them."""

    @property
    def num_all_blocks(self) -> int:
        """Number of blocks, those of the cache and probe blocks."""
        return self.num_blocks + self.num_probe_blocks

    @classmethod
    def of(cls, memory: KVMemory, incarnation: str, agent_metadata: bytes) -> PeerMemory:
        """Describe this node's own memory for receivers."""
        return cls(
            incarnation=incarnation,
            agent_metadata=agent_metadata,
            base_address=memory.base_address,
            num_blocks=memory.num_blocks,
            block_bytes=memory.block_bytes,
            kind=memory.kind,
            device_id=memory.device_id,
            num_probe_blocks=memory.num_probe_blocks,
            block_size=memory.layout.block_size if memory.layout is not None else None,
            layers=memory.layers,
        )

    def plan_for(self, receiver: KVMemory) -> PiecePlan:
        """The plan by which a receiver with this memory reads. Raises TransferFailed if it can't use the peer's.

        The cause is LAYOUT_MISMATCH for blocks that don't fit or that have no layer in common, and REFUSED for values
        that are out of bounds.
        """
        self._check_bounds(
            ("length of the incarnation", len(self.incarnation), 1, _MAX_AGENT_NAME),
            ("length of the agent metadata", len(self.agent_metadata), 1, MAX_AGENT_METADATA),
            ("number of tokens in a block", 1 if self.block_size is None else self.block_size, 1, _MAX_BLOCK_TOKENS),
            ("number of probe blocks", self.num_probe_blocks, 0, _MAX_PROBE_BLOCKS),
            ("device id", self.device_id, 0, _MAX_DEVICE_ID),
        )
        if self.layers is not None and receiver.layout is not None:
            num_layers = receiver.layout.num_layers
            self._check_bounds(
                ("first layer", self.layers.start, 0, num_layers - 1),
                ("end of the layers", self.layers.stop, self.layers.start + 1, num_layers),
                ("step between layers", self.layers.step, 1, 1),
            )
        if self.kind not in MEMORY_KINDS:
            detail = f"the memory is of the unknown kind {self.kind[:_MAX_NAME]!r}"
            raise TransferFailed(TransferCause.REFUSED, detail)
        plan = self._plan(receiver)
        self._check_bounds(
            ("base address", self.base_address, 1, _ADDRESS_SPACE - 1),
            ("number of blocks", self.num_blocks, 1, _ADDRESS_SPACE // self.block_bytes),
            ("end of the memory", self.base_address + self.num_all_blocks * self.block_bytes, 1, _ADDRESS_SPACE),
        )
        return plan

    def _check_bounds(self, *bounds: tuple[str, int, int, int]) -> None:
        """Raise TransferFailed unless each value, which has a name, is within its lowest and its highest one."""
        for name, value, low, high in bounds:
            if not low <= value <= high:
                detail = f"{name} of {self.incarnation[:_MAX_NAME]!r} is {value}, outside of {low}..{high}"
                raise TransferFailed(TransferCause.REFUSED, detail)

    def _plan(self, receiver: KVMemory) -> PiecePlan:
        layout = receiver.layout
        try:
            if layout is not None:
                size = layout.block_size if self.block_size is None else self.block_size
                plan = PiecePlan.between(layout, size, receiver.layers, self.layers)
            elif self.layers == receiver.layers:
                plan = PiecePlan.of_equal_blocks(receiver.block_bytes)
            else:
                raise ValueError("its memory has other layers than that of this node, whose layout is not known")
        except ValueError as error:
            raise TransferFailed(TransferCause.LAYOUT_MISMATCH, f"{self.incarnation!r}: {error}") from error
        if self.block_bytes != plan.remote_block_bytes:
            raise TransferFailed(
                TransferCause.LAYOUT_MISMATCH,
                f"blocks of {self.incarnation!r} have {self.block_bytes} bytes, "
                f"expected {plan.remote_block_bytes}, since those of this node have {receiver.block_bytes}",
            )
        return plan


def coalesce(
    local_blocks: Sequence[int], remote_blocks: Sequence[int], groups: Sequence[int] | None = None
) -> list[ReadRange]:
    """Pair the sub-blocks by position, and merge pairs that are neighbours on both sides into ranges; keeps the order.

    `groups`: the group of each pair; pairs of different groups are not merged. Raises ValueError when the lists differ
    in length.
    """
    ranges: list[ReadRange] = []
    start_local = start_remote = count = current = 0
    group_of = itertools.repeat(0, len(local_blocks)) if groups is None else groups
    for local, remote, group in zip(local_blocks, remote_blocks, group_of, strict=True):
        if count and local == start_local + count and remote == start_remote + count and group == current:
            count += 1
            continue
        if count:
            ranges.append(ReadRange(start_local, start_remote, count, current))
        start_local, start_remote, count, current = local, remote, 1, group
    if count:
        ranges.append(ReadRange(start_local, start_remote, count, current))
    return ranges


def take_ranges(ranges: deque[ReadRange], num_blocks: int) -> tuple[ReadRange, ...]:
    """Remove up to `num_blocks` sub-blocks from the front and return them; splits a range where necessary."""
    taken: list[ReadRange] = []
    while ranges and num_blocks:
        first = ranges.popleft()
        count = min(first.count, num_blocks)
        if count < first.count:
            local, remote, group = first.local_block, first.remote_block, first.group
            ranges.appendleft(ReadRange(local + count, remote + count, first.count - count, group))
            first = ReadRange(local, remote, count, group)
        taken.append(first)
        num_blocks -= count
    return tuple(taken)


def check_ranges(ranges: Sequence[ReadRange], num_local_blocks: int, num_remote_blocks: int) -> None:
    """Raise BadRange unless every range lies inside both memories, which have so many sub-blocks, and no local one is
    written twice."""
    if not ranges:
        raise BadRange("the read names no blocks")
    for r in ranges:
        if r.count < 1:
            raise BadRange(f"a range has {r.count} blocks")
        if not 0 <= r.local_block <= num_local_blocks - r.count:
            raise BadRange(f"{r.count} local blocks from {r.local_block} on are not in 0..{num_local_blocks - 1}")
        if not 0 <= r.remote_block <= num_remote_blocks - r.count:
            raise BadRange(f"{r.count} remote blocks from {r.remote_block} on are not in 0..{num_remote_blocks - 1}")
    ordered = sorted(ranges, key=lambda r: r.local_block)
    for before, after in itertools.pairwise(ordered):
        if before.local_block + before.count > after.local_block:
            raise BadRange(f"local block {after.local_block} would be written twice")


class TransferBackend(Protocol):
    """One transfer agent over one node's KV memory. Every method belongs to the thread that made the backend."""

    @property
    def name(self) -> str:
        """Kind of the backend; both sides of a transfer must use the same."""
        ...

    @property
    def memory(self) -> KVMemory:
        """This node's memory, which the backend keeps alive."""
        ...

    def agent_metadata(self) -> bytes:
        """What a receiver needs to `connect` to this agent, beside the shape of the memory."""
        ...

    def connect(self, peer: PeerMemory) -> None:
        """Make a peer's blocks readable.

        Raises TransferFailed with LAYOUT_MISMATCH, REFUSED (also if the peer is connected already) or PEER_GONE; then
        nothing has changed.
        """
        ...

    def post_read(self, incarnation: str, ranges: Sequence[ReadRange]) -> ReadHandle:
        """Start one read. Some transports copy during this call, others while the read is polled.

        Raises BadRange, or PeerGone for a peer that is not connected; then nothing was posted. Once anything may have
        been posted, failures come from `poll`.
        """
        ...

    def poll(self, handle: ReadHandle) -> ReadState:
        """Let reads make progress, and return the state of this one; DONE stays DONE until it is released.

        Raises PeerGone when the read can neither complete nor write any more, now and at every later call. Raises
        ReadStuck when it failed and may still write; once any call has found its peer gone, PeerGone instead. Raises
        KeyError for a handle that was never returned or is released.
        """
        ...

    def release(self, handle: ReadHandle) -> None:
        """Forget a read that is DONE or raised PeerGone; raises ReadsInFlight, and forgets nothing, for any other.

        Any other exception concerns this one read, which is forgotten all the same (see `release_read`).
        """
        ...

    def pump(self) -> None:
        """Let reads make progress, those of peers from this node included. Drops notifications that peers sent."""
        ...

    def disconnect(self, incarnation: str) -> None:
        """Forget a peer; an unknown one is fine. Raises ReadsInFlight while reads from it are not released."""
        ...

    def close(self) -> None:
        """Close the agent; peers that read from it find it gone. Raises ReadsInFlight while reads are not released."""
        ...


def release_read(backend: TransferBackend, handle: ReadHandle) -> TransferFailed | None:
    """Release a read that is over; returns why that failed, if it did. Raises ReadsInFlight.

    After such a failure nobody can tell what the read brought; other reads are not concerned.
    """
    try:
        backend.release(handle)
    except ReadsInFlight:
        raise
    except Exception as error:
        _log.exception("the transfer agent could not release a read that is over: the read fails")
        detail = f"the transfer agent could not release a read that is over: {error!r}"
        return TransferFailed(TransferCause.REFUSED, detail)
    return None
