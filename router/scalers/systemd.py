"""Nodes that are units of this machine's systemd: `baton-node@POOL-0.service`, `baton-node@POOL-1.service` and so on.

How many instances of a pool there may be is said beforehand, since each needs its environment file. The unit names its
node after the instance and the host (`%i.%l`), as `deploy/systemd/baton-node@.service` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from router.scalers.programs import run_program
from router.scalers.scaler import CALL_S, ScalerFailed, ScalerFault, node_of, pool_of, pools_of
from router.scalers.tasks import Task

_SYSTEMCTL = ("systemctl", "--no-ask-password", "--no-pager")
_STAYS = frozenset({"active", "activating", "reloading", "refreshing"})
_ENDED = frozenset({"inactive", "failed"})
_ENDS = frozenset({"deactivating", "maintenance"})


class SystemdTasks:
    """The units of this machine. `instances`: the most nodes of each pool. `host`: the machine's short name (`%l`)."""

    def __init__(
        self, host: str, instances: Mapping[str, int], environ: Mapping[str, str], limit_s: float = CALL_S
    ) -> None:
        self._instances = instances
        self._environ = environ
        self._limit_s = limit_s
        self._units = {
            _unit(pool, number): (f"{pool}-{number}.{host}", pool)
            for pool, most in instances.items()
            for number in range(most)
        }

    @property
    def pools(self) -> Sequence[str]:
        return list(self._instances)

    async def list(self) -> Sequence[Task]:
        subject = pools_of(self._instances)
        output = await self._run(["show", "--property=Id,ActiveState", *self._units], subject)
        states = {}
        for block in output.strip().split("\n\n"):
            said = dict(line.partition("=")[::2] for line in block.splitlines())
            states[said.get("Id", "")] = said.get("ActiveState", "")
        if states.keys() != self._units.keys() or not set(states.values()) <= _STAYS | _ENDED | _ENDS:
            raise ScalerFailed(ScalerFault.INVALID_ANSWER, subject, "systemctl did not say the state of each unit")
        return [
            Task(name, pool, unit, runs=states[unit] == "active", ends=states[unit] in _ENDS)
            for unit, (name, pool) in self._units.items()
            if states[unit] not in _ENDED
        ]

    async def start(self, pool: str, count: int, existing: Sequence[Task]) -> None:
        taken = {task.key for task in existing}
        free = [unit for unit, (_, its_pool) in self._units.items() if its_pool == pool and unit not in taken]
        if len(free) < count:
            detail = f"it has {self._instances[pool]} instances, of which {len(free)} are free, and {count} are wanted"
            raise ScalerFailed(ScalerFault.REFUSED, pool_of(pool), detail)
        # Without waiting: a model may take an hour to load.
        await self._run(["start", "--no-block", *free[:count]], pool_of(pool))

    async def stop(self, task: Task) -> None:
        await self._run(["stop", "--no-block", task.key], node_of(task.name))

    async def _run(self, words: Sequence[str], subject: str) -> str:
        output = await run_program([*_SYSTEMCTL, *words], subject, limit_s=self._limit_s, environ=self._environ)
        return output.decode(errors="replace")


def _unit(pool: str, number: int) -> str:
    return f"baton-node@{pool}-{number}.service"
