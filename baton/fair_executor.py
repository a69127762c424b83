"""Threads for what would hold an event loop: bounded in number, in what may wait for them, and fair between tenants."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.errors import Draining, QueueFull

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    future: Future[Any]
    run: Callable[[], Any]


class FairExecutor:
    """Runs jobs on a few threads; the tenants that wait take turns.

    A tenant has at most half of the threads and a quarter of the places to wait, so that another one's job finds both.
    The empty tenant is everybody where nobody has a name, so nothing is held back from it. Methods may be called from
    any thread.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        """`name`: what its threads are called, and what a refusal says is waited for."""
        self._name = name
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        """By tenant; the first one's turn is next. No tenant is in here without a job."""
        self._running: Counter[str] = Counter()
        self._threads: list[threading.Thread] = []
        """All of them from the first job on: how many there are does not depend on how jobs happened to meet."""
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Jobs that no thread has begun, those that were cancelled meanwhile included."""
        return sum(map(len, self._waiting.values()))

    def max_running(self, tenant: str) -> int:
        """Jobs of this tenant that may run at once."""
        return max(1, self._num_threads // 2) if tenant else self._num_threads

    def max_waiting(self, tenant: str) -> int:
        """Jobs of this tenant that may wait."""
        return max(1, self._max_waiting // 4) if tenant else self._max_waiting

    def of(self, tenant: str) -> Executor:
        """The same threads as an executor of this tenant's jobs, such as `loop.run_in_executor` takes."""
        return _OfTenant(self, tenant)

    def submit(self, tenant: str, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `work` in a thread; a future that is cancelled before its turn is skipped.

        Raises QueueFull when too many jobs wait, of this tenant or of all, and Draining once it is closed.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                raise Draining(f"{self._name}: this process is shutting down")
            self._check_room(tenant)
            self._waiting.setdefault(tenant, deque()).append(_Job(future, lambda: work(*args, **kwargs)))
            while len(self._threads) < self._num_threads:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            self._changed.notify()
        return future

    def close(self) -> None:
        """Cancel what waits, and wait for what runs. Idempotent."""
        with self._changed:
            self._is_closed = True
            for jobs in self._waiting.values():
                for job in jobs:
                    job.future.cancel()
            self._waiting.clear()
            self._changed.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()

    def _check_room(self, tenant: str) -> None:
        if self._refusal(tenant):
            self._forget_cancelled()
            if why := self._refusal(tenant):
                raise QueueFull(f"{self._name}: {why}")

    def _refusal(self, tenant: str) -> str:
        """Why no further job of this tenant may wait."""
        if (own := self._own(tenant)) >= (most := self.max_waiting(tenant)):
            return f"{own} jobs of this tenant wait, and at most {most} may"
        if (num_waiting := self.num_waiting) >= self._max_waiting:
            return f"{num_waiting} jobs wait, and at most {self._max_waiting} may"
        return ""

    def _own(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    def _forget_cancelled(self) -> None:
        for tenant, jobs in list(self._waiting.items()):
            self._waiting[tenant] = left = deque(job for job in jobs if not job.future.cancelled())
            if not left:
                del self._waiting[tenant]

    def _work(self) -> None:
        while (found := self._take()) is not None:
            tenant, job = found
            try:
                if job.future.set_running_or_notify_cancel():
                    try:
                        result = job.run()
                    except BaseException as error:
                        job.future.set_exception(error)
                    else:
                        job.future.set_result(result)
                        del result
            finally:
                # Nobody keeps what a job held until the next one comes.
                del found, job
                self._ended(tenant)

    def _take(self) -> tuple[str, _Job] | None:
        """The next job, once there is one; None when there will be none any more."""
        with self._changed:
            while (found := self._next()) is None:
                if self._is_closed:
                    return None
                self._changed.wait()
            return found

    def _next(self) -> tuple[str, _Job] | None:
        for tenant, jobs in self._waiting.items():
            if self._running[tenant] >= self.max_running(tenant):
                continue
            job = jobs.popleft()
            self._waiting.move_to_end(tenant)
            if not jobs:
                del self._waiting[tenant]
            self._running[tenant] += 1
            return tenant, job
        return None

    def _ended(self, tenant: str) -> None:
        with self._changed:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            # Its tenant may have another job that nobody was allowed to begin.
            self._changed.notify()


class _OfTenant(Executor):
    """One tenant's way into a FairExecutor."""

    def __init__(self, executor: FairExecutor, tenant: str) -> None:
        self._executor = executor
        self._tenant = tenant

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return self._executor.submit(self._tenant, fn, *args, **kwargs)
