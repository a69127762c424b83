"""Schemas are checked outside the loop, known ones at once, and tenants do not wait for each other."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator

import pytest

from baton.errors import InvalidRequest, QueueFull
from baton.messages.sampling import Constraint
from router.admission.bounded_work import MAX_WAITING, NUM_AT_ONCE, BoundedWork

LONG_S = 30.0


class FakeChecker:
    """A checker that records the checked schemas and their threads, and waits at a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.seen: list[str] = []
        self.threads: set[str] = set()
        self.is_closed = False

    def check_known(self, json_schema: str, kind: str = "json_schema") -> bool:
        if json_schema in self.seen and json_schema == "bad":
            raise InvalidRequest("json_schema", "is bad")
        return json_schema in self.seen

    def check(self, json_schema: str, kind: str = "json_schema") -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.put(json_schema)
        if not json_schema.startswith("quick"):
            assert self.gate.wait(LONG_S)
        self.seen.append(json_schema)
        if json_schema == "bad":
            raise InvalidRequest("json_schema", "is bad")

    def close(self) -> None:
        self.is_closed = True
        self.gate.set()


@pytest.fixture
def checker() -> FakeChecker:
    return FakeChecker()


@pytest.fixture
def work(checker: FakeChecker) -> Iterator[BoundedWork]:
    work = BoundedWork(checker)
    yield work
    work.close()
    assert checker.is_closed


async def test_a_schema_is_checked_once_and_in_a_thread(work: BoundedWork, checker: FakeChecker) -> None:
    for _ in range(2):
        await work.check(Constraint("good"), "")
        with pytest.raises(InvalidRequest, match="is bad"):
            await work.check(Constraint("bad"), "")
    assert checker.seen == ["good", "bad"]
    assert threading.current_thread().name not in checker.threads


async def test_the_schemas_of_one_tenant_do_not_delay_another(work: BoundedWork, checker: FakeChecker) -> None:
    checker.gate.clear()
    flood = [asyncio.create_task(work.check(Constraint(f"s{number}"), "a")) for number in range(2 * NUM_AT_ONCE)]
    for _ in range(NUM_AT_ONCE // 2):
        await asyncio.to_thread(checker.begun.get, timeout=LONG_S)
    async with asyncio.timeout(LONG_S):
        await work.check(Constraint("quick"), "b")
    assert checker.seen == ["quick"]
    checker.gate.set()
    await asyncio.gather(*flood)


async def test_known_schemas_pass_waiting_ones_and_too_many_are_refused(
    work: BoundedWork, checker: FakeChecker
) -> None:
    await work.check(Constraint("known"), "")
    assert checker.begun.get_nowait() == "known"
    checker.gate.clear()
    running = [asyncio.create_task(work.check(Constraint(f"r{number}"), "")) for number in range(NUM_AT_ONCE)]
    for _ in running:
        await asyncio.to_thread(checker.begun.get, timeout=LONG_S)
    waiting = [asyncio.create_task(work.check(Constraint(f"w{number}"), "")) for number in range(MAX_WAITING)]
    await asyncio.sleep(0)
    await work.check(Constraint("known"), "")
    with pytest.raises(QueueFull):
        await work.check(Constraint("one more"), "")
    waiting[-1].cancel()
    await asyncio.wait(waiting[-1:])
    last = asyncio.create_task(work.check(Constraint("one more"), ""))
    await asyncio.sleep(0)
    checker.gate.set()
    await asyncio.gather(*running, *waiting[:-1], last)
    # Whose client went away before its turn is not checked.
    assert f"w{MAX_WAITING - 1}" not in checker.seen
