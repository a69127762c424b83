"""Reads from a node's log which lanes UCX chose for reads of KV.

With UCX_PROTO_INFO it writes a table for every kind of operation and memory that an endpoint uses first:

    | decode-0.f3k intra-node cfg#1                                |
    | remote memory read by ucp_get* into cuda/GPU0 from cuda/GPU0 |
    | 0..inf | zero-copy | cuda_ipc/cuda                           |
"""

from __future__ import annotations

LANES = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info"}
"""The environment with which a node's UCX says so; Baton silences it otherwise."""
_READS = "remote memory read"
_OWN = " self "
"""In a table's title: the endpoint of a process to itself, which moves no KV."""


def read_lanes(log: str) -> list[str]:
    """One line for each range of sizes of each kind of read between processes, without repetitions."""
    names: dict[str, None] = {}
    title = kind = ""
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].split("|")][:-1]
        if len(cells) == 1:
            # A table has one or two lines of a single cell: whose it is, and what it is for.
            is_title = "cfg#" in cells[0]
            title, kind = (cells[0], "") if is_title else (title, cells[0])
        elif len(cells) == 3 and _READS in kind and _OWN not in f" {title} " and cells[0] != "Range":
            names.setdefault(f"{kind}: {cells[0]}: {cells[1]}, {cells[2]}")
    return list(names)
