"""What a node's stream brings, as tests read it: one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from baton.errors import NodeLost
from baton.messages.node import NodeDescription, RouterMessage, StepReport
from router.node_links import NodeStream


class HeardStream:
    """A stream whose reports wait until somebody wants them. Iterating goes on where it ended, and raises NodeLost."""

    def __init__(self, stream: NodeStream) -> None:
        self._stream = stream
        self._heard: asyncio.Queue[StepReport | NodeLost] = asyncio.Queue()
        stream.listen(self._heard.put_nowait, self._heard.put_nowait)

    @property
    def welcome(self) -> NodeDescription:
        return self._stream.welcome

    def send(self, message: RouterMessage) -> None:
        self._stream.send(message)

    async def close(self) -> None:
        await self._stream.close()

    async def __aiter__(self) -> AsyncIterator[StepReport]:
        while True:
            report = await self._heard.get()
            if isinstance(report, NodeLost):
                self._heard.put_nowait(report)  # whoever asks again hears it again
                raise report
            yield report
