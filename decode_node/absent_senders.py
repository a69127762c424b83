"""Senders whose link has ended and whose processes may live on.

Their memory stays connected. To drop it and to connect to it again costs, over TCP, two sockets on each side that NIXL
gives back to nobody before one of the processes ends. So a sender is dropped when its process is gone: when nobody
listens any more where it did, or a newer process of its node is here. One that went with its host, so that nobody
answers at all, is dropped with its successor or at this process's end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.engine.request import KVSource
from kv_transfer.liveness import is_gone

_log = logging.getLogger(__name__)


class AbsentSenders:
    """Lives on the loop."""

    def __init__(self, drop: Callable[[str], None], nobody_listens: Callable[[str], Awaitable[bool]]) -> None:
        """`drop` lets go of the memory of an incarnation; it is called once for each, unless the sender came back."""
        self._drop = drop
        self._nobody_listens = nobody_listens
        self._absent: dict[str, KVSource] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Those that are cancelled and not over yet, too."""

    def __len__(self) -> int:
        return len(self._absent)

    def left(self, source: KVSource) -> None:
        """Its link has ended."""
        self._absent[source.incarnation] = source
        task = asyncio.create_task(self._look_for(source), name=f"look-for-{source.incarnation}")
        self._looking[source.incarnation] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def came(self, node_id: str, incarnation: str) -> None:
        """A link is up: that process is not absent any more, and those of its node before it are no more."""
        self._forget(incarnation)
        for older in [name for name, source in self._absent.items() if source.node_id == node_id]:
            self._forget(older)
            self._drop(older)

    async def close(self) -> None:
        """Look for nobody any more."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, incarnation: str) -> None:
        self._absent.pop(incarnation, None)
        task = self._looking.pop(incarnation, None)
        if task is not None:
            task.cancel()

    async def _look_for(self, source: KVSource) -> None:
        if await is_gone(source.address, self._nobody_listens):
            _log.info("%s is gone: nobody listens on %s", source.incarnation, source.address)
            del self._absent[source.incarnation]
            self._drop(source.incarnation)
        del self._looking[source.incarnation]
