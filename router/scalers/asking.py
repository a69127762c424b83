"""The scaler that asks another program in JSON: `baton up` over a socket, or a command of the operator's.

One request, one answer. Requests: `{"do": "observe"}`, `{"do": "scale", "pool": "decode", "nodes": 3}` and
`{"do": "remove", "name": "decode-2"}`. Answers: `{"pools": {"decode": {"want": 3, "have": 2}}}` to the first, with
`"next_out": NAME` for a pool from which only that node can be removed; `{}` to the others; or
`{"fault": "unknown_node", "error": "why"}`, where `fault` is one of ScalerFault.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from router.scalers.scaler import (
    MAX_NAME,
    MAX_NODES,
    MAX_POOLS,
    PoolSize,
    Scaler,
    ScalerFailed,
    ScalerFault,
    check_pool,
    first_problem,
    node_of,
    nodes_to_add,
    pool_of,
)

MAX_REQUEST_BYTES = 4096
ALL_POOLS = "all pools"
Ask = Callable[[bytes, str], Awaitable[bytes]]
"""Sends a request and returns the answer; the second argument is the subject of its errors."""
_Count = Annotated[int, Field(ge=0, le=MAX_NODES)]
_PoolName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")]
_NodeName = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Observe(_Strict):
    """Asks for the size of each pool."""

    do: Literal["observe"]


class Scale(_Strict):
    """Asks for more nodes."""

    do: Literal["scale"]
    pool: _PoolName
    nodes: _Count


class Remove(_Strict):
    """Asks for one node less."""

    do: Literal["remove"]
    name: _NodeName


class _Size(_Strict):
    want: _Count
    have: _Count
    next_out: Annotated[str, Field(max_length=MAX_NAME)] = ""


class _Pools(_Strict):
    pools: Annotated[dict[_PoolName, _Size], Field(min_length=1, max_length=MAX_POOLS)]


class _Refusal(_Strict):
    fault: Annotated[ScalerFault, Field(strict=False)]
    error: Annotated[str, Field(max_length=1000)]


class _Done(_Strict):
    pass


_REQUEST: TypeAdapter[Observe | Scale | Remove] = TypeAdapter(
    Annotated[Observe | Scale | Remove, Field(discriminator="do")]
)
_Answer = TypeVar("_Answer", bound=BaseModel)
_OBSERVED: TypeAdapter[_Pools | _Refusal] = TypeAdapter(_Pools | _Refusal)
_CHANGED: TypeAdapter[_Done | _Refusal] = TypeAdapter(_Done | _Refusal)


class AskingScaler(Scaler):
    """Asks by `ask`. Its answers are checked; that nodes are removed by the rules is up to the answering side."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def observe(self) -> Mapping[str, PoolSize]:
        answer = _read(_OBSERVED, await self._ask(b'{"do": "observe"}', ALL_POOLS), ALL_POOLS)
        return {name: PoolSize(size.want, size.have, size.next_out) for name, size in answer.pools.items()}

    async def scale(self, pool: str, nodes: int) -> None:
        seen = await self.observe()
        check_pool(pool, seen)
        if nodes_to_add(pool, nodes, seen[pool].want):
            request = {"do": "scale", "pool": pool, "nodes": nodes}
            _read(_CHANGED, await self._ask(json.dumps(request).encode(), pool_of(pool)), pool_of(pool))

    async def remove(self, name: str) -> None:
        if not 0 < len(name) <= MAX_NAME:
            raise ScalerFailed(ScalerFault.UNKNOWN_NODE, node_of(name), f"a name has 1 to {MAX_NAME} characters")
        _read(
            _CHANGED, await self._ask(json.dumps({"do": "remove", "name": name}).encode(), node_of(name)), node_of(name)
        )


async def answered(request: bytes, scaler: Scaler) -> bytes:
    """The answer of `scaler` to a request of another process; what is wrong with it is an answer, too."""
    try:
        asked = _REQUEST.validate_json(request)
    except ValidationError as error:
        return _refusal(ScalerFault.REFUSED, f"not a request: {first_problem(error)}")
    try:
        match asked:
            case Observe():
                sizes = await scaler.observe()
                parts = {name: _Size(want=s.want, have=s.have, next_out=s.next_out) for name, s in sizes.items()}
                return _Pools(pools=parts).model_dump_json().encode()
            case Scale():
                await scaler.scale(asked.pool, asked.nodes)
            case Remove():
                await scaler.remove(asked.name)
    except ScalerFailed as error:
        return _refusal(error.fault, error.detail)
    return b"{}"


def _refusal(fault: ScalerFault, detail: str) -> bytes:
    return json.dumps({"fault": fault, "error": detail[:1000]}).encode()


def _read(kind: TypeAdapter[_Answer | _Refusal], answer: bytes, subject: str) -> _Answer:
    try:
        said = kind.validate_json(answer)
    except ValidationError as error:
        raise ScalerFailed(ScalerFault.INVALID_ANSWER, subject, first_problem(error)) from None
    if isinstance(said, _Refusal):
        raise ScalerFailed(said.fault, subject, said.error)
    return said
