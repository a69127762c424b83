"""What a node tells operators and benchmarks when it is asked: hand-offs, compute paths, and what happened of late."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport, NodeDescription, StepFigures


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One moment on one node; `monotonic_ns` compares between the processes of one host."""

    seq: int
    monotonic_ns: int
    name: str
    attempt: AttemptKey
    value: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One engine step that computed something; `monotonic_ns`: when it was committed."""

    seq: int
    monotonic_ns: int
    figures: StepFigures
    goes_on: bool
    """There was more to compute then: whatever passed until the next step was no idleness."""


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """What happened on one node of late. `monotonic_ns`: its clock at the answer, so that all else is an age."""

    monotonic_ns: int
    events: Sequence[TraceEvent]
    steps: Sequence[TraceStep]


class HandoffSide(enum.Enum):
    """Which half of a hand-off a node has."""

    SENDER = "sender"
    """A lease: blocks that it promised to keep."""
    READER = "reader"
    """A transfer: blocks that are being filled."""


@dataclass(frozen=True, slots=True)
class OpenHandoff:
    """A lease or a transfer that is not over."""

    attempt: AttemptKey
    side: HandoffSide
    state: str
    """The state's name in `kv_transfer.sender.lease_machine` or `kv_transfer.receiver.transfer_machine`."""
    peer: str
    """The other node; empty while nobody reads."""
    peer_incarnation: str
    num_blocks: int
    """Of a lease, those offered so far; of a transfer, those that are to be filled; in quarantine, those that reads may
    still fill."""
    age_s: float


@dataclass(frozen=True, slots=True)
class EndedHandoffs:
    """How many of a reader's transfers ended so since its start."""

    peer: str
    outcome: str
    """arrived, or the value of a `TransferCause`."""
    count: int


@dataclass(frozen=True, slots=True)
class RefusedLink:
    """The latest link between this node and a peer that was refused, on whichever side."""

    peer: str
    cause: str
    """The value of a `TransferCause`."""
    story: str
    """Names both sides and what differs."""
    age_s: float
    count: int
    """How often in a row."""


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """A node's part in hand-offs."""

    layout: str = ""
    """What a peer must have in common with it."""
    open: Sequence[OpenHandoff] = ()
    ended: Sequence[EndedHandoffs] = ()
    refused_links: Sequence[RefusedLink] = ()
    """Latest first."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """All that a node says of itself when it is asked."""

    node: NodeDescription
    load: LoadReport
    waiting_by_reason: Mapping[str, int] = field(default_factory=dict)
    handoff: HandoffReport = field(default_factory=HandoffReport)
    compute_paths: Sequence[ComputePath] = ()
    """What computes the model's steps there, part by part."""


@dataclass(frozen=True, slots=True)
class ComputePath:
    """Which implementation computes one part of a model's steps here."""

    part: str
    """products, attention, decoder or step."""
    runs: str
    why_not_faster: str = ""
    """Why a faster implementation that Baton has does not run; empty: there is none."""
