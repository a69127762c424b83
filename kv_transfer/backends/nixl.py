"""The backend that reads by NIXL over UCX: over shared memory, TCP or RDMA, whichever UCX finds (`UCX_TLS` chooses).

Three parts of NIXL are not used. Its progress thread takes a whole core, idle or not; without it nothing moves unless
both sides call in, `poll` or `pump` on the receiver and `pump` on the sender. Its listener binds every interface
without authentication. Its serialised descriptor lists are pickles; addresses are made here, from integers that were
checked.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.runner import KVMemory
from baton.errors import ConfigError, TransferCause, TransferFailed
from baton.runner.blocks.sub_blocks import Int64Array
from kv_transfer.backends.base import (
    MEMORY_KINDS,
    BadRange,
    PeerGone,
    PeerMemory,
    ReadHandle,
    ReadsInFlight,
    ReadState,
    ReadStuck,
    check_ranges,
)
from kv_transfer.backends.ucx_lanes import ucx_log
from kv_transfer.piece_plan import PiecePlan, ReadRange

_UCX = "UCX"
_DEFAULTS = {
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "FATAL",
    # The kernel takes a host for gone after a quarter of an hour only; reads from it would hold blocks that long.
    "UCX_TCP_USER_TIMEOUT": "30s",
}
"""Environment variables that are set where the environment does not."""
_HOST_DEFAULTS = {"UCX_MEM_EVENTS": "n"}
"""The same, for KV in the memory of a host without RDMA.

To keep what it registers, UCX would watch all that a process allocates, which takes a fifth of a second to set up. TCP
and shared memory register nothing.
"""
_GPU_DEFAULTS = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
"""The same, for KV on a GPU.

UCX reads by cuda_ipc only where it finds NVLink, and otherwise by way of the host without a word: over TCP at half a
gigabyte a second.
"""
_RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(slots=True)
class _Peer:
    memory: PeerMemory
    plan: PiecePlan
    open_reads: int = 0
    gone: bool = False


@dataclass(slots=True)
class _Read:
    request: Any
    """NIXL's; None if there is nothing to move."""
    peer: _Peer
    state: ReadState = ReadState.IN_PROGRESS
    failure: PeerGone | ReadStuck | None = None

    @property
    def may_write(self) -> bool:
        return self.state is not ReadState.DONE and not isinstance(self.failure, PeerGone)


def ucx_defaults(kind: str, rdma_devices: Path = _RDMA_DEVICES) -> Mapping[str, str]:
    """Environment variables for KV in this kind of memory, where the environment has none."""
    if kind != "DRAM":
        return _DEFAULTS | _GPU_DEFAULTS
    has_rdma = rdma_devices.is_dir() and any(rdma_devices.iterdir())
    return _DEFAULTS if has_rdma else _DEFAULTS | _HOST_DEFAULTS


class NixlBackend:
    """A NIXL agent named after this node's incarnation, with the whole KV memory registered once."""

    name = "nixl"

    def __init__(self, incarnation: str, memory: KVMemory) -> None:
        """Raises ConfigError when NIXL is not installed, has no UCX, or can't register the memory."""
        if memory.kind not in MEMORY_KINDS:
            raise ConfigError(f"NIXL reads memory of kind {' or '.join(sorted(MEMORY_KINDS))}, not {memory.kind!r}")
        self._incarnation = incarnation
        self._memory = memory
        self._peers: dict[str, _Peer] = {}
        self._reads: dict[ReadHandle, _Read] = {}
        self._last_handle = 0
        with ucx_log.asked(os.environ):
            # UCX reads its environment when the first agent is made.
            api, self._errors = _load_nixl(ucx_defaults(memory.kind))
            self._agent = self._made(api)
        try:
            if _UCX not in self._agent.backends:
                raise ConfigError("NIXL has no UCX plugin: reinstall the nixl wheel")
            region = (memory.base_address, memory.num_bytes, memory.device_id, "")
            self._registered = self._agent.register_memory([region], mem_type=memory.kind)
            self._metadata = bytes(self._agent.get_agent_metadata())
        except self._errors.any as error:
            raise ConfigError(
                f"NIXL could not register {memory.num_bytes} bytes of {memory.kind}: {_describe(error)}"
            ) from error

    def _made(self, api: Any) -> Any:
        config = api.nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=[_UCX])
        try:
            return api.nixl_agent(self._incarnation, config)
        except self._errors.any as error:
            raise ConfigError(f"NIXL could not make an agent: {_describe(error)}") from error

    @property
    def memory(self) -> KVMemory:
        return self._memory

    def agent_metadata(self) -> bytes:
        return self._metadata

    def connect(self, peer: PeerMemory) -> None:
        plan = peer.plan_for(self._memory)
        if peer.incarnation in self._peers or peer.incarnation == self._incarnation:
            raise TransferFailed(TransferCause.REFUSED, f"{peer.incarnation} is connected already")
        try:
            loaded = self._agent.add_remote_agent(peer.agent_metadata)
        except self._errors.any as error:
            raise self._connect_failure(peer, error) from error
        name = loaded.decode("utf-8", "replace") if isinstance(loaded, bytes) else str(loaded)
        try:
            if name != peer.incarnation:
                raise TransferFailed(TransferCause.REFUSED, f"{peer.incarnation} sent the agent metadata of {name!r}")
            self._check_registered(peer)
        except TransferFailed:
            if name not in self._peers:
                self._forget_agent(name)
            raise
        self._peers[peer.incarnation] = _Peer(peer, plan)

    def _check_registered(self, peer: PeerMemory) -> None:
        regions = [(peer.base_address, peer.num_all_blocks * peer.block_bytes, peer.device_id)]
        try:
            self._agent.prep_xfer_dlist(peer.incarnation, regions, mem_type=peer.kind).release()
        except self._errors.any as error:
            raise self._connect_failure(peer, error) from error

    def _connect_failure(self, peer: PeerMemory, error: Exception) -> TransferFailed:
        if isinstance(error, self._errors.disconnected):
            return PeerGone(f"{peer.incarnation}: {_describe(error)}")
        return TransferFailed(
            TransferCause.REFUSED, f"NIXL refused to connect to {peer.incarnation}: {_describe(error)}"
        )

    def post_read(self, incarnation: str, ranges: Sequence[ReadRange]) -> ReadHandle:
        peer = self._peers.get(incarnation)
        if peer is None or peer.gone:
            raise PeerGone(f"{incarnation} is not connected")
        check_ranges(ranges, *peer.plan.count_sub_blocks(self._memory.num_all_blocks, peer.memory.num_all_blocks))
        pieces = peer.plan.pieces(ranges)
        if not len(pieces):
            # No layer of these blocks is in both memories, and NIXL takes no empty list.
            return self._keep(_Read(None, peer, ReadState.DONE))
        try:
            request = self._agent.initialize_xfer(
                "READ",
                self._descriptors(self._memory, pieces.local, pieces.lengths),
                self._descriptors(peer.memory, pieces.remote, pieces.lengths),
                incarnation,
            )
        except (self._errors.disconnected, self._errors.not_found) as error:
            peer.gone = True
            raise PeerGone(f"{incarnation}: {_describe(error)}") from error
        except self._errors.any as error:
            raise BadRange(f"NIXL refused to read from {incarnation}: {_describe(error)}") from error
        read = _Read(request, peer)
        handle = self._keep(read)
        self._advance(read, self._agent.transfer)
        return handle

    def _keep(self, read: _Read) -> ReadHandle:
        self._last_handle += 1
        handle = ReadHandle(self._last_handle)
        self._reads[handle] = read
        read.peer.open_reads += 1
        return handle

    def _descriptors(self, memory: KVMemory | PeerMemory, offsets: Int64Array, lengths: Int64Array) -> Any:
        rows = np.empty((len(offsets), 3), np.uint64)
        rows[:, 0] = offsets.astype(np.uint64) + np.uint64(memory.base_address)
        rows[:, 1], rows[:, 2] = lengths, memory.device_id
        return self._agent.get_xfer_descs(rows, mem_type=memory.kind)

    def poll(self, handle: ReadHandle) -> ReadState:
        read = self._reads[handle]
        if read.state is ReadState.IN_PROGRESS and read.failure is None:
            self._advance(read, self._agent.check_xfer_state)
        if isinstance(read.failure, ReadStuck) and read.peer.gone:
            read.failure = PeerGone(f"{read.peer.memory.incarnation} is gone, so this failed read writes no more")
        if read.failure is not None:
            raise read.failure
        return read.state

    def _advance(self, read: _Read, step: Any) -> None:
        name = read.peer.memory.incarnation
        try:
            answer = step(read.request)
        except self._errors.disconnected as error:
            read.peer.gone = True
            read.failure = PeerGone(f"{name}: {_describe(error)}")
        except self._errors.any as error:
            read.failure = ReadStuck(f"{name}: {_describe(error)}")
        else:
            if answer == "DONE":
                read.state = ReadState.DONE
            elif answer != "PROC":
                read.failure = ReadStuck(f"{name}: NIXL reported the unknown state {answer!r}")

    def release(self, handle: ReadHandle) -> None:
        read = self._reads[handle]
        if read.may_write:
            raise ReadsInFlight(f"read {handle} of {read.peer.memory.incarnation} may still write")
        del self._reads[handle]
        read.peer.open_reads -= 1
        if read.request is None:
            return
        try:
            self._agent.release_xfer_handle(read.request)
        except self._errors.any:
            if read.failure is None:
                raise

    def pump(self) -> None:
        try:
            self._agent.get_new_notifs()
        except self._errors.any:
            # It concerns some peer that left; reads from that peer learn it from `poll`.
            return

    def disconnect(self, incarnation: str) -> None:
        peer = self._peers.get(incarnation)
        if peer is None:
            return
        if peer.open_reads:
            raise ReadsInFlight(f"{peer.open_reads} reads of {incarnation} are not released")
        del self._peers[incarnation]
        self._forget_agent(incarnation)

    def _forget_agent(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except self._errors.any:
            # NIXL forgets a peer by itself when it finds it disconnected.
            return

    def close(self) -> None:
        if self._reads:
            raise ReadsInFlight(f"{len(self._reads)} reads are not released")
        for incarnation in list(self._peers):
            self.disconnect(incarnation)
        self._agent.deregister_memory(self._registered)
        del self._agent


@dataclass(frozen=True, slots=True)
class _NixlErrors:
    any: tuple[type[Exception], ...]
    disconnected: type[Exception]
    not_found: type[Exception]


def _load_nixl(defaults: Mapping[str, str]) -> tuple[Any, _NixlErrors]:
    """Load NIXL's API and its exceptions, as late as possible, because UCX reads its environment then."""
    for variable, value in defaults.items():
        os.environ.setdefault(variable, value)
    raise_exceptions = logging.raiseExceptions
    try:
        package = _nixl_package()
        _api, _bindings = import_module(f"{package}._api"), import_module(f"{package}._bindings")
    except ImportError as error:
        raise ConfigError(
            f"NIXL is not installed or could not be loaded ({error}): install it with `pip install nixl-cu13`, or "
            "nixl-cu12 beside a torch that is built for CUDA 12"
        ) from error
    # On import NIXL sets up logging: it writes INFO lines to stdout, and silences errors inside handlers.
    logging.raiseExceptions = raise_exceptions
    log = logging.getLogger("nixl")
    for handler in list(log.handlers):
        log.removeHandler(handler)
    log.propagate = True
    log.setLevel(logging.WARNING)
    errors = [getattr(_bindings, name) for name in dir(_bindings) if name.endswith("Error")]
    return _api, _NixlErrors(
        any=(*errors, RuntimeError),
        disconnected=_bindings.nixlRemoteDisconnectError,
        not_found=_bindings.nixlNotFoundError,
    )


def _nixl_package() -> str:
    """The name of the NIXL build to import; raises ImportError if it is not installed.

    With memory of a GPU it has to be built for torch's version of CUDA. A process that has not loaded torch has nothing
    on a GPU, so any build will do, and it must not import torch for this, which takes a second or more.
    """
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    builds = (f"nixl_cu{cuda.partition('.')[0]}",) if cuda else ("nixl_cu13", "nixl_cu12", "nixl_rocm")
    for name in builds:
        if find_spec(name) is not None:
            return name
    raise ImportError(f"there is no {' or '.join(builds)}" + (f", and torch is built for CUDA {cuda}" if cuda else ""))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
