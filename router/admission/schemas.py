"""Checks JSON schemas before anything is allocated, without delaying the event loop or other tenants."""

from __future__ import annotations

import asyncio
from typing import Protocol

from baton.fair_executor import FairExecutor
from baton.messages.sampling import Constraint, ConstraintKind
from baton.text.schema_sandbox import SchemaSandbox

NUM_COMPILING = 4
"""Schemas that are compiled at once, each in a process of its own."""
MAX_WAITING = 256
"""Schemas that may wait to be compiled."""


class Sandbox(Protocol):
    """Checks one schema in another process; `baton.text.schema_sandbox.SchemaSandbox` is the real one."""

    def check_known(self, text: str, kind: ConstraintKind) -> bool: ...

    def check(self, text: str, kind: ConstraintKind) -> None: ...

    def close(self) -> None: ...


class SchemaCheck:
    """Checks a few schemas at a time, each in a process of its own; the result of a known schema is there at once."""

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self._sandbox: Sandbox = sandbox or SchemaSandbox()
        self._threads = FairExecutor("router-schemas", NUM_COMPILING, MAX_WAITING)

    async def check(self, constraint: Constraint, tenant: str) -> None:
        """Check a constraint; raises InvalidRequest, or Overloaded if too many wait for their turn."""
        if self._sandbox.check_known(*constraint):
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads.of(tenant), self._sandbox.check, *constraint)

    def close(self) -> None:
        """End the processes, and wait for the threads, which end then. Idempotent."""
        self._sandbox.close()
        self._threads.close()
