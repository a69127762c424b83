"""Untrusted work of requests: checked and done before anything is allocated, without delaying the event loop or others.

That is compiling what an output must be, and rendering a chat template that came with a request or with the model. The
work itself is done in child processes (`baton.text.bounded_workers`); a thread waits for each. Chats have threads of
their own, so that they do not wait for constraints, and short chats have others than long ones.
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
NUM_CHATS_AT_ONCE = 4
"""Short chats that are rendered at once."""
MAX_SHORT_CHATS = 4096
"""Short chats that may wait. Each takes less than a millisecond, and some 10 KB while it waits."""
NUM_LONG_CHATS_AT_ONCE = 2
"""Long chats that are rendered and tokenized at once. More would keep the event loop from Python's global lock."""
MAX_LONG_CHATS = 64
"""Long chats that may wait."""


class Checker(Protocol):
    """Checks one constraint in another process; `baton.text.constraint_checker.ConstraintChecker` is the real one."""

    def check_known(self, text: str, kind: ConstraintKind) -> bool: ...

    def check(self, text: str, kind: ConstraintKind) -> None: ...

    def close(self) -> None: ...


class Closable(Protocol):
    """What is closed with the work that uses it."""

    def close(self) -> None: ...


class BoundedWork:
    """Does a few pieces of work at a time; tenants take turns. The result for a known constraint is there at once."""

    def __init__(self, checker: Checker | None = None, template: Closable | None = None) -> None:
        """`checker` and `template`, the model's chat template, are closed with this object."""
        self._checker: Checker = checker or ConstraintChecker()
        self._template = template
        self._short_chats = FairExecutor("router-chats", NUM_CHATS_AT_ONCE, MAX_SHORT_CHATS)
        self._long_chats = FairExecutor("router-long-chats", NUM_LONG_CHATS_AT_ONCE, MAX_LONG_CHATS)
        self._threads = FairExecutor("router-bounded-work", NUM_AT_ONCE, MAX_WAITING)

    async def check(self, constraint: Constraint, tenant: str) -> None:
        """Check a constraint; raises InvalidRequest, or QueueFull if too many wait for their turn."""
        if not self._checker.check_known(*constraint):
            await self.run(tenant, self._checker.check, *constraint)

    async def run(self, tenant: str, work: Callable[..., T], *args: object) -> T:
        """Do work that waits for a child process; raises what it raises, or QueueFull if too much waits."""
        return await asyncio.get_running_loop().run_in_executor(self._threads.of(tenant), work, *args)

    async def render(self, tenant: str, work: Callable[..., T], *args: object, is_long: bool) -> T:
        """Do work that renders a chat with the model's template; raises what it raises, or QueueFull."""
        threads = self._long_chats if is_long else self._short_chats
        return await asyncio.get_running_loop().run_in_executor(threads.of(tenant), work, *args)

    def close(self) -> None:
        """End the processes, and wait for the threads, which end then. Idempotent."""
        self._checker.close()
        if self._template is not None:
            self._template.close()
        for threads in (self._threads, self._short_chats, self._long_chats):
            threads.close()
