"""Schemas are checked one at a time off the loop, known ones at once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from baton.errors import InvalidRequest, QueueFull
from router.schemas import MAX_WAITING, SchemaCheck


class Checks:
    """Notes what is checked, and where; waits at a gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.seen: list[str] = []
        self.threads: set[str] = set()

    def __call__(self, json_schema: str) -> None:
        self.seen.append(json_schema)
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(30.0)
        if json_schema == "bad":
            raise InvalidRequest("json_schema", "is bad")


async def test_a_good_schema_is_checked_once_and_a_bad_one_each_time() -> None:
    checks = Checks()
    checks.gate.set()
    schemas = SchemaCheck(checks)
    for _ in range(2):
        await schemas.check("good")
        with pytest.raises(InvalidRequest, match="is bad"):
            await schemas.check("bad")
    assert checks.seen == ["good", "bad", "bad"]
    assert threading.current_thread().name not in checks.threads
    assert len(checks.threads) == 1


async def test_known_ones_pass_those_that_wait_and_a_flood_is_turned_away() -> None:
    checks = Checks()
    checks.gate.set()
    schemas = SchemaCheck(checks)
    await schemas.check("known")
    checks.gate.clear()
    flood = [asyncio.create_task(schemas.check(f"s{number}")) for number in range(MAX_WAITING)]
    await asyncio.sleep(0)
    await schemas.check("known")
    with pytest.raises(QueueFull):
        await schemas.check("one more")
    flood[-1].cancel()
    await asyncio.wait(flood[-1:])
    checks.gate.set()
    await asyncio.gather(*flood, return_exceptions=True)
    await schemas.check("one more")
    # Whose client went away before its turn is not checked.
    assert set(checks.seen) == {"known", "one more", *(f"s{number}" for number in range(MAX_WAITING - 1))}


async def test_what_has_not_been_asked_for_of_late_is_forgotten() -> None:
    checks = Checks()
    checks.gate.set()
    schemas = SchemaCheck(checks)
    for number in range(100):
        await schemas.check(f"s{number}")
        await schemas.check("s0")
    await schemas.check("s1")
    assert checks.seen.count("s0") == 1
    assert checks.seen.count("s1") == 2
