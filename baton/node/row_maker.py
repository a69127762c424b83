"""Takes the calls with which other nodes ask an encode node for rows, from the event loop to the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.engine.encoder_cache import EncoderInput
from baton.errors import Draining, InvalidRequest
from baton.messages.spans import EncoderContent, RowsRequest
from baton.node.driver import EngineDriver
from baton.node.row_requests import WantedRows


class DriverRowMaker:
    """The `RowMaker` of an encode node. Belongs to the event loop."""

    def __init__(self, driver: EngineDriver, is_draining: Callable[[], bool]) -> None:
        self._driver = driver
        self._is_draining = is_draining
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def made(self, asked: RowsRequest) -> AsyncIterator[None]:
        """Have the rows of an input made, and held while the context is open.

        Raises Draining, QueueFull, InvalidRequest for an input that has no such rows, and what the encoder raised.
        """
        if self._is_draining():
            raise Draining("the node is draining")
        content = asked.content
        assert content is not None
        # Rows are kept by digests: a wrong one would give others this content's.
        if EncoderContent.of(content.data, content.kind).digest != asked.digest:
            raise InvalidRequest("content", "has another digest than its data")
        if asked.num_rows < 1:
            raise InvalidRequest("num_rows", "must be at least 1")
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answered: asyncio.Future[Exception | None] = loop.create_future()

        def answer(error: Exception | None) -> None:
            # The engine's thread may outlive the event loop.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, answered, error)

        own = EncoderContent(asked.digest, content.data, content.kind)
        encoder_input = EncoderInput(own, 0, asked.num_rows, asked.num_rows, asked.tenant)
        try:
            self._driver.want_rows(WantedRows(number, encoder_input, answer))
            if (error := await answered) is not None:
                raise error
            yield
        finally:
            self._driver.end_rows(number)


def _resolve(answered: asyncio.Future[Exception | None], error: Exception | None) -> None:
    # The caller may have left.
    if not answered.done():
        answered.set_result(error)
