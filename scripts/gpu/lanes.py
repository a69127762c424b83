"""Reads from a node's log which lanes UCX chose for reads of KV."""

from __future__ import annotations

from kv_transfer.backends.ucx_lanes import read_lanes

LANES = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
"""The environment with which a node's UCX says so in the node's log; otherwise Baton reads it in the node."""


def lane_lines(log: str) -> list[str]:
    """One line for each range of sizes of each kind of read between processes, without repetitions."""
    return [f"{lane.kind}: {lane.sizes}: {lane.how}, {lane.transport}" for lane in read_lanes(log)]
