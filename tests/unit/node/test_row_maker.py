"""From a call of another node to the engine's thread: what is checked before, and what is given back behind it."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from baton.errors import BatonError, Draining, EngineFault, InvalidRequest
from baton.messages.spans import EncoderContent, RowsRequest
from baton.node.driver import EngineDriver
from baton.node.row_maker import DriverRowMaker
from baton.node.row_requests import WantedRows

IMAGE = EncoderContent.of(b"an image")


class Driver:
    """Notes what is wanted of the engine's thread."""

    def __init__(self, *, refuses: bool = False) -> None:
        self._refuses = refuses
        self.wanted: asyncio.Queue[WantedRows] = asyncio.Queue()
        self.ended: list[int] = []

    def want_rows(self, wanted: WantedRows) -> None:
        self.wanted.put_nowait(wanted)
        if self._refuses:
            wanted.answer(EngineFault("nothing is to be made of this"))

    def end_rows(self, number: int) -> None:
        self.ended.append(number)


def maker_of(driver: Driver, *, draining: bool = False) -> DriverRowMaker:
    return DriverRowMaker(cast(EngineDriver, driver), lambda: draining)


def asked(content: EncoderContent = IMAGE, num_rows: int = 7, digest: str = IMAGE.digest) -> RowsRequest:
    return RowsRequest("i", digest, "print", "float32", "cpu", content, num_rows, "t")


@pytest.mark.parametrize(
    ("request_", "draining", "error"),
    [
        (asked(EncoderContent(IMAGE.digest, b"another image")), False, InvalidRequest),
        (asked(digest=EncoderContent.of(b"x").digest), False, InvalidRequest),
        (asked(num_rows=0), False, InvalidRequest),
        (asked(), True, Draining),
    ],
    ids=["data", "digest", "rows", "draining"],
)
async def test_a_wrong_call_gets_nowhere(request_: RowsRequest, draining: bool, error: type[BatonError]) -> None:
    driver = Driver(refuses=True)
    with pytest.raises(error):
        async with maker_of(driver, draining=draining).made(request_):
            pytest.fail("nothing was made")
    assert driver.wanted.empty()
    assert driver.ended == []


@pytest.mark.parametrize("error", [None, EngineFault("broken")])
async def test_rows_are_held_while_they_are_read(error: Exception | None) -> None:
    driver, reading = Driver(), asyncio.Event()
    maker = maker_of(driver)

    async def call() -> None:
        async with maker.made(asked()):
            reading.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    wanted = await driver.wanted.get()
    assert (wanted.encoder_input.content, wanted.encoder_input.num_rows, wanted.tenant) == (IMAGE, 7, "t")
    wanted.answer(error)
    if error is None:
        await reading.wait()
        assert driver.ended == []
        task.cancel()
    (ended,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError if error is None else EngineFault)
    assert driver.ended == [wanted.number]


async def test_a_caller_that_leaves_before_its_turn_is_forgotten() -> None:
    driver = Driver()
    maker = maker_of(driver)

    async def call() -> None:
        async with maker.made(asked()):
            pytest.fail("nothing was made")

    task = asyncio.create_task(call())
    wanted = await driver.wanted.get()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert driver.ended == [wanted.number]
    # An answer that comes late is no fault.
    wanted.answer(None)
