"""What all scalers do, the errors with which they fail, and the bounds of what they believe."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from pydantic import ValidationError

from baton.errors import BatonError, Status

MAX_NODES = 4096
"""The most nodes of a pool. A supervisor that claims more is not believed."""
MAX_POOLS = 16
MAX_NAME = 253
"""The most characters of a node's name; Kubernetes' names of pods have at most as many."""
CALL_S = 30.0
"""Seconds after which one call to a supervisor is given up."""


class ScalerFault(enum.StrEnum):
    """Why a scaler could not do what it was asked."""

    UNREACHABLE = "unreachable"
    """The supervisor can't be asked: nothing listens there, or its program is missing."""
    TIMEOUT = "timeout"
    """No answer came in time. Whether the supervisor has acted is not known: observe before another call."""
    DENIED = "denied"
    """The supervisor does not let this process do it."""
    UNKNOWN_POOL = "unknown_pool"
    UNKNOWN_NODE = "unknown_node"
    REFUSED = "refused"
    """It is not done because it would stop a node that was not named, or is beyond a bound."""
    CONFLICT = "conflict"
    """The pool is changing, by someone else or by an earlier call; nothing was changed. Observe, and decide again."""
    FAILED = "failed"
    """The supervisor says that it failed."""
    INVALID_ANSWER = "invalid_answer"
    """The supervisor's answer is too long, or not what it is to be."""


_RETRYABLE = frozenset({ScalerFault.UNREACHABLE, ScalerFault.TIMEOUT, ScalerFault.CONFLICT})


class ScalerFailed(BatonError):
    """A scaler could not observe or change `subject`, such as `pool decode` or `node decode-3`; `fault` says why."""

    status = Status.FAILED_PRECONDITION

    def __init__(self, fault: ScalerFault, subject: str, detail: str) -> None:
        super().__init__(f"{subject}: {detail} ({fault})")
        self.fault = fault
        self.subject = subject
        self.detail = detail
        self.retryable = fault in _RETRYABLE


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many nodes a pool is to have, and how many of them serve, as their supervisor says."""

    want: int
    have: int
    next_out: str = ""
    """The only node that `remove` takes from the pool; empty: any. A LeaderWorkerSet stops its last group alone."""


class Scaler(Protocol):
    """Changes the number of nodes. One caller at a time; every call is bounded in time, and raises ScalerFailed.

    1. `scale` only adds nodes: a pool loses a node by `remove` alone, since only a node that was named has been
       evacuated. It compares with what the supervisor says now, not with what was observed before.
    2. A call that ends with UNREACHABLE, TIMEOUT, FAILED or INVALID_ANSWER may have had its effect. One that ends with
       any other fault has left each pool at its number.
    3. `scale` and `remove` may be repeated: the second call finds that nothing is left to do. Of a node that has ended
       it says UNKNOWN_NODE.
    4. A name may be given again to a later node, so whoever removes a node forgets what was desired of it.
    """

    async def observe(self) -> Mapping[str, PoolSize]:
        """The size of each pool."""
        ...

    async def scale(self, pool: str, nodes: int) -> None:
        """Let the pool have `nodes` nodes. Returns when the supervisor knows; the nodes start later."""
        ...

    async def remove(self, name: str) -> None:
        """Stop this node and let its pool have one node fewer. Returns when the supervisor knows."""
        ...


def pool_of(name: str) -> str:
    """The subject of errors about a pool."""
    return f"pool {name}"


def pools_of(names: Collection[str]) -> str:
    """The subject of errors about several pools."""
    return pool_of(next(iter(names))) if len(names) == 1 else f"pools {', '.join(names)}"


def node_of(name: str) -> str:
    """The subject of errors about a node."""
    return f"node {name[:MAX_NAME]}"


def check_pool(name: str, known: Collection[str]) -> None:
    """Raise UNKNOWN_POOL unless there is such a pool."""
    if name not in known:
        raise ScalerFailed(
            ScalerFault.UNKNOWN_POOL, pool_of(name[:MAX_NAME]), f"there is none; known: {', '.join(known) or 'none'}"
        )


def nodes_to_add(pool: str, nodes: int, want: int) -> int:
    """How many nodes the pool lacks. Raises REFUSED for fewer than it is to have, and for a number out of bounds."""
    if not 0 <= nodes <= MAX_NODES:
        raise ScalerFailed(ScalerFault.REFUSED, pool_of(pool), f"{nodes} nodes are not 0 to {MAX_NODES}")
    if nodes < want:
        raise ScalerFailed(
            ScalerFault.REFUSED,
            pool_of(pool),
            f"it is to have {want} nodes, and loses one only by its name, not {nodes}",
        )
    return nodes - want


def first_problem(error: ValidationError) -> str:
    """The first problem of a value from outside, in a line, without the value."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]


def unknown_node(name: str, pools: Collection[str]) -> ScalerFailed:
    """The error for a node that no pool has."""
    return ScalerFailed(ScalerFault.UNKNOWN_NODE, node_of(name), f"it is not in {pools_of(pools)}")
