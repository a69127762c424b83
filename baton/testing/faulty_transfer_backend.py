"""Injects the faults of one-sided reads into any transfer backend, real or fake.

A read is cut into parts that are posted one after another by the backend underneath; a fault is what happens between
them, or what is said at the end. So the bytes that a fault leaves behind are real ones, and the contract holds: until
`poll` says DONE or raises PeerGone a read may write, and afterwards it does not. Faults are drawn per read, in the
order of posting, from a seed, and counted.
"""

from __future__ import annotations

import ctypes
import enum
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from baton.engine.runner import KVMemory
from baton.errors import ConfigError, TransferFailed
from kv_transfer.backends.base import (
    PeerGone,
    PeerMemory,
    ReadHandle,
    ReadRange,
    ReadsInFlight,
    ReadState,
    TransferBackend,
    check_ranges,
    cut_ranges,
)

_Ranges = tuple[ReadRange, ...]
_KINDS = ("delay", "slow", "late", "stall", "drop", "corrupt", "disconnect", "duplicate")


@dataclass(frozen=True, slots=True)
class Faults:
    """How probable each fault is, per read."""

    seed: int = 0
    polls: int = 5
    """How long a delayed, slow or late read waits."""
    delay: float = 0.0
    """Nothing of it begins before so many polls."""
    slow: float = 0.0
    """Its blocks come one by one, so many polls apart."""
    late: float = 0.0
    """It says DONE so many polls after its last byte."""
    stall: float = 0.0
    """It stops in the middle until `resume_stalled`."""
    drop: float = 0.0
    """It says DONE without its last block."""
    corrupt: float = 0.0
    """It says DONE with one bit flipped."""
    disconnect: float = 0.0
    """It raises PeerGone in the middle, and so does every other read of that peer until it is connected again."""
    duplicate: float = 0.0
    """It says DONE again after it was released."""


class _Step(enum.Enum):
    """What a read does between its parts."""

    WAIT = enum.auto()
    """One poll long."""
    STALL = enum.auto()
    """Until it is resumed."""


@dataclass(slots=True)
class _Read:
    incarnation: str
    ranges: _Ranges
    struck: frozenset[str]
    """The names of its faults."""
    script: deque[_Ranges | _Step]
    """What is still to happen; then it ends."""
    inner: ReadHandle | None = None
    """The part that is posted."""
    state: ReadState = ReadState.IN_PROGRESS
    failure: PeerGone | None = None

    @property
    def may_write(self) -> bool:
        return self.state is ReadState.IN_PROGRESS and self.failure is None


@dataclass(slots=True)
class _Peer:
    memory: PeerMemory
    gone: bool = False
    reads: set[ReadHandle] = field(default_factory=set)


class FaultyTransferBackend:
    """Wraps another backend and owns its reads. Raises ConfigError for damage to memory that it can't reach."""

    def __init__(self, inner: TransferBackend, faults: Faults | None = None) -> None:
        self._inner = inner
        self._faults = faults or Faults()
        if self._faults.corrupt and inner.memory.kind != "DRAM":
            raise ConfigError(f"bits can be flipped in DRAM, not in {inner.memory.kind}")
        self._rng = Random(self._faults.seed)
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[ReadHandle, _Read] = {}
        self._told_twice: set[ReadHandle] = set()
        self._last_handle = 0
        self.counters: Counter[str] = Counter()
        """Reads that have each fault, by its name."""

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
        self._peers[peer.incarnation] = _Peer(peer)

    def post_read(self, incarnation: str, ranges: Sequence[ReadRange]) -> ReadHandle:
        peer = self._peers.get(incarnation)
        if peer is None or peer.gone:
            raise PeerGone(f"{incarnation} is not connected")
        check_ranges(ranges, self.memory.num_blocks, peer.memory.num_blocks)
        read = self._new_read(incarnation, tuple(ranges))
        if read.script and not isinstance(read.script[0], _Step):
            read.inner = self._inner.post_read(incarnation, read.script[0])
            read.script.popleft()
        self.counters.update(read.struck)
        self._last_handle += 1
        handle = ReadHandle(self._last_handle)
        self._reads[handle] = read
        peer.reads.add(handle)
        return handle

    def _new_read(self, incarnation: str, ranges: _Ranges) -> _Read:
        struck = frozenset(kind for kind in _KINDS if self._rng.random() < getattr(self._faults, kind))
        num_blocks = sum(r.count for r in ranges) - ("drop" in struck)
        middle = num_blocks // 2
        if "slow" in struck:
            cuts = list(range(num_blocks + 1))
        else:
            cuts = sorted({0, middle, num_blocks} if struck & {"stall", "disconnect"} else {0, num_blocks})
        left = deque(ranges)
        parts = [(start, cut_ranges(left, stop - start)) for start, stop in pairwise(cuts)]
        waits = [_Step.WAIT] * self._faults.polls
        script: deque[_Ranges | _Step] = deque(waits if "delay" in struck else ())
        for start, part in parts:
            if "stall" in struck and start == middle:
                script.append(_Step.STALL)
            if "disconnect" in struck and start == middle:
                break
            if "slow" in struck and start:
                script.extend(waits)
            script.append(part)
        script.extend(waits if "late" in struck else ())
        return _Read(incarnation, ranges, struck, script)

    def poll(self, handle: ReadHandle) -> ReadState:
        if handle in self._told_twice:
            return ReadState.DONE
        read = self._reads[handle]
        if read.may_write:
            self._advance(read)
        if read.failure is not None:
            raise read.failure
        return read.state

    def _advance(self, read: _Read) -> None:
        """Let the posted part move, or take the next step when none is."""
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
        """A ReadStuck is not caught: then nobody knows, now and at every later poll."""
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
        if "disconnect" in read.struck:
            if self._still_writes(read.incarnation):
                # PeerGone is said of a peer: no read from it writes any more.
                return
            self._peers[read.incarnation].gone = True
            read.failure = PeerGone(f"{read.incarnation} disconnected")
            return
        if "corrupt" in read.struck:
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
        ranges, size = self._rng.choice(read.ranges), self.memory.block_bytes
        block = ranges.local_block + self._rng.randrange(ranges.count)
        address = self.memory.base_address + block * size + self._rng.randrange(size)
        ctypes.c_ubyte.from_address(address).value ^= 1 << self._rng.randrange(8)

    def resume_stalled(self) -> None:
        """Let stalled reads go on: late writes, for owners who did not wait."""
        for read in self._reads.values():
            read.script = deque(step for step in read.script if step is not _Step.STALL)

    def heal(self) -> None:
        """No read that is posted from now on has a fault, and stalled ones go on."""
        self._faults = Faults()
        self.resume_stalled()

    def release(self, handle: ReadHandle) -> None:
        read = self._reads[handle]
        if read.may_write:
            raise ReadsInFlight(f"read {handle} of {read.incarnation} may still write")
        del self._reads[handle]
        if "duplicate" in read.struck:
            self._told_twice.add(handle)
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
