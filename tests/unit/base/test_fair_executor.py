"""A few threads that tenants use in turn; without room a job is refused and does not wait."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator

import pytest

from baton.errors import Draining, QueueFull
from baton.fair_executor import FairExecutor

LONG_S = 30.0


class Jobs:
    """Records which jobs have begun; each ends when the test lets it."""

    def __init__(self, num_threads: int, max_waiting: int) -> None:
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.ends: dict[str, threading.Event] = {}
        self.executor = FairExecutor("jobs", num_threads, max_waiting)

    def ask(self, tenant: str, *names: str) -> None:
        for name in names:
            self.ends[name] = threading.Event()
            self.executor.submit(tenant, self._run, name)

    def _run(self, name: str) -> None:
        self.begun.put(name)
        assert self.ends[name].wait(LONG_S)

    def next(self) -> str:
        return self.begun.get(timeout=LONG_S)

    def end(self, name: str) -> str:
        """Let a job end; return the name of the job that begins then."""
        self.ends[name].set()
        return self.next()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    jobs = Jobs(num_threads=4, max_waiting=16)
    yield jobs
    for event in jobs.ends.values():
        event.set()
    jobs.executor.close()


def test_the_jobs_of_one_tenant_leave_threads_to_others(jobs: Jobs) -> None:
    jobs.ask("a", "a1", "a2", "a3", "a4")
    assert {jobs.next(), jobs.next()} == {"a1", "a2"}
    jobs.ask("b", "b1")
    assert jobs.next() == "b1"
    assert jobs.executor.num_waiting == 2
    assert jobs.end("a1") == "a3"


def test_tenants_take_turns(jobs: Jobs) -> None:
    jobs.ask("a", "a1", "a2", "a3")
    jobs.ask("b", "b1", "b2", "b3")
    assert {jobs.next() for _ in range(4)} == {"a1", "a2", "b1", "b2"}
    jobs.ask("a", "a4")
    jobs.ask("c", "c1")
    # The first free thread is for whoever comes next in turn and may begin.
    assert jobs.end("b1") == "b3"
    assert jobs.end("b2") == "c1"
    assert jobs.end("a1") == "a3"
    assert jobs.end("a2") == "a4"


def test_all_threads_are_there_from_the_first_job_on(jobs: Jobs) -> None:
    def count() -> int:
        return sum(thread.name.startswith("jobs-") for thread in threading.enumerate())

    assert count() == 0
    jobs.ask("a", "a1")
    assert count() == 4
    jobs.ask("", "1", "2", "3", "4", "5")
    assert count() == 4


def test_jobs_without_a_tenant_may_use_all_threads(jobs: Jobs) -> None:
    jobs.ask("", "1", "2", "3", "4")
    assert {jobs.next() for _ in range(4)} == {"1", "2", "3", "4"}
    jobs.ask("", *(f"w{number}" for number in range(16)))
    with pytest.raises(QueueFull, match="16 jobs of this tenant wait, and at most 16 may"):
        jobs.ask("", "no")


def test_a_flood_by_one_tenant_leaves_room_for_others(jobs: Jobs) -> None:
    jobs.ask("a", "a1", "a2")
    assert {jobs.next(), jobs.next()} == {"a1", "a2"}
    jobs.ask("a", "a3", "a4", "a5", "a6")
    with pytest.raises(QueueFull, match="at most 4 may"):
        jobs.ask("a", "a7")
    jobs.ask("b", "b1")
    assert jobs.next() == "b1"


def test_a_cancelled_job_frees_its_place() -> None:
    jobs = Jobs(num_threads=1, max_waiting=4)
    jobs.ask("", "1")
    jobs.next()
    gone = [jobs.executor.submit("", jobs.begun.put, "gone") for _ in range(4)]
    with pytest.raises(QueueFull):
        jobs.ask("", "no")
    assert all(future.cancel() for future in gone)
    jobs.ask("", "2")
    assert jobs.end("1") == "2"
    jobs.ends["2"].set()
    jobs.executor.close()
    assert jobs.begun.empty()


def test_an_error_in_a_job_is_its_result_and_the_thread_continues() -> None:
    def end() -> None:
        raise SystemExit(3)

    executor = FairExecutor("jobs", 1, 4)
    with pytest.raises(SystemExit):
        executor.submit("a", end).result(LONG_S)
    assert executor.submit("a", threading.active_count).result(LONG_S) == threading.active_count()
    executor.close()


async def test_an_event_loop_can_await_results_and_errors() -> None:
    executor, loop = FairExecutor("jobs", 1, 4), asyncio.get_running_loop()
    assert await loop.run_in_executor(executor.of("a"), len, "abc") == 3
    with pytest.raises(TypeError):
        await loop.run_in_executor(executor.of("a"), len, 3)  # type: ignore[arg-type]
    executor.close()


def test_closing_cancels_waiting_jobs_and_awaits_running_ones() -> None:
    jobs = Jobs(num_threads=1, max_waiting=4)
    jobs.ask("", "1")
    jobs.next()
    waiting = jobs.executor.submit("", jobs.begun.put, "never")
    closing = threading.Thread(target=jobs.executor.close)
    closing.start()
    with pytest.raises(BaseException):  # noqa: B017, PT011  CancelledError is none of Exception's
        waiting.result(LONG_S)
    assert closing.is_alive()
    jobs.ends["1"].set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    assert jobs.begun.empty()
    with pytest.raises(Draining):
        jobs.executor.submit("", print)
