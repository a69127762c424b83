"""The registry: which processes are in the cluster, and what operators want of them.

`registry` keeps it in Redis. Importing the names of this package does not import a Redis client.
"""

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
