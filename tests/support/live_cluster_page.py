"""Example nodes and requests for tests of the live page."""

from __future__ import annotations

from typing import Any

from baton.messages.cluster import NodeStatus
from baton.messages.request_rows import RequestRow


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
