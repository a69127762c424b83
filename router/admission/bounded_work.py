"""Untrusted work of requests: checked and done before anything is allocated, without delaying the event loop or others.

That is compiling what an output must be, and rendering a chat template that came with a request. The work itself is
done in child processes (`baton.text.bounded_workers`); a thread waits for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from baton.fair_executor import FairExecutor
from baton.messages.sampling import Constraint, ConstraintKind
from baton.text.constraint_checker import ConstraintChecker

T = TypeVar("T")
NUM_AT_ONCE = 4
"""Pieces of work that are done at once, each in a process of its own."""
MAX_WAITING = 256
"""Pieces of work that may wait."""


class Checker(Protocol):
    """Checks one constraint in another process; `baton.text.constraint_checker.ConstraintChecker` is the real one."""

    def check_known(self, text: str, kind: ConstraintKind) -> bool: ...

    def check(self, text: str, kind: ConstraintKind) -> None: ...

    def close(self) -> None: ...


class BoundedWork:
    """Does a few pieces of work at a time; tenants take turns. The result for a known constraint is there at once."""

    def __init__(self, checker: Checker | None = None) -> None:
        """`checker` is closed with this object."""
        self._checker: Checker = checker or ConstraintChecker()
        self._threads = FairExecutor("router-bounded-work", NUM_AT_ONCE, MAX_WAITING)

    async def check(self, constraint: Constraint, tenant: str) -> None:
        """Check a constraint; raises InvalidRequest, or QueueFull if too many wait for their turn."""
        if not self._checker.check_known(*constraint):
            await self.run(tenant, self._checker.check, *constraint)

    async def run(self, tenant: str, work: Callable[..., T], *args: object) -> T:
        """Do work that waits for a child process; raises what it raises, or QueueFull if too much waits."""
        return await asyncio.get_running_loop().run_in_executor(self._threads.of(tenant), work, *args)

    def close(self) -> None:
        """End the processes, and wait for the threads, which end then. Idempotent."""
        self._checker.close()
        self._threads.close()
