"""How one router sees the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    waiting: int
    kv_usage: float
    version: str = ""
    age_s: float = 0.0
    total_blocks: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    quarantined_blocks: int = 0
    detail: str = ""
    bit_exact: bool = False
    cordoned: bool = False
    """No new requests for it, says an operator."""
    desired_role: str = ""
    """What an operator wants it to be; empty: what it was started as."""
    in_flight: int = 0
    """Legs that the router has sent there and that are not over."""

    @property
    def is_idle(self) -> bool:
        """Nothing runs or waits there, and none of its blocks is promised to anybody."""
        return not (self.running or self.waiting or self.leased_blocks or self.quarantined_blocks or self.in_flight)


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """How one router sees the cluster. `health` is ok, degraded or unavailable."""

    cluster: str
    health: str
    detail: str
    nodes: Sequence[NodeStatus]
