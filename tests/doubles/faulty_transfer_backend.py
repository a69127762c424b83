"""Injects the faults of one-sided reads into any transfer backend, real or fake.

A read is cut into parts that are posted one after another to the inner backend. A fault happens between two parts, or
changes the result at the end. So the bytes that a fault leaves behind are real ones, and the contract is kept: until
`poll` returns DONE or raises PeerGone a read may write, and afterwards it does not. The faults of each read are drawn
from a seed, in the order of posting, and counted.
"""

from __future__ import annotations

import ctypes
import enum
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

import numpy as np

from baton.engine.runner import KVMemory
from baton.errors import ConfigError, TransferFailed
from kv_transfer.backends.base import (
    PeerGone,
    PeerMemory,
    ReadHandle,
    ReadsInFlight,
    ReadState,
    TransferBackend,
    check_ranges,
    take_ranges,
)
from kv_transfer.piece_plan import PiecePlan, ReadRange

_Ranges = tuple[ReadRange, ...]
_KINDS = ("delay", "slow", "late", "stall", "drop", "corrupt", "disconnect", "duplicate")


@dataclass(frozen=True, slots=True)
class Faults:
    """The probabilities with which each fault occurs in a read, 0 to 1."""

    seed: int = 0
    """The seed from which faults are drawn."""
    polls: int = 5
    """The number of polls for which a delayed, slow or late read waits."""
    delay: float = 0.0
    """The read begins only after `polls` polls."""
    slow: float = 0.0
    """The blocks arrive one by one, with `polls` polls between them."""
    late: float = 0.0
    """`poll` returns DONE only `polls` polls after the last byte."""
    stall: float = 0.0
    """The read stops in the middle until `resume_stalled`."""
    drop: float = 0.0
    """`poll` returns DONE without the last block."""
    corrupt: float = 0.0
    """`poll` returns DONE with one bit flipped."""
    disconnect: float = 0.0
    """`poll` raises PeerGone in the middle, as for every other read of that peer until it is connected again."""
    duplicate: float = 0.0
    """`poll` returns DONE again after the read was released."""


class _Step(enum.Enum):
    """A pause between two parts of a read."""

    WAIT = enum.auto()
    """Wait for one poll."""
    STALL = enum.auto()
    """Wait until `resume_stalled`."""


@dataclass(slots=True)
class _Read:
    incarnation: str
    ranges: _Ranges
    fault_names: frozenset[str]
    """The names of the read's faults."""
    script: deque[_Ranges | _Step]
    """The parts and pauses that are still to come; the read ends after the last one."""
    inner: ReadHandle | None = None
    """The inner backend's handle of the posted part; None: no part is posted."""
    state: ReadState = ReadState.IN_PROGRESS
    failure: PeerGone | None = None

    @property
    def may_write(self) -> bool:
        return self.state is ReadState.IN_PROGRESS and self.failure is None


@dataclass(slots=True)
class _Peer:
    memory: PeerMemory
    plan: PiecePlan
    gone: bool = False
    reads: set[ReadHandle] = field(default_factory=set)


class FaultyTransferBackend:
    """Wraps another backend, and adds faults to its reads.

    Raises ConfigError if bits are to be flipped in memory that this process can't write.
    """

    def __init__(self, inner: TransferBackend, faults: Faults | None = None, *, in_probes: bool = False) -> None:
        """`in_probes`: reads of probe blocks have faults, too; otherwise nothing is drawn for them."""
        self._inner = inner
        self._in_probes = in_probes
        self._faults = faults or Faults()
        if self._faults.corrupt and inner.memory.kind != "DRAM":
            raise ConfigError(f"bits can be flipped in DRAM, not in {inner.memory.kind}")
        self._rng = Random(self._faults.seed)
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[ReadHandle, _Read] = {}
        self._repeats_done: set[ReadHandle] = set()
        self._last_handle = 0
        self.counters: Counter[str] = Counter()
        """Number of reads with each fault, by the fault's name."""

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def memory(self) -> KVMemory:
        return self._inner.memory

    def agent_metadata(self) -> bytes:
        return self._inner.agent_metadata()

    def connect(self, peer: PeerMemory) -> None:
        self._inner.connect(peer)
        self._peers[peer.incarnation] = _Peer(peer, peer.plan_for(self.memory))

    def post_read(self, incarnation: str, ranges: Sequence[ReadRange]) -> ReadHandle:
        peer = self._peers.get(incarnation)
        if peer is None or peer.gone:
            raise PeerGone(f"{incarnation} is not connected")
        check_ranges(ranges, *peer.plan.count_sub_blocks(self.memory.num_all_blocks, peer.memory.num_all_blocks))
        read = self._new_read(incarnation, tuple(ranges))
        if read.script and not isinstance(read.script[0], _Step):
            read.inner = self._inner.post_read(incarnation, read.script[0])
            read.script.popleft()
        self.counters.update(read.fault_names)
        self._last_handle += 1
        handle = ReadHandle(self._last_handle)
        self._reads[handle] = read
        peer.reads.add(handle)
        return handle

    def _new_read(self, incarnation: str, ranges: _Ranges) -> _Read:
        first_probe_block = self.memory.num_blocks * self._peers[incarnation].plan.local_parts
        has_faults = self._in_probes or all(r.local_block < first_probe_block for r in ranges)
        kinds = _KINDS if has_faults else ()
        fault_names = frozenset(kind for kind in kinds if self._rng.random() < getattr(self._faults, kind))
        num_blocks = sum(r.count for r in ranges) - ("drop" in fault_names)
        middle = num_blocks // 2
        if "slow" in fault_names:
            cuts = list(range(num_blocks + 1))
        else:
            cuts = sorted({0, middle, num_blocks} if fault_names & {"stall", "disconnect"} else {0, num_blocks})
        left = deque(ranges)
        parts = [(start, take_ranges(left, stop - start)) for start, stop in pairwise(cuts)]
        waits = [_Step.WAIT] * self._faults.polls
        script: deque[_Ranges | _Step] = deque(waits if "delay" in fault_names else ())
        for start, part in parts:
            if "stall" in fault_names and start == middle:
                script.append(_Step.STALL)
            if "disconnect" in fault_names and start == middle:
                break
            if "slow" in fault_names and start:
                script.extend(waits)
            script.append(part)
        script.extend(waits if "late" in fault_names else ())
        return _Read(incarnation, ranges, fault_names, script)

    def poll(self, handle: ReadHandle) -> ReadState:
        if handle in self._repeats_done:
            return ReadState.DONE
        read = self._reads[handle]
        if read.may_write:
            self._advance(read)
        if read.failure is not None:
            raise read.failure
        return read.state

    def _advance(self, read: _Read) -> None:
        """Let the posted part make progress, or take the next step if no part is posted."""
        if read.inner is not None:
            self._poll_part(read, read.inner)
        elif self._peers[read.incarnation].gone:
            read.failure = PeerGone(f"{read.incarnation} disconnected")
        elif read.script and read.script[0] is not _Step.STALL:
            step = read.script.popleft()
            if not isinstance(step, _Step):
                self._post(read, step)
        if read.inner is None and not read.script and read.failure is None:
            self._end(read)

    def _poll_part(self, read: _Read, part: ReadHandle) -> None:
        """Poll the posted part. A ReadStuck is passed on, now and at every later poll."""
        try:
            if self._inner.poll(part) is ReadState.IN_PROGRESS:
                return
        except PeerGone as error:
            read.failure = error
        self._inner.release(part)
        read.inner = None

    def _post(self, read: _Read, part: _Ranges) -> None:
        try:
            read.inner = self._inner.post_read(read.incarnation, part)
        except TransferFailed as error:
            read.failure = PeerGone(str(error))

    def _end(self, read: _Read) -> None:
        if "disconnect" in read.fault_names:
            if self._still_writes(read.incarnation):
                # PeerGone concerns the whole peer: when it is raised, no read from the peer may write any more.
                return
            self._peers[read.incarnation].gone = True
            read.failure = PeerGone(f"{read.incarnation} disconnected")
            return
        if "corrupt" in read.fault_names:
            self._flip_a_bit(read)
        read.state = ReadState.DONE

    def _still_writes(self, incarnation: str) -> bool:
        for read in [self._reads[handle] for handle in self._peers[incarnation].reads]:
            if read.inner is not None:
                self._poll_part(read, read.inner)
            if read.inner is not None:
                return True
        return False

    def _flip_a_bit(self, read: _Read) -> None:
        each, plan = self._rng.choice(read.ranges), self._peers[read.incarnation].plan
        one = replace(each, local_block=each.local_block + self._rng.randrange(each.count), count=1)
        if not plan.num_bytes([one]):
            return
        pieces, at = plan.pieces([one]), self._rng.randrange(plan.num_bytes([one]))
        piece = int(np.searchsorted(np.cumsum(pieces.lengths), at, side="right"))
        address = self.memory.base_address + int(pieces.local[piece]) + at - int(pieces.lengths[:piece].sum())
        ctypes.c_ubyte.from_address(address).value ^= 1 << self._rng.randrange(8)

    def resume_stalled(self) -> None:
        """Let stalled reads continue. They write late, which shows if their owner did not wait for them."""
        for read in self._reads.values():
            read.script = deque(step for step in read.script if step is not _Step.STALL)

    def heal(self) -> None:
        """Inject no faults into reads that are posted from now on, and let stalled reads continue."""
        self._faults = Faults()
        self.resume_stalled()

    def release(self, handle: ReadHandle) -> None:
        read = self._reads[handle]
        if read.may_write:
            raise ReadsInFlight(f"read {handle} of {read.incarnation} may still write")
        del self._reads[handle]
        if "duplicate" in read.fault_names:
            self._repeats_done.add(handle)
        self._peers[read.incarnation].reads.discard(handle)

    def pump(self) -> None:
        self._inner.pump()

    def disconnect(self, incarnation: str) -> None:
        peer = self._peers.get(incarnation)
        if peer is None:
            return
        if peer.reads:
            raise ReadsInFlight(f"{len(peer.reads)} reads of {incarnation} are not released")
        del self._peers[incarnation]
        self._inner.disconnect(incarnation)

    def close(self) -> None:
        if self._reads:
            raise ReadsInFlight(f"{len(self._reads)} reads are not released")
        self._inner.close()
