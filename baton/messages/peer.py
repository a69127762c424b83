"""Where another node is reached that has something which this one needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """One incarnation of another node: the one whose blocks hold a prompt's KV, or that has rows of an encoder."""

    node_id: str
    incarnation: str
    address: str
    """HOST:PORT of its gRPC server."""
