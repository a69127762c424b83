"""Example nodes, requests and histories for tests of the live page."""

from __future__ import annotations

import math
from typing import Any

from baton.messages.operator import NodeStatus, RequestRow
from router.operations.live_history import SAMPLE_EVERY_S, Buckets, LiveHistory, RouterTotals

BUCKETS = Buckets((0.01, 0.1, math.inf), (0.01, 0.1, math.inf))


def node(name: str, role: str, **changed: Any) -> NodeStatus:
    parts: dict[str, Any] = {"status": "Ready", "running": 3, "waiting": 0, "kv_usage": 0.25, "model": "m"}
    return NodeStatus(
        name=name, role=role, incarnation=f"{name}.x", address="127.0.0.1:1", pid=1, **{**parts, **changed}
    )


def row(request_id: str, **changed: Any) -> RequestRow:
    parts: dict[str, Any] = {
        "state": "Decoding",
        "router": "r0",
        "age_s": 1.5,
        "prefill_node": "p0",
        "decode_node": "d0",
        "prompt_tokens": 100,
        "output_tokens": 7,
        "attempts": 1,
        "ttft_ms": 31.0,
        "total_ms": None,
    }
    return RequestRow(request_id, **{**parts, **changed})


def totals(number: int, sample: int, **changed: Any) -> RouterTotals:
    """A router's totals: each sample has 50 tokens and two requests more than the one before."""
    parts: dict[str, Any] = {
        "tokens": 50 * sample,
        "requests": 2 * sample,
        "running": 3,
        "waiting": 1,
        "ttft": (sample, sample, 0),
        "gaps": (40 * sample, 10 * sample, 0),
    }
    return RouterTotals(f"r{number}", f"r{number}.x", **{**parts, **changed})


def history_of(num_samples: int, num_routers: int = 1, **changed: Any) -> LiveHistory:
    """The history of a cluster whose routers all serve the same."""
    history = LiveHistory(BUCKETS)
    for sample in range(num_samples):
        history.add(1000 + SAMPLE_EVERY_S * sample, [totals(n, sample, **changed) for n in range(num_routers)])
    return history
