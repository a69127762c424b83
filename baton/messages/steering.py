"""Results of operators' commands, and the events of a cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """The work that a draining node still has."""

    running: int = 0
    waiting: int = 0
    leased_blocks: int = 0
    quarantined_blocks: int = 0
    in_flight: int = 0
    """Legs that the router has sent to the node and that have not ended."""
    idle: bool = False
    """Whether no work is left and every router knows that it must not send more."""
    stopped: bool = False
    """Whether the node's process has ended."""


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """A change in the cluster, as one router saw it."""

    seq: int
    """Number of the event in this run of the router, from 1 on without gaps."""
    time: float
    """Seconds since the epoch."""
    severity: str
    """Normal or Warning."""
    reason: str
    """The kind of event, in one word: NodeReady, NodeLost, Cordoned, ..."""
    subject: str
    """The node or router that the event is about; empty: the cluster."""
    incarnation: str = ""
    request_id: str = ""
    detail: str = ""
    router: str = ""
    """The router's incarnation."""


@dataclass(frozen=True, slots=True)
class RoleSet:
    """The result of a command that sets a node's role."""

    unchanged: bool = False
    """Whether the node has that role already."""
    warning: str = ""
    """What the cluster can no longer serve after the change; empty: it serves as much as before."""
