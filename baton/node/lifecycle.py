"""The states of a node: STARTING → READY → DRAINING → STOPPED."""

from __future__ import annotations

import enum

from baton.machine import Machine


class NodeState(enum.Enum):
    """The states of a node; the value is what operators see."""

    STARTING = "Starting"
    READY = "Ready"
    DRAINING = "Draining"
    STOPPED = "Stopped"


class NodeEvent(enum.Enum):
    """What takes a node from one state to the next."""

    STARTED = enum.auto()
    DRAIN = enum.auto()
    STOP = enum.auto()


NODE_TABLE = {
    (NodeState.STARTING, NodeEvent.STARTED): NodeState.READY,
    (NodeState.STARTING, NodeEvent.DRAIN): NodeState.DRAINING,
    (NodeState.STARTING, NodeEvent.STOP): NodeState.STOPPED,
    (NodeState.READY, NodeEvent.DRAIN): NodeState.DRAINING,
    (NodeState.READY, NodeEvent.STOP): NodeState.STOPPED,
    (NodeState.DRAINING, NodeEvent.DRAIN): NodeState.DRAINING,
    (NodeState.DRAINING, NodeEvent.STOP): NodeState.STOPPED,
}


def node_lifecycle(node_id: str) -> Machine[NodeState, NodeEvent]:
    """A state machine for a node that starts."""
    return Machine(f"node {node_id}", NodeState.STARTING, NODE_TABLE)
