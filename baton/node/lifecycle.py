"""The states of a node, STARTING → READY → DRAINING → STOPPED, and how it is told to end or to change its role."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

from baton.machine import Machine
from baton.messages.node import Role


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


class NodeStop:
    """Calling it is a signal: the first one drains the node, the second one ends it at once. Belongs to one event loop.

    It outlives an incarnation: `pop_next_role` tells whether another one follows.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        """The running incarnation is to end when its work is done."""
        self.for_good = asyncio.Event()
        """No other incarnation follows, so what is left after `drain_s` ends with the process."""
        self.forced = asyncio.Event()
        """Nothing is waited for any more."""
        self.on_drained: Callable[[], None] = lambda: None
        """Called when the work of an incarnation is done, before its parts are stopped."""
        self._signalled = False
        self._next_role: Role | None = None

    def __call__(self) -> None:
        if self._signalled:
            self.forced.set()
        self._signalled = True
        self.drain()

    @property
    def is_signalled(self) -> bool:
        """Whether a signal has come, so that the next one forces."""
        return self._signalled

    def drain(self) -> None:
        """End for good when the running work is done. Idempotent; the next signal still counts as the first one."""
        self.for_good.set()
        self.requested.set()

    def force(self) -> None:
        """End for good, and wait for nothing."""
        self.drain()
        self.forced.set()

    def change_role(self, role: Role) -> None:
        """Start again in this role when the running work is done, here or elsewhere. The last call counts."""
        self._next_role = role
        self.requested.set()

    def pop_next_role(self) -> Role | None:
        """The role of the next incarnation, once one has ended; None: there is none."""
        role, self._next_role = self._next_role, None
        if role is None or self.for_good.is_set():
            return None
        self.requested.clear()
        return role
