"""Background work of a process: tasks and callbacks whose results are never awaited, and what their failures cause.

asyncio keeps the exception of a failed task until the task is garbage-collected, and only logs that of a callback;
either way the process continues without the task. Here each task says what its fault causes (`OnFault`), and faults are
logged and counted. A fault is an exception, or the return of a task that must run for ever.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

from baton.errors import BackgroundFault

FIRST_RESTART_S = 0.05
LAST_RESTART_S = 5.0
STEADY_AFTER_S = 60.0
"""A task that ran for at least this many seconds before it failed is restarted with the shortest delay again."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, object]]


class OnFault(enum.Enum):
    """What happens when a background task fails."""

    END_PROCESS = "the process ends"
    """The process ends, since it can't serve without the task. Its peers notice at once, and its supervisor starts
    another process."""
    RESTART = "it is started again"
    """The task is restarted with exponential back-off, for ever: it has no state that a fault could leave inconsistent.
    """
    GO_ON = "the process goes on"
    """The task was one piece of work for one peer; only that work is lost."""


class BackgroundWatch:
    """Starts the background tasks of one process, or of one incarnation of a node, and handles their faults."""

    def __init__(self, end_process: Callable[[BackgroundFault], None] | None = None) -> None:
        """`end_process` is called for each fault that the process must not survive, on the thread where it occurred.

        None: the process offers no service (it is a command, for example), so it continues and only logs the fault.
        """
        self._end_process = end_process
        self.faults: Counter[str] = Counter()
        """The number of faults, by kind of task."""

    def start(
        self, work: Work, kind: str, of: str = "", *, on_fault: OnFault, may_end: bool = False
    ) -> asyncio.Task[None]:
        """Run `work()` as a task named `kind`, or `kind-of`. The task itself never raises and need not be awaited.

        Unless `may_end` is set, it is a fault when the work returns.
        """
        name = f"{kind}-{of}" if of else kind
        return asyncio.create_task(self._run(work, kind, on_fault, may_end), name=name)

    def guarded(self, callback: Callable[[], object], kind: str) -> Callable[[], None]:
        """Wrap a callback so that an exception ends the process, where a loop or a thread would only log it."""

        def run() -> None:
            try:
                callback()
            except Exception as error:
                self.failed(kind, error)

        return run

    def failed(self, kind: str, error: BaseException) -> None:
        """End the process because of a fault in work that it needs. May be called from any thread."""
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
        """Count a fault and log it, unless it was logged often before. `what_follows`: a phrase for the log line."""
        count = self.faults[kind] = self.faults[kind] + 1
        if count & (count - 1) == 0:
            # Logs the first, second, fourth, eighth fault and so on: a permanent fault must not fill the disk.
            _log.error("background task %s failed (%d so far); %s", kind, count, what_follows, exc_info=error)


current_watch: ContextVar[BackgroundWatch] = ContextVar("current_watch", default=BackgroundWatch())  # noqa: B039
"""The watch of the running process or incarnation. A task inherits it from the task that starts it. Threads and calls
from grpcio do not, so an object that needs the watch in a callback reads this variable in its constructor."""


def start_background(
    work: Work, kind: str, of: str = "", *, on_fault: OnFault, may_end: bool = False
) -> asyncio.Task[None]:
    """Start a task under the current watch; see `BackgroundWatch.start`."""
    return current_watch.get().start(work, kind, of, on_fault=on_fault, may_end=may_end)


async def gather_all(parts: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first error cancels the other tasks."""
    if len(parts) == 1:
        return [await parts[0]]
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
