"""When the reader of a stream is too slow, and when it only seems so."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import SlowReader
from baton.wire.server.fault_barrier import WriteWatch
from tests.support.virtual_time import VirtualTimeLoop, run_virtually

STALL_S = 10.0


def test_a_write_that_does_not_end_is_abandoned() -> None:
    async def write() -> float:
        loop = asyncio.get_running_loop()
        watch, begun = WriteWatch(STALL_S), loop.time()
        watch.begin_write()
        with pytest.raises(asyncio.CancelledError):
            await loop.create_future()
        with pytest.raises(SlowReader):
            watch.raise_if_stalled()
        watch.stop()
        return loop.time() - begun

    assert STALL_S <= run_virtually(write()) < 2 * STALL_S


def test_a_reader_is_not_taken_for_slow_while_the_loop_was_blocked() -> None:
    async def write() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        watch, written = WriteWatch(STALL_S), loop.create_future()

        def stall() -> None:
            # What arrived meanwhile is read after it, in the turn of the loop in which the watch looks, too.
            loop.stall_for(3 * STALL_S)
            loop.call_soon(written.set_result, None)

        watch.begin_write()
        loop.call_soon(stall)
        await written
        watch.end_write()
        watch.stop()

    run_virtually(write())
