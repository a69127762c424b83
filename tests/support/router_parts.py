"""Descriptions, records and requests for tests of the router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from baton.engine.kv_cache.block_hash import BlockHasher, CacheKeyFields
from baton.messages.ids import AttemptKey
from baton.messages.node import NodeDescription, Role
from baton.messages.sampling import SamplingParams
from baton.node.reports.reports import node_record
from baton.registry import NodeRecord
from router.admission.request import ValidRequest
from router.placement.room import DEFAULT_RULES, RoomRules
from router.placement.view import ClusterView

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
        link_protocol=7,
        takes_moves=True,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def prefill(name: str = "p1", **changes: object) -> NodeDescription:
    return description(name, Role.PREFILL, **changes)  # type: ignore[arg-type]


def decode(name: str = "d1", **changes: object) -> NodeDescription:
    return description(name, Role.DECODE, **changes)  # type: ignore[arg-type]


def block_keys(prompt: Sequence[int], size: int, node: NodeDescription | None = None, salt: str = "") -> list[bytes]:
    """The keys of a prompt's blocks, as the engine of a node computes them. None: a node whose layout is "layout"."""
    node = node or decode(kv_layout="layout")
    hasher = BlockHasher(CacheKeyFields(node.model_fingerprint, node.dtype, node.kv_layout), size)
    keys: list[bytes] = []
    hasher.extend(keys, hasher.root(cache_salt=salt), prompt)
    return keys


def record_of(node: NodeDescription, *, started_at: float = 1.0) -> NodeRecord:
    """Return the record of a node in the registry."""
    return node_record(node, started_at, lease_s=10.0)


def view_of(
    *nodes: NodeDescription,
    clock: Callable[[], float] = lambda: 0.0,
    rules: RoomRules = DEFAULT_RULES,
    needs_pairs: bool = False,
    across: bool = False,
) -> ClusterView:
    """A view to which these nodes are attached, which were started one after the other."""
    view = ClusterView(clock, rules, needs_pairs=needs_pairs, across=across)
    view.registered([replace(record_of(node), start_number=1 + place) for place, node in enumerate(nodes)])
    for node in nodes:
        view.attached(node, now=0.0)
    return view


def request(request_id: str = "r", *, max_tokens: int = 8, stop: tuple[str, ...] = (), n: int = 1) -> ValidRequest:
    params = SamplingParams(seed=1, max_tokens=max_tokens, n=n)
    return ValidRequest((5, 6, 7), params, request_id=request_id, model=MODEL, stop=stop, num_returned=n)


@cache
def key(attempt: int = 1, request_id: str = "r") -> AttemptKey:
    return AttemptKey(request_id, attempt)
