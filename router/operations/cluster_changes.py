"""What became of the cluster between two looks at it. Pure.

Looking is cheap and costs no message of a node anything; what changes twice between two looks is told once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from baton.registry.desired import DesiredState
from router.placement.view import NodeState

_IS_GONE = frozenset({NodeState.LOST, NodeState.SUSPECT})
_READY_AGAIN = frozenset({NodeState.STARTING, NodeState.SUSPECT, NodeState.LOST})


@dataclass(frozen=True, slots=True)
class NodeLook:
    """One incarnation."""

    name: str
    role: str
    address: str
    state: NodeState
    detail: str = ""
    """Why it is lost."""
    notice: str = ""
    """What it wants operators to know."""
    was_draining: bool = False
    """By its own last word: that it is gone is then no loss."""


@dataclass(frozen=True, slots=True)
class ClusterLook:
    """The cluster at one moment."""

    nodes: Mapping[str, NodeLook] = field(default_factory=dict)
    """By incarnation."""
    routers: Mapping[str, str] = field(default_factory=dict)
    """Names, by incarnation."""
    desired: DesiredState = field(default_factory=DesiredState)
    open_breakers: frozenset[str] = frozenset()
    registry_answers: bool = True
    why_unserved: str = ""
    """Why no request could be served; empty: one could."""


@dataclass(frozen=True, slots=True)
class News:
    """One thing that happened."""

    reason: str
    subject: str = ""
    incarnation: str = ""
    detail: str = ""
    is_warning: bool = False


def news(before: ClusterLook, after: ClusterLook) -> list[News]:
    """What happened in between, causes before effects."""
    return [
        *_registry_news(before, after),
        *_desired_news(before.desired, after.desired),
        *_node_news(before, after),
        *_router_news(before.routers, after.routers),
        *_breaker_news(before.open_breakers, after.open_breakers),
        *_health_news(before.why_unserved, after.why_unserved),
    ]


def _registry_news(before: ClusterLook, after: ClusterLook) -> Iterator[News]:
    if before.registry_answers and not after.registry_answers:
        yield News("RegistryLost", detail="serving goes on with the last view", is_warning=True)
    if after.registry_answers and not before.registry_answers:
        yield News("RegistryBack")


def _desired_news(before: DesiredState, after: DesiredState) -> Iterator[News]:
    for name in sorted(after.cordoned - before.cordoned):
        yield News("Cordoned", name, detail="no new requests")
    for name in sorted(before.cordoned - after.cordoned):
        yield News("Uncordoned", name)
    for name in sorted(after.prefill | after.decode):
        if (role := after.role_of(name)) != before.role_of(name):
            yield News("RoleWanted", name, detail=f"{role}")


def _node_news(before: ClusterLook, after: ClusterLook) -> Iterator[News]:
    earlier = {node.name: node for node in before.nodes.values()}
    for incarnation, node in before.nodes.items():
        if incarnation not in after.nodes and node.state not in _IS_GONE:
            yield News("NodeLeft", node.name, incarnation)
    for incarnation, node in after.nodes.items():
        known = before.nodes.get(incarnation)
        if known is None:
            yield News("NodeJoined", node.name, incarnation, f"{node.role} at {node.address}")
            former = earlier.get(node.name)
            if former is not None and former.role != node.role:
                yield News("RoleChanged", node.name, incarnation, f"{former.role} to {node.role}")
        yield from _state_news(incarnation, known.state if known is not None else NodeState.STARTING, node)
        if node.notice and node.notice != (known.notice if known is not None else ""):
            # A node that drains opens no link.
            reason = "DrainGaveUp" if node.state is NodeState.DRAINING else "LinkRefused"
            yield News(reason, node.name, incarnation, node.notice, is_warning=True)


def _state_news(incarnation: str, before: NodeState, node: NodeLook) -> Iterator[News]:
    state = node.state
    if state is before:
        return
    if state is NodeState.DRAINING:
        yield News("NodeDraining", node.name, incarnation)
    elif state in _IS_GONE:
        if node.was_draining:
            if before not in _IS_GONE:
                yield News("NodeLeft", node.name, incarnation, "drained")
        elif before not in _IS_GONE:
            reason = "NodeLost" if state is NodeState.LOST else "NodeSuspect"
            yield News(reason, node.name, incarnation, node.detail, is_warning=True)
        elif state is NodeState.LOST:
            yield News("NodeLost", node.name, incarnation, node.detail, is_warning=True)
    elif before in _READY_AGAIN:
        yield News("NodeReady", node.name, incarnation, node.role)


def _router_news(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[News]:
    for incarnation, name in after.items():
        if incarnation not in before:
            yield News("RouterJoined", name, incarnation)
    for incarnation, name in before.items():
        if incarnation not in after:
            yield News("RouterLeft", name, incarnation)


def _breaker_news(before: frozenset[str], after: frozenset[str]) -> Iterator[News]:
    for name in sorted(after - before):
        yield News("BreakerOpened", name, detail="passed over while others are left", is_warning=True)
    for name in sorted(before - after):
        yield News("BreakerClosed", name)


def _health_news(before: str, after: str) -> Iterator[News]:
    if after and not before:
        yield News("ClusterUnavailable", detail=after, is_warning=True)
    if before and not after:
        yield News("ClusterServes")
