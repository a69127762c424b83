"""The fake of `NixlBackend`: one-sided reads inside one process, with the same hazards as NIXL's.

Other faults are injected by `faulty_transfer_backend.FaultyTransferBackend`. Reads make no progress by themselves: each
`poll` and `pump` of the receiver is one step, in which each of its reads may copy. A read continues to write even if
its owner does not want it any more. With `sender_must_pump`, a read makes a step only after the sender has pumped, as
with NIXL.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.runner import KVMemory
from baton.errors import TransferCause, TransferFailed
from kv_transfer.backends.base import (
    PeerGone,
    PeerMemory,
    ReadHandle,
    ReadsInFlight,
    ReadState,
    check_ranges,
)
from kv_transfer.piece_plan import PiecePlan, Pieces, ReadRange


@dataclass(slots=True)
class _Agent:
    memory: KVMemory
    pumps: int = 0
    frozen: bool = False
    alive: bool = True


class FakeTransferFabric:
    """The network that connects all agents of a test. Methods may be called from any thread."""

    def __init__(self, sender_must_pump: bool = False) -> None:
        self.sender_must_pump = sender_must_pump
        self.lock = threading.RLock()
        self._agents: dict[str, _Agent] = {}

    def join(self, incarnation: str, memory: KVMemory) -> _Agent:
        """Add an agent. Raises ValueError for a name that was used before."""
        with self.lock:
            if incarnation in self._agents:
                raise ValueError(f"there was an agent {incarnation!r} already")
            agent = self._agents[incarnation] = _Agent(memory)
            return agent

    def find(self, incarnation: str) -> _Agent | None:
        """The agent with this name, which may have ended; None if there was none."""
        with self.lock:
            return self._agents.get(incarnation)

    def kill(self, incarnation: str) -> None:
        """End an agent as SIGKILL would: its readers see it gone at their next step."""
        with self.lock:
            self._agents[incarnation].alive = False

    def freeze(self, incarnation: str) -> None:
        """Stop an agent as SIGSTOP would: reads from it stay in progress."""
        with self.lock:
            self._agents[incarnation].frozen = True

    def thaw(self, incarnation: str) -> None:
        """Undo `freeze`."""
        with self.lock:
            self._agents[incarnation].frozen = False


@dataclass(slots=True)
class _Read:
    sender: _Agent
    peer: PeerMemory
    pieces: Pieces
    seen_pumps: int
    state: ReadState = ReadState.IN_PROGRESS
    failure: PeerGone | None = None

    @property
    def may_write(self) -> bool:
        return self.state is ReadState.IN_PROGRESS and self.failure is None


@dataclass(slots=True)
class _Peer:
    memory: PeerMemory
    plan: PiecePlan
    agent: _Agent
    reads: set[ReadHandle] = field(default_factory=set)


class FakeTransferBackend:
    """The transfer agent of one process of a fabric; see `kv_transfer.backends.base.TransferBackend`."""

    name = "memory"

    def __init__(self, fabric: FakeTransferFabric, incarnation: str, memory: KVMemory) -> None:
        self._fabric = fabric
        self._incarnation = incarnation
        self._memory = memory
        self._agent = fabric.join(incarnation, memory)
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[ReadHandle, _Read] = {}
        self._last_handle = 0

    @property
    def memory(self) -> KVMemory:
        return self._memory

    def agent_metadata(self) -> bytes:
        return b"memory:" + self._incarnation.encode()

    def connect(self, peer: PeerMemory) -> None:
        plan = peer.plan_for(self._memory)
        if peer.incarnation in self._peers or peer.incarnation == self._incarnation:
            raise TransferFailed(TransferCause.REFUSED, f"{peer.incarnation} is connected already")
        if peer.agent_metadata != b"memory:" + peer.incarnation.encode():
            raise TransferFailed(TransferCause.REFUSED, f"{peer.incarnation} sent metadata of another agent")
        agent = self._fabric.find(peer.incarnation)
        if agent is None or not agent.alive:
            raise PeerGone(f"no agent {peer.incarnation}")
        start, end = peer.base_address, peer.base_address + peer.num_all_blocks * peer.block_bytes
        own = agent.memory
        if start < own.base_address or end > own.base_address + own.num_bytes:
            raise TransferFailed(TransferCause.REFUSED, f"{peer.incarnation} did not register that memory")
        self._peers[peer.incarnation] = _Peer(peer, plan, agent)

    def post_read(self, incarnation: str, ranges: Sequence[ReadRange]) -> ReadHandle:
        peer = self._peers.get(incarnation)
        if peer is None or not peer.agent.alive:
            raise PeerGone(f"{incarnation} is not connected")
        check_ranges(ranges, *peer.plan.count_sub_blocks(self._memory.num_all_blocks, peer.memory.num_all_blocks))
        self._last_handle += 1
        handle = ReadHandle(self._last_handle)
        self._reads[handle] = _Read(peer.agent, peer.memory, peer.plan.pieces(ranges), peer.agent.pumps)
        peer.reads.add(handle)
        return handle

    def poll(self, handle: ReadHandle) -> ReadState:
        read = self._reads[handle]
        self._step()
        if read.failure is not None:
            raise read.failure
        return read.state

    def pump(self) -> None:
        with self._fabric.lock:
            self._agent.pumps += 1
        self._step()

    def _step(self) -> None:
        with self._fabric.lock:
            for read in self._reads.values():
                if read.may_write:
                    self._advance(read)

    def _advance(self, read: _Read) -> None:
        if not read.sender.alive:
            read.failure = PeerGone(f"{read.peer.incarnation} is gone")
            return
        if read.sender.frozen:
            return
        if self._fabric.sender_must_pump:
            if read.seen_pumps == read.sender.pumps:
                return
            read.seen_pumps = read.sender.pumps
        pieces, to, source = read.pieces, self._memory.base_address, read.peer.base_address
        rows = zip(pieces.local.tolist(), pieces.remote.tolist(), pieces.lengths.tolist(), strict=True)
        for local, remote, length in rows:
            ctypes.memmove(to + local, source + remote, length)
        read.state = ReadState.DONE

    def release(self, handle: ReadHandle) -> None:
        read = self._reads[handle]
        if read.may_write:
            raise ReadsInFlight(f"read {handle} of {read.peer.incarnation} may still write")
        del self._reads[handle]
        self._peers[read.peer.incarnation].reads.discard(handle)

    def disconnect(self, incarnation: str) -> None:
        peer = self._peers.get(incarnation)
        if peer is None:
            return
        if peer.reads:
            raise ReadsInFlight(f"{len(peer.reads)} reads of {incarnation} are not released")
        del self._peers[incarnation]

    def close(self) -> None:
        if self._reads:
            raise ReadsInFlight(f"{len(self._reads)} reads are not released")
        self._peers.clear()
        self._fabric.kill(self._incarnation)
