"""A thread pool for work that would block an event loop: with a bounded queue, and fair between tenants."""

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
    """Runs jobs on a few threads; the tenants with waiting jobs take turns (round-robin).

    A tenant may use at most half of the threads and a quarter of the queue, so that both are left for other tenants.
    The empty tenant stands for all clients of a cluster without tenants, so it may use everything. Methods may be
    called from any thread.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        """`name`: the prefix of the threads' names and of refusals."""
        self._name = name
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        """Waiting jobs by tenant, in the order of the tenants' turns. Tenants without a waiting job have no entry."""
        self._running: Counter[str] = Counter()
        """Number of running jobs by tenant."""
        self._threads: list[threading.Thread] = []
        """The threads. All are started with the first job, so that their number does not depend on the load."""
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Number of jobs that no thread has begun, cancelled ones included."""
        return sum(map(len, self._waiting.values()))

    def max_running(self, tenant: str) -> int:
        """How many jobs of this tenant may run at once."""
        return max(1, self._num_threads // 2) if tenant else self._num_threads

    def max_waiting(self, tenant: str) -> int:
        """How many jobs of this tenant may wait."""
        return max(1, self._max_waiting // 4) if tenant else self._max_waiting

    def of(self, tenant: str) -> Executor:
        """This executor for one tenant's jobs, as a standard `Executor` (for `loop.run_in_executor`)."""
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
        """Cancel the waiting jobs, and wait for the running ones. Idempotent."""
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
            self._remove_cancelled()
            if reason := self._refusal(tenant):
                raise QueueFull(f"{self._name}: {reason}")

    def _refusal(self, tenant: str) -> str:
        """Why no further job of this tenant may wait; empty if one may."""
        if (num_own := self._num_waiting_of(tenant)) >= (most := self.max_waiting(tenant)):
            return f"{num_own} jobs of this tenant wait, and at most {most} may"
        if (num_waiting := self.num_waiting) >= self._max_waiting:
            return f"{num_waiting} jobs wait, and at most {self._max_waiting} may"
        return ""

    def _num_waiting_of(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    def _remove_cancelled(self) -> None:
        for tenant, jobs in list(self._waiting.items()):
            self._waiting[tenant] = left = deque(job for job in jobs if not job.future.cancelled())
            if not left:
                del self._waiting[tenant]

    def _work(self) -> None:
        while (work := self._take()) is not None:
            tenant, job = work
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
                # The job's objects must not stay referenced until the next job comes.
                del work, job
                self._job_ended(tenant)

    def _take(self) -> tuple[str, _Job] | None:
        """Wait for the next job and its tenant; None when the executor is closed."""
        with self._changed:
            while (job := self._next()) is None:
                if self._is_closed:
                    return None
                self._changed.wait()
            return job

    def _next(self) -> tuple[str, _Job] | None:
        """Remove the job that may run now from the queue; None if there is none."""
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

    def _job_ended(self, tenant: str) -> None:
        with self._changed:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            # The tenant may have another job that was held back by the tenant's limit.
            self._changed.notify()


class _OfTenant(Executor):
    """A FairExecutor as the standard `Executor` of one tenant."""

    def __init__(self, executor: FairExecutor, tenant: str) -> None:
        self._executor = executor
        self._tenant = tenant

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return self._executor.submit(self._tenant, fn, *args, **kwargs)
