"""The scaler of supervisors that know tasks alone, of which each is a node: Slurm's jobs, systemd's units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.scalers.scaler import PoolSize, Scaler, check_pool, nodes_to_add, unknown_node


@dataclass(frozen=True, slots=True)
class Task:
    """A task that has not ended."""

    name: str
    """The name of its node."""
    pool: str
    key: str
    """What the supervisor calls it."""
    runs: bool
    """False: it waits for a machine, or starts."""
    ends: bool = False
    """It was told to stop, and may still drain."""


class Tasks(Protocol):
    """The tasks of a supervisor. All calls raise ScalerFailed."""

    @property
    def pools(self) -> Sequence[str]:
        """The names of the pools."""
        ...

    async def list(self) -> Sequence[Task]:
        """All tasks of all pools."""
        ...

    async def start(self, pool: str, count: int, existing: Sequence[Task]) -> None:
        """Start this many more tasks of the pool. `existing`: what `list` has just returned."""
        ...

    async def stop(self, task: Task) -> None:
        """Tell the task to drain and end."""
        ...


class TaskScaler(Scaler):
    """Counts the tasks of each pool, and starts and stops single ones."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    async def observe(self) -> Mapping[str, PoolSize]:
        return self._sizes(await self._tasks.list())

    async def scale(self, pool: str, nodes: int) -> None:
        check_pool(pool, self._tasks.pools)
        existing = await self._tasks.list()
        if missing := nodes_to_add(pool, nodes, self._sizes(existing)[pool].want):
            await self._tasks.start(pool, missing, existing)

    async def remove(self, name: str) -> None:
        found = [task for task in await self._tasks.list() if task.name == name]
        if not found:
            raise unknown_node(name, self._tasks.pools)
        for task in found:
            if not task.ends:
                await self._tasks.stop(task)

    def _sizes(self, tasks: Sequence[Task]) -> dict[str, PoolSize]:
        staying = [task for task in tasks if not task.ends]
        return {
            pool: PoolSize(
                sum(task.pool == pool for task in staying), sum(task.pool == pool and task.runs for task in staying)
            )
            for pool in self._tasks.pools
        }
