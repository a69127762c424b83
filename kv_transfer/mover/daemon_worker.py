"""An executor for work that may hang: calls into a device or a transfer agent that do not return."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonWorker(Executor):
    """An executor with one thread, for which the end of the process does not wait, unlike for a ThreadPoolExecutor's.

    Unlike there, an exception that is no Exception is kept in the future, too.
    """

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._is_started = self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a function called after all that were submitted before. Raises RuntimeError after `shutdown`."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._is_shut:
                raise RuntimeError("the worker is shut down")
            if not self._is_started:
                self._is_started = True
                self._thread.start()
            self._work.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work. `wait`: until what was submitted is done. Futures can't be cancelled here."""
        if cancel_futures:
            raise ValueError("each future is to be cancelled by whoever has it")
        with self._lock:
            self._is_shut = True
            self._work.put(None)
        if wait:
            self.join()

    def join(self, within_s: float | None = None) -> bool:
        """Wait, after `shutdown`, until what was submitted is done; False: it is not, after so many seconds."""
        if self._is_started:
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._work.get()) is not None:
            call()
