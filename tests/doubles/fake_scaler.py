"""The fake of `router.scalers.scaler.Scaler`: pools in memory, whose nodes start and end when the test says so."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from router.scalers.scaler import (
    PoolSize,
    Scaler,
    ScalerFailed,
    check_pool,
    nodes_to_add,
    unknown_node,
)


class FakeScaler(Scaler):
    """Pools with so many nodes each, all of which serve. Nodes are called after their pool: decode-0, decode-1."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._pools = {name: {f"{name}-{number}": "serves" for number in range(n)} for name, n in sizes.items()}
        self._num_named = Counter(sizes)
        self.fails: ScalerFailed | None = None
        """The error of every call, while it is set."""
        self.refuses: ScalerFailed | None = None
        """The error of every change, while it is set."""
        self.fails_late: ScalerFailed | None = None
        """The error of every change, after it has had its effect."""
        self.hangs = False
        self.num_hanging = 0
        """Calls that hang and were not given up."""
        self.only: dict[str, str] = {}
        """The only node of a pool that can be removed."""
        self.changes: list[str] = []
        """The changes that were asked for, whatever became of them."""

    @property
    def pools(self) -> list[str]:
        return list(self._pools)

    def nodes(self, pool: str) -> list[str]:
        """The names of the pool's nodes that were not told to stop."""
        return [name for name, state in self._pools[pool].items() if state != "ends"]

    def settle(self) -> None:
        """What starts, serves; what ends, is gone."""
        for pool, nodes in self._pools.items():
            self._pools[pool] = {name: "serves" for name, state in nodes.items() if state != "ends"}

    async def observe(self) -> Mapping[str, PoolSize]:
        await self._may_fail()
        return {
            pool: PoolSize(len(self.nodes(pool)), list(nodes.values()).count("serves"), self.only.get(pool, ""))
            for pool, nodes in self._pools.items()
        }

    async def scale(self, pool: str, nodes: int) -> None:
        self.changes.append(f"{pool} {nodes}")
        await self._may_fail(self.refuses)
        check_pool(pool, self._pools)
        for _ in range(nodes_to_add(pool, nodes, len(self.nodes(pool)))):
            self._pools[pool][f"{pool}-{self._num_named[pool]}"] = "starts"
            self._num_named[pool] += 1
        self._may_fail_late()

    async def remove(self, name: str) -> None:
        self.changes.append(f"-{name}")
        await self._may_fail(self.refuses)
        for nodes in self._pools.values():
            if name in nodes:
                nodes[name] = "ends"
                return self._may_fail_late()
        raise unknown_node(name, self._pools)

    def _may_fail_late(self) -> None:
        if self.fails_late is not None:
            raise self.fails_late

    async def _may_fail(self, refusal: ScalerFailed | None = None) -> None:
        if self.hangs:
            self.num_hanging += 1
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.num_hanging -= 1
        if self.fails is not None:
            raise self.fails
        if refusal is not None:
            raise refusal
