"""Descriptions, records and requests for tests of the router."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.request import SamplingParams
from baton.ids import AttemptKey
from baton.registry import NodeRecord
from baton.rpc.messages import NodeDescription, Role
from router.request import ValidRequest

MODEL = "demo"


def description(node_id: str, role: Role, *, run: int = 1, **changes: object) -> NodeDescription:
    """A node whose incarnation is NODE.RUN and whose port follows from both."""
    port = 2000 + sum(node_id.encode()) * 10 + run
    base = NodeDescription(
        node_id=node_id,
        incarnation=f"{node_id}.{run}",
        role=role,
        address=f"127.0.0.1:{port}",
        pid=port,
        version="0.1.0",
        model=MODEL,
        model_fingerprint="print",
        dtype="float32",
        numerics="cpu",
        bit_exact=True,
        vocab_size=300,
        max_model_len=64,
        block_size=4,
        num_blocks=64,
        eos_token_ids=frozenset({2}),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def prefill(name: str = "p1", **changes: object) -> NodeDescription:
    return description(name, Role.PREFILL, **changes)  # type: ignore[arg-type]


def decode(name: str = "d1", **changes: object) -> NodeDescription:
    return description(name, Role.DECODE, **changes)  # type: ignore[arg-type]


def record_of(node: NodeDescription, *, started_at: float = 1.0) -> NodeRecord:
    """The node as it stands in the registry."""
    return NodeRecord(
        name=node.node_id,
        role=node.role.value,  # type: ignore[arg-type]
        incarnation=node.incarnation,
        address=node.address,
        pid=node.pid,
        version=node.version,
        started_at=started_at,
        lease_s=10.0,
        model=node.model,
        model_fingerprint=node.model_fingerprint,
        dtype=node.dtype,
        numerics=node.numerics,
        bit_exact=node.bit_exact,
        vocab_size=node.vocab_size,
        max_model_len=node.max_model_len,
        block_size=node.block_size,
        num_blocks=node.num_blocks,
        eos_token_ids=node.eos_token_ids,
    )


def request(request_id: str = "r", *, max_tokens: int = 8, stop: tuple[str, ...] = (), n: int = 1) -> ValidRequest:
    params = SamplingParams(seed=1, max_tokens=max_tokens, n=n)
    return ValidRequest(request_id, MODEL, (5, 6, 7), params, stop, num_returned=n)


def key(attempt: int = 1, request_id: str = "r") -> AttemptKey:
    return AttemptKey(request_id, attempt)
