"""What operators do to a cluster and hear of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How much is left of a node's work."""

    running: int = 0
    waiting: int = 0
    leased_blocks: int = 0
    quarantined_blocks: int = 0
    in_flight: int = 0
    """Legs that the router has sent there."""
    idle: bool = False
    """Nothing is left, and every router knows that nothing may come."""
    stopped: bool = False
    """Its process has ended."""


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something that became of the cluster, as one router saw it."""

    seq: int
    """Of that run of the router, from 1 on without gaps."""
    time: float
    """Seconds since the epoch."""
    severity: str
    """Normal or Warning."""
    reason: str
    """What happened, in one word: NodeReady, NodeLost, Cordoned, ..."""
    subject: str
    """What it happened to; empty: the cluster."""
    incarnation: str = ""
    request_id: str = ""
    detail: str = ""
    router: str = ""
    """The router's incarnation."""


@dataclass(frozen=True, slots=True)
class RoleSet:
    """What came of asking for a role."""

    unchanged: bool = False
    """The node is that already."""
    warning: str = ""
    """Why the cluster serves less once it has changed."""
