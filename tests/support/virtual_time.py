"""An event loop whose clock jumps to the next timer whenever there is nothing left to do.

A minute of heartbeats and deadlines takes milliseconds, and the same seed gives the same order of everything.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import wraps
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

P = ParamSpec("P")
T = TypeVar("T")
Args = TypeVarTuple("Args")


class VirtualTimeDeadlock(AssertionError):
    """A task waits, and no timer or other task could ever wake it."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise VirtualTimeDeadlock("every task waits for another one")
            self.now += timeout
        return events


class _InlineExecutor(ThreadPoolExecutor):
    """An executor that runs a function while it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which begins at second 1000."""

    def __init__(self) -> None:
        self._selector = _JumpingSelector()
        self._selector.now = 1000.0
        super().__init__(self._selector)
        self.set_default_executor(_InlineExecutor(1))

    def time(self) -> float:
        return self._selector.now

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Args], T], *args: *Args) -> asyncio.Future[T]:
        """Run the function at once, for any executor: virtual time could not wait for threads."""
        return super().run_in_executor(None, func, *args)

    def stall_for(self, seconds: float) -> None:
        """Let time pass while no task runs, as if the thread had no core or were blocked."""
        self._selector.now += seconds

    async def shutdown_default_executor(self, *_bound: object) -> None:
        """Wait for nothing: the executor has no thread. The inherited method would start one."""


class LoopClock:
    """A clock with the time of the running loop."""

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


def virtually(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine, run in virtual time."""

    @wraps(test)
    def run(*arguments: P.args, **fixtures: P.kwargs) -> None:
        run_virtually(test(*arguments, **fixtures))

    return run
