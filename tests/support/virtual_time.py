"""An event loop whose time passes only when there is nothing left to do, and then at once.

A minute of heartbeats and deadlines takes milliseconds, and the same seed gives the same order of everything.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")


class NothingWillHappen(AssertionError):
    """Somebody waits, and there is neither a timer nor anything else that could ever wake it."""


class _Jump(selectors.DefaultSelector):
    """Never waits: it moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise NothingWillHappen("every task waits for another one")
            self.now += timeout
        return events


class _Inline(ThreadPoolExecutor):
    """Runs what is meant for a thread while it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Begins at second 1000."""

    def __init__(self) -> None:
        self._jump = _Jump()
        self._jump.now = 1000.0
        super().__init__(self._jump)
        self.set_default_executor(_Inline(1))

    def time(self) -> float:
        return self._jump.now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        """At once, whosever threads it was meant for: no clock would await them."""
        return super().run_in_executor(None, func, *args)

    def hold_up(self, seconds: float) -> None:
        """Time passes and nobody gets to do anything: this thread had no core, or somebody blocked it."""
        self._jump.now += seconds

    async def shutdown_default_executor(self, *_bound: object) -> None:
        """Nothing to wait for: it has no thread. The loop's own way takes one, whose end no clock would await."""


class LoopClock:
    """The running loop's time as everybody's clock."""

    def __init__(self) -> None:
        self._time = asyncio.get_running_loop().time

    def monotonic(self) -> float:
        return self._time()

    def wall(self) -> float:
        return self._time()


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
