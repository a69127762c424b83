"""Waiting for the first of several things."""

from __future__ import annotations

import asyncio

import pytest

from router.timers import first_of


async def test_the_first_that_is_done_ends_the_wait_and_the_others() -> None:
    ended: list[str] = []

    async def last_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    await first_of(last_for_ever(), asyncio.sleep(0))
    assert ended == ["cancelled"]


async def test_the_error_of_what_is_awaited_is_raised() -> None:
    async def fail() -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        await first_of(asyncio.Event().wait(), fail())
