"""The data of the live page, made every two seconds: plain values for JSON, without any text of a request. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton.messages.operator import ClusterEvent, ClusterStatus, NodeStatus, RequestRow, TenantRows
from router.operations.live_history import LiveHistory

MAX_RUNNING = 40
MAX_ENDED = 12
MAX_REMEMBERED = 256
"""Ended requests from which the traffic of pairs is counted."""
MAX_PAIRS = 60
MAX_EVENTS = 20
MAX_TENANTS = 12
RECENT_S = 60.0
"""The traffic of pairs is that of requests that arrived within so many seconds."""


def live_page_data(
    status: ClusterStatus,
    model: str,
    history: LiveHistory,
    running: Sequence[RequestRow],
    num_running: int,
    ended: Iterable[RequestRow],
    events: Iterable[ClusterEvent],
    router: str,
    tenants: TenantRows,
) -> dict[str, Any]:
    """The data. `running`: the latest of this router's `num_running` requests, the latest first, as are `ended`;
    `events`: the oldest first; `tenants`: at this router.
    """
    over = list(ended)
    figures = {row.pop("incarnation"): row for row in history.routers()}
    by_role = sorted(status.nodes, key=lambda node: (_ROLES.get(node.role, 4), node.name))
    nodes = [node for node in by_role if node.role != "router"]
    return {
        "cluster": status.cluster,
        "router": router,
        "health": status.health,
        "detail": status.detail,
        "model": model,
        "totals": {**history.totals(), "kv": _kv_usage(nodes)},
        "history": history.columns(),
        "routers": [_router(node, figures) for node in by_role if node.role == "router"],
        "nodes": [_node(node) for node in nodes],
        "running": [_request(row) for row in running[:MAX_RUNNING]],
        "more_running": max(0, num_running - len(running[:MAX_RUNNING])),
        "ended": [_request(row) for row in over[:MAX_ENDED]],
        "pairs": _pairs([*running, *over]),
        "tenants": _tenants(tenants),
        "events": [_event(event) for event in list(events)[: -MAX_EVENTS - 1 : -1]],
    }


_ROLES = {"router": 0, "encode": 1, "prefill": 2, "decode": 3}


def _router(status: NodeStatus, figures: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A router's state, and its figures if it publishes any."""
    return {
        "name": status.name,
        "status": status.status,
        "detail": status.detail,
        "figures": figures.get(status.incarnation),
    }


def _kv_usage(nodes: Sequence[NodeStatus]) -> list[dict[str, Any]]:
    """The share of the KV blocks of each role that are in use, and their number."""
    usage = []
    for role in ("prefill", "decode"):
        own = [node for node in nodes if node.role == role]
        if blocks := sum(node.total_blocks for node in own):
            used = sum(node.kv_usage * node.total_blocks for node in own)
            usage.append({"role": role, "usage": round(used / blocks, 4), "blocks": blocks})
    return usage


def _node(node: NodeStatus) -> dict[str, Any]:
    return {
        "name": node.name,
        "role": node.role,
        "status": node.status,
        "running": node.running,
        "waiting": node.waiting,
        "kv": round(node.kv_usage, 4),
        "leased": node.leased_blocks,
        "quarantined": node.quarantined_blocks,
        "shape": str(node.shape) if node.shape.num_ranks > 1 else "",
        "detail": node.detail,
    }


def _request(row: RequestRow) -> dict[str, Any]:
    return {
        "id": row.request_id,
        "router": row.router,
        "state": row.state,
        "age_s": round(row.age_s, 2),
        "prefill": row.prefill_node,
        "decode": row.decode_node,
        "prompt": row.prompt_tokens,
        "output": row.output_tokens,
        "attempts": row.attempts,
        "ttft_ms": None if row.ttft_ms is None else round(row.ttft_ms, 1),
        "total_ms": None if row.total_ms is None else round(row.total_ms, 1),
        "detail": row.detail[:200],
    }


def _pairs(rows: Iterable[RequestRow]) -> list[dict[str, Any]]:
    """The latest hand-offs by pair of nodes, the busiest pair first."""
    requests: dict[tuple[str, str], int] = defaultdict(int)
    num_bytes: dict[tuple[str, str], int] = defaultdict(int)
    for row in rows:
        if row.prefill_node and row.decode_node and row.age_s <= RECENT_S:
            requests[row.prefill_node, row.decode_node] += 1
            num_bytes[row.prefill_node, row.decode_node] += row.kv_bytes
    busiest = sorted(requests, key=lambda pair: (-requests[pair], pair))[:MAX_PAIRS]
    return [
        {"prefill": pair[0], "decode": pair[1], "requests": requests[pair], "bytes": num_bytes[pair]}
        for pair in busiest
    ]


def _tenants(tenants: TenantRows) -> list[dict[str, Any]]:
    """The tenants' shares of the last minute, and how long their requests waited on average, in milliseconds."""
    served = tenants.served_last_minute
    return [
        {
            "name": row.tenant,
            "class": row.service_class,
            "weight": row.weight,
            "running": row.running,
            "waiting": row.waiting,
            "share": round(row.served_last_minute / served, 4) if served else None,
            "wait_ms": None if row.mean_wait_s is None else round(1e3 * row.mean_wait_s, 1),
        }
        for row in tenants.tenants
        if row.tenant and (row.running or row.waiting or row.placed_last_minute or row.served_last_minute)
    ]


def _event(event: ClusterEvent) -> dict[str, Any]:
    return {
        "time": event.time,
        "warning": event.severity == "Warning",
        "reason": event.reason,
        "subject": event.subject or event.request_id,
        "detail": event.detail[:200],
    }
