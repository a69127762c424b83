"""Nodes that are tasks of Slurm's job arrays.

Each growth of a pool is one array with a task for each node, of the pool's batch script; an array can't grow later.
The script names its node after the pool, the array and the task, as `deploy/slurm/node.sbatch` does. Commands and
formats are those of sbatch(1), squeue(1) and scancel(1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from router.scalers.programs import run_program
from router.scalers.scaler import CALL_S, ScalerFailed, ScalerFault, node_of, pool_of, pools_of
from router.scalers.tasks import Task

_LINE = re.compile(r"(?P<job>[^|]+)\|(?P<array>\d{1,10})\|(?P<task>\d{1,10})\|(?P<state>[A-Z_]+)")
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "STOPPED"})
_RUNNING = frozenset({"RUNNING", "SIGNALING", "RESIZING"})


class SlurmTasks:
    """The tasks of one cluster's pools. `scripts`: the batch script of each pool's nodes."""

    def __init__(
        self, cluster: str, scripts: Mapping[str, Path], environ: Mapping[str, str], limit_s: float = CALL_S
    ) -> None:
        self._cluster = cluster
        self._scripts = scripts
        self._environ = environ
        self._limit_s = limit_s
        # Clusters of one user must not take each other's tasks for their own.
        self._pool_of_job = {f"{cluster}.{pool}": pool for pool in scripts}

    @property
    def pools(self) -> Sequence[str]:
        return list(self._scripts)

    async def list(self) -> Sequence[Task]:
        subject = pools_of(self._scripts)
        words = ["squeue", "--noheader", "--array", "--me", f"--name={','.join(self._pool_of_job)}"]
        output = await self._run([*words, "--format=%j|%F|%K|%T"], subject)
        return [task for line in output.splitlines() if (task := self._task(line.strip(), subject)) is not None]

    async def start(self, pool: str, count: int, existing: Sequence[Task]) -> None:
        told = f"BATON_CLUSTER={self._cluster},BATON_POOL={pool}"
        # What else this process's environment has is not for the job, whose environment Slurm stores.
        words = ["sbatch", "--parsable", f"--array=0-{count - 1}", f"--job-name={self._cluster}.{pool}"]
        output = await self._run([*words, f"--export={told}", str(self._scripts[pool])], pool_of(pool))
        if not re.fullmatch(r"\d+(;[^\n]*)?\n?", output):
            raise ScalerFailed(ScalerFault.INVALID_ANSWER, pool_of(pool), "sbatch named no job")

    async def stop(self, task: Task) -> None:
        await self._run(["scancel", task.key], node_of(task.name))

    async def _run(self, words: Sequence[str], subject: str) -> str:
        output = await run_program(words, subject, limit_s=self._limit_s, environ=self._environ)
        return output.decode(errors="replace")

    def _task(self, line: str, subject: str) -> Task | None:
        found = _LINE.fullmatch(line)
        if found is None or found["job"] not in self._pool_of_job:
            raise ScalerFailed(ScalerFault.INVALID_ANSWER, subject, f"squeue wrote {line[:100]!r}")
        pool, array, task, state = self._pool_of_job[found["job"]], found["array"], found["task"], found["state"]
        # A task that is in no state known here ends, or has ended.
        ends = state not in _WAITING | _RUNNING
        return Task(f"{pool}-{array}-{task}", pool, f"{array}_{task}", runs=state in _RUNNING, ends=ends)
