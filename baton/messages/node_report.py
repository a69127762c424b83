"""The reports of a node for operators and benchmarks: its hand-offs, its compute paths and its recent events."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.messages.adapters import NodeAdapter
from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport, NodeDescription, StepFigures


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event on one node."""

    seq: int
    """The number of the event, from 1 on in each incarnation."""
    monotonic_ns: int
    """The time of the event by CLOCK_MONOTONIC, which all processes of one host share."""
    name: str
    attempt: AttemptKey
    value: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One engine step that computed something. `monotonic_ns`: when the step was committed."""

    seq: int
    monotonic_ns: int
    figures: StepFigures
    goes_on: bool
    """Whether there was more to compute when the step was committed, so that the time until the next step is not idle
    time."""


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """Recent events and steps of one node.

    `monotonic_ns`: the node's clock when it answered, from which the age of every event follows.
    """

    monotonic_ns: int
    events: Sequence[TraceEvent]
    steps: Sequence[TraceStep]


class HandoffSide(enum.Enum):
    """Which side of a hand-off a node is on."""

    SENDER = "sender"
    """The node has a lease: blocks that it keeps for the other node to read."""
    READER = "reader"
    """The node has a transfer: blocks that it fills from the other node."""


@dataclass(frozen=True, slots=True)
class OpenHandoff:
    """A lease or a transfer that is not over."""

    attempt: AttemptKey
    side: HandoffSide
    state: str
    """The state's name in `kv_transfer.sender.lease_values` or `kv_transfer.receiver.transfer_values`."""
    peer: str
    """The other node; empty for a lease that no node reads yet."""
    peer_incarnation: str
    num_blocks: int
    """For a lease, the blocks offered so far; for a transfer, the blocks to fill; in quarantine, the blocks to which a
    read may still write."""
    age_s: float


@dataclass(frozen=True, slots=True)
class EndedHandoffs:
    """The number of a node's transfers from one peer that ended with one outcome, since the node's start."""

    peer: str
    outcome: str
    """arrived, or the value of a `TransferCause`."""
    count: int


@dataclass(frozen=True, slots=True)
class RefusedLink:
    """The latest refused link between this node and a peer, whichever of the two refused it."""

    peer: str
    cause: str
    """The value of a `TransferCause`."""
    story: str
    """The refusal in words, which names both nodes and what differs between them."""
    age_s: float
    count: int
    """The number of links to this peer that were refused in a row."""


KV_PROBE_FAILED = "KvProbeFailed"
"""The name of the condition of two nodes between which a probe of known bytes failed."""


KV_PAIR_SLOW = "KvPairSlow"
"""The name of the condition of two nodes on GPUs between which KV goes through the host."""


class ProbeFault(enum.Enum):
    """Why a decode node could not read known bytes of a prefill node."""

    TIMED_OUT = "timed_out"
    """Both nodes live, and the bytes did not come in time."""
    WRONG_BYTES = "wrong_bytes"
    """Other bytes came."""
    READ_FAILED = "read_failed"
    """The read failed, or one of the nodes could not do its part."""


@dataclass(frozen=True, slots=True)
class FailedProbe:
    """The latest failed probe between this node and a peer, until one passes or the peer is gone.

    A prefill node, which does not open links, may show it up to three minutes after the decode node is gone.
    """

    peer: str
    fault: ProbeFault
    detail: str
    """The failure in words, which names both nodes."""
    age_s: float
    count: int
    """The number of probes with this peer that failed in a row."""


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """How fast this node reads the KV of a peer, by the latest join probe of the two."""

    peer: str
    bytes_per_second: float
    num_bytes: int
    """Size of the read that was measured, a block's: of few bytes the time is that of a read, whatever its bytes."""
    lane: str
    """The transport that moves it, as the transfer agent calls it (`cuda_ipc/cuda`); empty if it does not say."""
    from_memory: str
    """DRAM or VRAM, of the peer."""
    to_memory: str
    why_slow: str = ""
    """In words, for two GPUs between which KV goes through the host; empty otherwise."""


SLOW_BYTES_PER_S = 5e9
"""Reads from GPU to GPU that are slower go through the host: NVLink, RDMA and shared PCIe move 20e9 bytes a second and
more, and TCP about half a gigabyte."""


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """A node's part in hand-offs."""

    layout: str = ""
    """The block layout, which must be the same on both nodes of a hand-off."""
    open: Sequence[OpenHandoff] = ()
    ended: Sequence[EndedHandoffs] = ()
    refused_links: Sequence[RefusedLink] = ()
    """Latest first."""
    failed_probes: Sequence[FailedProbe] = ()
    """The pair that began to fail first comes first; at most 64."""
    pairs: Sequence[MeasuredPair] = ()
    """The nodes that this node reads from, by name."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The whole report of a node about itself."""

    node: NodeDescription
    load: LoadReport
    waiting_by_reason: Mapping[str, int] = field(default_factory=dict)
    handoff: HandoffReport = field(default_factory=HandoffReport)
    compute_paths: Sequence[ComputePath] = ()
    """The implementations that compute the model's steps, part by part."""
    ranks: Sequence[RankReport] = ()
    """The processes that compute the model, in order; empty for a node of one rank."""
    adapters: Sequence[NodeAdapter] = ()
    """The adapters that routers want on the node."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One of the processes that compute a node's model."""

    rank: int
    """Its number; 0 is the node's own process."""
    pid: int
    is_up: bool
    """Whether the process runs. The fields below are 0 if it does not."""
    resident_bytes: int = 0
    """Memory that is in use and not swapped out, shared memory included."""
    shared_bytes: int = 0
    """Memory of that which it shares with the other ranks, the node's KV cache above all."""
    cpu_s: float = 0.0
    """Processor time of all its threads."""
    num_threads: int = 0
    host: str = ""
    """The address of its host; empty: the node's own."""


@dataclass(frozen=True, slots=True)
class ComputePath:
    """Which implementation computes one part of a model's steps on this node."""

    part: str
    """products, attention, decoder or step."""
    runs: str
    """The implementation's name."""
    why_not_faster: str = ""
    """The reason why Baton's faster implementation does not run here; empty: there is no faster one."""
