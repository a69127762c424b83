"""Membership: which processes are in the cluster. `registry` speaks Redis; the names here cost no import of it."""

from baton.registry.base import Lease, Membership, require
from baton.registry.desired import DesiredChange, DesiredState
from baton.registry.records import BadRecord, NodeRecord, NodeRole, NodeState, Snapshot

__all__ = [
    "BadRecord",
    "DesiredChange",
    "DesiredState",
    "Lease",
    "Membership",
    "NodeRecord",
    "NodeRole",
    "NodeState",
    "Snapshot",
    "require",
]
