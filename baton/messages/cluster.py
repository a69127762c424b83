"""The state of the cluster and of its processes, as one router sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.messages.node_shape import NodeShape


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One process of the cluster as an operator sees it."""

    name: str
    role: str
    status: str
    incarnation: str
    address: str
    pid: int
    model: str
    running: int
    """Requests that run on the node."""
    waiting: int
    """Requests that wait on the node."""
    kv_usage: float
    """Share of the KV blocks in use, 0 to 1."""
    version: str = ""
    age_s: float = 0.0
    total_blocks: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    quarantined_blocks: int = 0
    detail: str = ""
    bit_exact: bool = False
    cordoned: bool = False
    """Whether an operator has cordoned the node: it gets no new requests."""
    desired_role: str = ""
    """The role that an operator wants the node to have; empty: the role that it was started with."""
    in_flight: int = 0
    """Legs that the router has sent to the node and that have not ended."""
    tp: int = 0
    """Ranks that compute each layer of the node's model together; 0: not known, or a router."""
    pp: int = 0
    """Stages of consecutive layers, of `tp` ranks each; 0: not known, or a router."""
    capabilities: Sequence[str] = ()
    """What the node's model can be asked to do there; empty for a router."""
    bits: str = ""
    """See `NodeDescription.bits`; empty for a router, and for a node to which the router was never attached."""
    is_verified: bool = False
    """Whether the logits of the node's model were those of transformers in a check at start."""

    @property
    def shape(self) -> NodeShape:
        """How the node's model is divided among ranks; one rank where that is not known."""
        return NodeShape.of(self.tp, self.pp)

    @property
    def is_idle(self) -> bool:
        """Whether the node has no request and no leg, and none of its blocks is leased or quarantined."""
        return not (self.running or self.waiting or self.leased_blocks or self.quarantined_blocks or self.in_flight)


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The cluster as one router sees it."""

    cluster: str
    health: str
    """ok, degraded or unavailable."""
    detail: str
    nodes: Sequence[NodeStatus]
