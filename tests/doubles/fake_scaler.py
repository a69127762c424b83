"""The fake of `router.scalers.scaler.Scaler`: pools in memory, whose nodes start and end when the test says so."""

from __future__ import annotations

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

    def nodes(self, pool: str) -> list[str]:
        """The names of the pool's nodes that were not told to stop."""
        return [name for name, state in self._pools[pool].items() if state != "ends"]

    def settle(self) -> None:
        """What starts, serves; what ends, is gone."""
        for pool, nodes in self._pools.items():
            self._pools[pool] = {name: "serves" for name, state in nodes.items() if state != "ends"}

    async def observe(self) -> Mapping[str, PoolSize]:
        self._may_fail()
        return {
            pool: PoolSize(len(self.nodes(pool)), list(nodes.values()).count("serves"))
            for pool, nodes in self._pools.items()
        }

    async def scale(self, pool: str, nodes: int) -> None:
        self._may_fail()
        check_pool(pool, self._pools)
        for _ in range(nodes_to_add(pool, nodes, len(self.nodes(pool)))):
            self._pools[pool][f"{pool}-{self._num_named[pool]}"] = "starts"
            self._num_named[pool] += 1

    async def remove(self, name: str) -> None:
        self._may_fail()
        for nodes in self._pools.values():
            if name in nodes:
                nodes[name] = "ends"
                return
        raise unknown_node(name, self._pools)

    def _may_fail(self) -> None:
        if self.fails is not None:
            raise self.fails
