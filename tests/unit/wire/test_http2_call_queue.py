"""When calls begin and end: a few per turn of the loop, connections in turn, keyless calls after the others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from baton.wire.http2.call import Call
from baton.wire.http2.server import BEGIN_AT_ONCE, BEGIN_BYTES, END_AT_ONCE, CallQueue


class Waiting:
    """A call as the queue sees it."""

    def __init__(self, name: str, num_unread: int = 100) -> None:
        self.name = name
        self.num_unread = num_unread
        self.is_over = False

    def cancel(self) -> None:
        self.is_over = True


def queued(log: list[str]) -> CallQueue:
    def begin(call: Any) -> None:
        log.append(call.name)

    return CallQueue(begin)


def call(name: str) -> Call:
    return cast("Call", Waiting(name))


async def test_a_few_calls_begin_per_turn_one_of_each_connection() -> None:
    log: list[str] = []
    queue = queued(log)
    for number in range(6):
        queue.add("crowd", call(f"crowd {number}"), is_keyless=False)
    queue.add("other", call("other"), is_keyless=False)
    await asyncio.sleep(0)
    assert log == ["crowd 0", "other", "crowd 1", "crowd 2"]
    assert len(log) == BEGIN_AT_ONCE
    await asyncio.sleep(0)
    assert log[4:] == ["crowd 3", "crowd 4", "crowd 5"]
    assert not queue


async def test_one_large_request_begins_per_turn() -> None:
    log: list[str] = []
    queue = queued(log)
    for number in range(3):
        queue.add(number, cast("Call", Waiting(f"large {number}", BEGIN_BYTES)), is_keyless=False)
    for turn in range(3):
        await asyncio.sleep(0)
        assert log == [f"large {number}" for number in range(turn + 1)]


async def test_keyless_calls_wait_for_the_others_except_one_per_turn() -> None:
    log: list[str] = []
    queue = queued(log)
    for number in range(100):
        queue.add(number, call("check"), is_keyless=True)
    for number in range(100, 109):
        queue.add(number, call("generate"), is_keyless=False)
    for _ in range(3):
        await asyncio.sleep(0)
    assert log == ["check", "generate", "generate", "generate"] * 3
    log.clear()
    await asyncio.sleep(0)
    assert log == ["check"] * 4


async def test_calls_of_a_lost_connection_end_a_few_per_turn_and_never_begin() -> None:
    log: list[str] = []
    queue = queued(log)
    calls = [Waiting(str(number)) for number in range(3 * END_AT_ONCE)]
    for one in calls:
        queue.add("lost", cast("Call", one), is_keyless=False)
    queue.end_calls("lost", cast("list[Call]", calls))
    turns = 0
    while queue:
        await asyncio.sleep(0)
        turns += 1
    assert (turns, log) == (3, [])
    assert all(one.is_over for one in calls)
