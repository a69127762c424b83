"""Few bodies above 1 MiB are read at once, and announcing one takes no place from others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from baton.errors import QueueFull
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


async def test_a_place_is_taken_by_bytes_and_not_by_a_promise() -> None:
    bodies = LargeBodies()
    with bodies.place() as first, bodies.place() as second:
        promises = asyncio.create_task(read_body(scope(MOST), sends(b"x"), MOST, first))
        sending = asyncio.create_task(read_body(scope(MOST), sends(b"x" * (MAX_BODY_BYTES + 1)), MOST, second))
        for _ in range(10):
            await asyncio.sleep(0)
        assert bodies.num_open == 1
        bodies.num_open = MAX_LARGE_BODIES
        with bodies.place() as third, pytest.raises(QueueFull):
            await read_body(scope(MOST), sends(b"x" * (MAX_BODY_BYTES + 1)), MOST, third)
        bodies.num_open = 1
        for task in (promises, sending):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert bodies.num_open == 0
