"""Few bodies above 1 MiB are read at once; announcing one takes no place from others, and slow ones give way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from baton.errors import QueueFull
from router.http.errors import HttpError
from router.http.json_body import MAX_BODY_BYTES, MAX_LARGE_BODIES, LargeBodies, read_body

MOST = 2 * MAX_BODY_BYTES


def scope(length: int) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    return {"type": "http", "headers": headers, "state": {}}


def sends(*pieces: bytes) -> Callable[[], Awaitable[dict[str, Any]]]:
    """What a client sends, which then waits."""
    left = list(pieces)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    return receive


LARGE = b"x" * (MAX_BODY_BYTES + 1)


class Seconds:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def turn() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def read(bodies: LargeBodies, *pieces: bytes) -> bytes:
    with bodies.place() as place:
        return await read_body(scope(MOST), sends(*pieces), MOST, place)


async def ended(*tasks: asyncio.Task[bytes]) -> None:
    for task in tasks:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_place_is_taken_by_bytes_and_not_by_a_promise() -> None:
    bodies = LargeBodies()
    promises = [asyncio.create_task(read(bodies, b"x")) for _ in range(MAX_LARGE_BODIES)]
    sending = [asyncio.create_task(read(bodies, LARGE)) for _ in range(MAX_LARGE_BODIES)]
    await turn()
    assert bodies.num_open == MAX_LARGE_BODIES
    with pytest.raises(QueueFull):
        await read(bodies, LARGE)
    await ended(*promises, *sending)
    assert bodies.num_open == 0


async def test_the_slowest_body_gives_way_once_it_had_its_time() -> None:
    clock = Seconds()
    bodies = LargeBodies(clock)
    slow = asyncio.create_task(read(bodies, LARGE))
    await turn()
    clock.now = 4.0
    others = [asyncio.create_task(read(bodies, LARGE)) for _ in range(MAX_LARGE_BODIES - 1)]
    await turn()
    clock.now = 4.9
    with pytest.raises(QueueFull):
        await read(bodies, LARGE)
    clock.now = 5.1
    newcomer = asyncio.create_task(read(bodies, LARGE))
    with pytest.raises(HttpError, match="too slowly while others waited: send 256 KiB/s") as refused:
        await slow
    assert refused.value.kind.status == 408
    await turn()
    assert bodies.num_open == MAX_LARGE_BODIES
    with pytest.raises(QueueFull):
        await read(bodies, LARGE)
    await ended(newcomer, *others)
    assert bodies.num_open == 0


async def test_a_body_that_has_arrived_or_comes_fast_stays() -> None:
    clock = Seconds()
    bodies = LargeBodies(clock)
    with ExitStack() as parsed:
        for _ in range(MAX_LARGE_BODIES - 1):
            place = parsed.enter_context(bodies.place())
            with place.arriving(lambda: pytest.fail("it has arrived")):
                place.came(len(LARGE))
        with bodies.place() as fast, fast.arriving(lambda: pytest.fail("it is fast")):
            for second in range(0, 60, 4):
                clock.now = float(second)
                fast.came((second + 5) << 18)
                with pytest.raises(QueueFull):
                    await read(bodies, LARGE)


async def test_a_body_that_came_fast_and_then_stops_gives_way() -> None:
    clock = Seconds()
    bodies = LargeBodies(clock)
    with ExitStack() as arriving:
        given_up: list[int] = []
        for number in range(MAX_LARGE_BODIES):
            place = arriving.enter_context(bodies.place())
            arriving.enter_context(place.arriving(partial(given_up.append, number)))
            place.came(16 * MAX_BODY_BYTES)
        clock.now = 4.9
        with pytest.raises(QueueFull):
            await read(bodies, LARGE)
        clock.now = 5.1
        newcomer = asyncio.create_task(read(bodies, LARGE))
        await turn()
        assert given_up == [0]
        await ended(newcomer)
