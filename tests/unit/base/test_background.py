"""What happens when a background task raises: it is restarted or the process ends, never silence."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from baton.background import (
    LAST_RESTART_S,
    STEADY_AFTER_S,
    BackgroundWatch,
    OnFault,
    current_watch,
    start_background,
)
from baton.errors import BackgroundFault
from tests.support.virtual_time import run_virtually


class Work:
    """A task that raises after each start at these times; after the last one it returns."""

    def __init__(self, *runs_for_s: float) -> None:
        self.runs_for_s = list(runs_for_s)
        self.begun_at: list[float] = []

    async def __call__(self) -> None:
        self.begun_at.append(asyncio.get_running_loop().time() - 1000.0)
        if self.runs_for_s:
            await asyncio.sleep(self.runs_for_s.pop(0))
            raise ValueError("of the work")


@pytest.fixture
def process_faults() -> list[BackgroundFault]:
    return []


@pytest.fixture
def watch(process_faults: list[BackgroundFault]) -> BackgroundWatch:
    return BackgroundWatch(process_faults.append)


def test_a_fault_ends_the_process_once_and_names_its_place(
    watch: BackgroundWatch, process_faults: list[BackgroundFault]
) -> None:
    work = Work(1.0)

    async def main() -> None:
        await watch.start(work, "heartbeat", "d0", on_fault=OnFault.END_PROCESS)

    run_virtually(main())
    assert [str(fault) for fault in process_faults] == ["background task heartbeat failed: ValueError('of the work')"]
    assert isinstance(process_faults[0].__cause__, ValueError)
    assert (work.begun_at, watch.faults) == ([0.0], {"heartbeat": 1})


def test_a_failing_task_is_restarted_with_growing_delays(
    watch: BackgroundWatch, process_faults: list[BackgroundFault]
) -> None:
    work = Work(*[0.0] * 9)

    async def main() -> None:
        await watch.start(work, "follower", on_fault=OnFault.RESTART, may_end=True)

    run_virtually(main())
    pauses = [after - before for before, after in zip(work.begun_at, work.begun_at[1:], strict=False)]
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LAST_RESTART_S, LAST_RESTART_S])
    assert (watch.faults["follower"], process_faults) == (9, [])


def test_a_task_that_ran_for_long_is_restarted_soon(watch: BackgroundWatch) -> None:
    work = Work(0.0, 0.0, 0.0, STEADY_AFTER_S + 1, 0.0)

    async def main() -> None:
        await watch.start(work, "follower", on_fault=OnFault.RESTART, may_end=True)

    run_virtually(main())
    after_long = work.begun_at[4] - work.begun_at[3]
    assert after_long == pytest.approx(STEADY_AFTER_S + 1.05)
    assert work.begun_at[5] - work.begun_at[4] == pytest.approx(0.1)


def test_a_fault_in_work_for_one_peer_ends_that_work_alone(
    watch: BackgroundWatch, process_faults: list[BackgroundFault]
) -> None:
    work = Work(0.0)

    async def main() -> None:
        await watch.start(work, "set-role", on_fault=OnFault.GO_ON, may_end=True)

    run_virtually(main())
    assert (work.begun_at, watch.faults, process_faults) == ([0.0], {"set-role": 1}, [])


def test_a_task_that_ends_without_being_stopped_is_a_fault(
    watch: BackgroundWatch, process_faults: list[BackgroundFault]
) -> None:
    async def main() -> None:
        await watch.start(Work(), "heartbeat", on_fault=OnFault.END_PROCESS)
        await watch.start(Work(), "link", on_fault=OnFault.END_PROCESS, may_end=True)

    run_virtually(main())
    assert watch.faults == {"heartbeat": 1}
    assert "it returned" in str(process_faults[0])


def test_a_cancelled_task_is_no_fault(watch: BackgroundWatch, process_faults: list[BackgroundFault]) -> None:
    async def main() -> None:
        tasks = [watch.start(Work(1e9), "any", on_fault=follows) for follows in OnFault]
        await asyncio.sleep(1.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)

    run_virtually(main())
    assert (watch.faults, process_faults) == ({}, [])


def test_a_fault_in_a_callback_from_another_thread_is_reported(
    watch: BackgroundWatch, process_faults: list[BackgroundFault]
) -> None:
    def broken() -> None:
        raise ValueError(threading.current_thread().name)

    thread = threading.Thread(target=watch.guarded(broken, "digests"), name="baton-digests")
    thread.start()
    thread.join()
    assert "baton-digests" in str(process_faults[0])
    assert watch.faults == {"digests": 1}


def test_a_repeated_fault_does_not_fill_the_log(watch: BackgroundWatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(1000):
            watch.failed("any", ValueError("again"))
    assert [record.args[1] for record in caplog.records] == [2**power for power in range(10)]  # type: ignore[index]


async def test_tasks_inherit_the_watch_of_the_task_that_starts_them(
    watch: BackgroundWatch, process_faults: list[BackgroundFault]
) -> None:
    async def inner() -> None:
        await start_background(Work(0.0), "inner", on_fault=OnFault.END_PROCESS)

    before = current_watch.set(watch)
    started = asyncio.create_task(inner())
    current_watch.reset(before)
    await started
    assert [fault.__cause__.args for fault in process_faults if fault.__cause__] == [("of the work",)]
