"""Background work of a process: tasks and callbacks whose result nobody awaits, and what a fault in one of them does.

asyncio keeps the exception of such a task until the task is collected, and logs that of a callback; either way the
process goes on without it. Here each task says what follows its fault (`OnFault`), and faults are logged and counted.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from baton.errors import BackgroundFault

FIRST_RESTART_S = 0.05
LAST_RESTART_S = 5.0
STEADY_AFTER_S = 60.0
"""A task that ran for so long before it failed is restarted with the shortest delay again."""

_log = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, object]]


class OnFault(enum.Enum):
    """What follows when a background task raises."""

    END_PROCESS = "the process ends"
    """The process can't serve without the task: its supervisor starts another process, and its peers notice at once."""
    RESTART = "it is started again"
    """With exponential back-off, for ever: what it does has no state that a fault could have torn."""
    GO_ON = "the process goes on"
    """The task was one piece of work for one peer, which is lost."""


class BackgroundWatch:
    """Starts the background tasks of one process, or of one incarnation of a node, and hears of their faults."""

    def __init__(self, end_process: Callable[[BackgroundFault], None] | None = None) -> None:
        """`end_process` is called on the thread that met a fault, for each one that the process must not survive. None:
        the process has no service to give up, such as a command; it goes on, and the fault is in its log."""
        self._end_process = end_process
        self.faults: Counter[str] = Counter()
        """How many faults there were, by kind of task."""

    def start(
        self, work: Work, kind: str, of: str = "", *, on_fault: OnFault, may_end: bool = False
    ) -> asyncio.Task[None]:
        """Run `work()` as a task named `kind`, or `kind-of`; the task itself never fails, so nobody need await it.

        Without `may_end` it is a fault, too, when the work returns.
        """
        name = f"{kind}-{of}" if of else kind
        return asyncio.create_task(self._run(work, kind, on_fault, may_end), name=name)

    def guarded(self, callback: Callable[[], object], kind: str) -> Callable[[], None]:
        """The callback, for a loop or a thread that would only log what it raises: here that ends the process."""

        def run() -> None:
            try:
                callback()
            except Exception as error:
                self.failed(kind, error)

        return run

    def failed(self, kind: str, error: BaseException) -> None:
        """Something that the process can't go on without has failed. May be called from any thread."""
        self.note(kind, error, OnFault.END_PROCESS.value)
        if self._end_process is not None:
            fault = BackgroundFault(f"background task {kind} failed: {error!r}")
            fault.__cause__ = error
            self._end_process(fault)

    async def _run(self, work: Work, kind: str, on_fault: OnFault, may_end: bool) -> None:
        loop, in_a_row = asyncio.get_running_loop(), 0
        while True:
            began = loop.time()
            try:
                await work()
                if may_end:
                    return
                raise RuntimeError("it returned, and the process still needs it")
            except Exception as error:
                if on_fault is OnFault.END_PROCESS:
                    self.failed(kind, error)
                    return
                if on_fault is OnFault.GO_ON:
                    self.note(kind, error, on_fault.value)
                    return
                in_a_row = 1 if loop.time() - began >= STEADY_AFTER_S else in_a_row + 1
                delay = min(LAST_RESTART_S, FIRST_RESTART_S * 2.0 ** min(in_a_row - 1, 16))
                self.note(kind, error, f"{on_fault.value} in {delay:g} s")
            await asyncio.sleep(delay)

    def note(self, kind: str, error: BaseException, what_follows: str) -> None:
        """Count a fault that whoever met it knows how to survive, and log it unless it came often before."""
        count = self.faults[kind] = self.faults[kind] + 1
        if count & (count - 1) == 0:
            # The first, second, fourth, eighth and so on: a fault that lasts must not fill the disk.
            _log.error("background task %s failed (%d so far); %s", kind, count, what_follows, exc_info=error)


current_watch: ContextVar[BackgroundWatch] = ContextVar("current_watch", default=BackgroundWatch())  # noqa: B039
"""The watch of the process or incarnation that is running. A task inherits it from its starter; threads and calls that
come through grpcio do not, so whoever needs it in a callback asks for it when it is made itself."""


def start_background(
    work: Work, kind: str, of: str = "", *, on_fault: OnFault, may_end: bool = False
) -> asyncio.Task[None]:
    """Start a task under the current watch; see `BackgroundWatch.start`."""
    return current_watch.get().start(work, kind, of, on_fault=on_fault, may_end=may_end)
