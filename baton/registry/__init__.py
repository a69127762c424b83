"""Membership: which processes are in the cluster. `registry` speaks Redis; the names here cost no import of it."""

from baton.registry.base import Lease, Membership, require
from baton.registry.records import BadRecord, NodeRecord, NodeRole, NodeState, Snapshot

__all__ = ["BadRecord", "Lease", "Membership", "NodeRecord", "NodeRole", "NodeState", "Snapshot", "require"]
