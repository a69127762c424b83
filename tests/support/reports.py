"""Reads the reports of a node one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.errors import NodeLost
from baton.messages.node import NodeDescription, RouterMessage, StepReport
from router.node_links import NodeStream


class QueuedReports:
    """A stream of a node whose reports are queued. Iteration continues after the last report read; raises NodeLost."""

    def __init__(self, stream: NodeStream) -> None:
        self._stream = stream
        self._queue: asyncio.Queue[StepReport | NodeLost] = asyncio.Queue()
        stream.listen(self._queue.put_nowait, self._queue.put_nowait)

    @property
    def welcome(self) -> NodeDescription:
        return self._stream.welcome

    def send(self, message: RouterMessage) -> None:
        self._stream.send(message)

    async def close(self) -> None:
        await self._stream.close()

    async def __aiter__(self) -> AsyncIterator[StepReport]:
        while True:
            report = await self._queue.get()
            if isinstance(report, NodeLost):
                self._queue.put_nowait(report)  # the next iteration raises it, too
                raise report
            yield report
