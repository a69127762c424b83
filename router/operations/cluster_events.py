"""Events of the cluster for operators: what changed between two snapshots of it, and the latest events that are kept.

A snapshot is cheap, and no message from a node is slower for it. A state that changes twice between two snapshots is
reported once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from baton.messages.node_report import KV_PAIR_SLOW, KV_PROBE_FAILED
from baton.messages.operator import ClusterEvent
from baton.registry.desired import DesiredState
from router.placement.known_node import NodeState

_IS_GONE = frozenset({NodeState.LOST, NodeState.SUSPECT})
_READY_AGAIN = frozenset({NodeState.STARTING, NodeState.SUSPECT, NodeState.LOST})


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One incarnation of a node at one moment."""

    name: str
    role: str
    address: str
    state: NodeState
    detail: str = ""
    """Why it is lost."""
    notice: str = ""
    """Its message for operators."""
    was_draining: bool = False
    """Whether it was draining when it reported last: then it has ended as it was meant to."""
    left_out: str = ""
    """Why it gets no new requests though it takes work; empty: it gets them, or takes no work."""


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster at one moment."""

    nodes: Mapping[str, NodeSnapshot] = field(default_factory=dict)
    """Nodes by incarnation."""
    routers: Mapping[str, str] = field(default_factory=dict)
    """Names of routers by incarnation."""
    desired: DesiredState = field(default_factory=DesiredState)
    open_breakers: frozenset[str] = frozenset()
    registry_answers: bool = True
    why_unserved: str = ""
    """Why no request can be served; empty: requests can be."""
    has_served: bool = False
    """Whether requests could be served at this moment or earlier: until then the cluster is starting."""


@dataclass(frozen=True, slots=True)
class ClusterChange:
    """One change, as an event for operators."""

    reason: str
    subject: str = ""
    incarnation: str = ""
    detail: str = ""
    is_warning: bool = False


def cluster_changes(before: ClusterSnapshot, after: ClusterSnapshot) -> list[ClusterChange]:
    """The changes between two snapshots, causes before effects."""
    return [
        *_registry_changes(before, after),
        *_desired_changes(before.desired, after.desired),
        *_node_changes(before, after),
        *_router_changes(before.routers, after.routers),
        *_breaker_changes(before.open_breakers, after.open_breakers),
        *_health_changes(before, after),
    ]


def _registry_changes(before: ClusterSnapshot, after: ClusterSnapshot) -> Iterator[ClusterChange]:
    if before.registry_answers and not after.registry_answers:
        yield ClusterChange("RegistryLost", detail="serving goes on with the last view", is_warning=True)
    if after.registry_answers and not before.registry_answers:
        yield ClusterChange("RegistryBack")


def _desired_changes(before: DesiredState, after: DesiredState) -> Iterator[ClusterChange]:
    for name in sorted(after.cordoned - before.cordoned):
        yield ClusterChange("Cordoned", name, detail="no new requests")
    for name in sorted(before.cordoned - after.cordoned):
        yield ClusterChange("Uncordoned", name)
    for name in sorted(after.prefill | after.decode):
        if (role := after.role_of(name)) != before.role_of(name):
            yield ClusterChange("RoleWanted", name, detail=f"{role}")


def _node_changes(before: ClusterSnapshot, after: ClusterSnapshot) -> Iterator[ClusterChange]:
    earlier = {node.name: node for node in before.nodes.values()}
    for incarnation, node in before.nodes.items():
        if incarnation not in after.nodes and node.state not in _IS_GONE:
            yield ClusterChange("NodeLeft", node.name, incarnation)
    for incarnation, node in after.nodes.items():
        known = before.nodes.get(incarnation)
        if known is None:
            yield ClusterChange("NodeJoined", node.name, incarnation, f"{node.role} at {node.address}")
            former = earlier.get(node.name)
            if former is not None and former.role != node.role:
                yield ClusterChange("RoleChanged", node.name, incarnation, f"{former.role} to {node.role}")
        yield from _state_changes(incarnation, known.state if known is not None else NodeState.STARTING, node)
        if node.left_out and not (known is not None and known.left_out):
            yield ClusterChange("NodeIncompatible", node.name, incarnation, node.left_out, is_warning=True)
        elif known is not None and known.left_out and not node.left_out and node.state is NodeState.READY:
            yield ClusterChange("NodeCompatible", node.name, incarnation, "gets new requests")
        if node.notice and node.notice != (known.notice if known is not None else ""):
            yield ClusterChange(_reason_of_notice(node), node.name, incarnation, node.notice, is_warning=True)


def _reason_of_notice(node: NodeSnapshot) -> str:
    for condition in (KV_PROBE_FAILED, KV_PAIR_SLOW):
        if node.notice.startswith(condition):
            return condition
    # A node that drains opens no link.
    return "DrainGaveUp" if node.state is NodeState.DRAINING else "LinkRefused"


def _state_changes(incarnation: str, before: NodeState, node: NodeSnapshot) -> Iterator[ClusterChange]:
    state = node.state
    if state is before:
        return
    if state is NodeState.DRAINING:
        yield ClusterChange("NodeDraining", node.name, incarnation)
    elif state in _IS_GONE:
        if node.was_draining:
            if before not in _IS_GONE:
                yield ClusterChange("NodeLeft", node.name, incarnation, "drained")
        elif before not in _IS_GONE:
            reason = "NodeLost" if state is NodeState.LOST else "NodeSuspect"
            yield ClusterChange(reason, node.name, incarnation, node.detail, is_warning=True)
        elif state is NodeState.LOST:
            yield ClusterChange("NodeLost", node.name, incarnation, node.detail, is_warning=True)
    elif before in _READY_AGAIN:
        yield ClusterChange("NodeReady", node.name, incarnation, node.role)


def _router_changes(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[ClusterChange]:
    for incarnation, name in after.items():
        if incarnation not in before:
            yield ClusterChange("RouterJoined", name, incarnation)
    for incarnation, name in before.items():
        if incarnation not in after:
            yield ClusterChange("RouterLeft", name, incarnation)


def _breaker_changes(before: frozenset[str], after: frozenset[str]) -> Iterator[ClusterChange]:
    for name in sorted(after - before):
        yield ClusterChange("BreakerOpened", name, detail="passed over while others are left", is_warning=True)
    for name in sorted(before - after):
        yield ClusterChange("BreakerClosed", name)


def _health_changes(before: ClusterSnapshot, after: ClusterSnapshot) -> Iterator[ClusterChange]:
    # A cluster that is starting is not unavailable: the warning would be shown long after the start.
    if after.why_unserved and not before.why_unserved and before.has_served:
        yield ClusterChange("ClusterUnavailable", detail=after.why_unserved, is_warning=True)
    if before.why_unserved and not after.why_unserved:
        yield ClusterChange("ClusterServes")


MAX_EVENTS = 2048


class EventRing:
    """Keeps the latest events. Belongs to the event loop. A reader that falls far behind finds a gap in the numbers."""

    def __init__(self, router: str, wall: Callable[[], float], size: int = MAX_EVENTS) -> None:
        """`router`: this router's incarnation, which numbers the events; `wall`: returns seconds since the epoch."""
        self._router = router
        self._wall = wall
        self._events: deque[ClusterEvent] = deque(maxlen=size)
        self._last = 0
        self._changed = asyncio.Event()

    def record(
        self,
        reason: str,
        subject: str = "",
        *,
        incarnation: str = "",
        request_id: str = "",
        detail: str = "",
        is_warning: bool = False,
    ) -> None:
        """Add an event that happened now."""
        self._last += 1
        severity = "Warning" if is_warning else "Normal"
        self._events.append(
            ClusterEvent(
                self._last, self._wall(), severity, reason, subject, incarnation, request_id, detail, self._router
            )
        )
        self._changed.set()
        self._changed = asyncio.Event()

    def after(self, seq: int) -> list[ClusterEvent]:
        """The events with a larger number that are still kept, the oldest first."""
        if seq >= self._last:
            return []
        return [event for event in self._events if event.seq > seq]

    async def follow(self, seq: int) -> AsyncIterator[ClusterEvent]:
        """Yield the events that `after` returns, and then each new event. The iterator ends when it is closed."""
        while True:
            changed = self._changed
            for event in self.after(seq):
                seq = event.seq
                yield event
            if seq >= self._last:
                await changed.wait()
