"""A node's life: STARTING → READY → DRAINING → STOPPED."""

from __future__ import annotations

import enum

from baton.machine import Machine


class NodeState(enum.Enum):
    """Where a node is in its life; the value is the operator's word for it."""

    STARTING = "Starting"
    READY = "Ready"
    DRAINING = "Draining"
    STOPPED = "Stopped"


class NodeEvent(enum.Enum):
    """What moves a node through its life."""

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
    """A fresh life."""
    return Machine(f"node {node_id}", NodeState.STARTING, NODE_TABLE)
