"""Senders whose link has ended and whose processes may live on.

Their memory stays connected. To drop it and to connect to it again costs, over TCP, two sockets on each side that NIXL
gives back to nobody before one of the processes ends. So a sender is dropped when its process is gone: when nobody
listens any more where it did, or a newer process of its node is here. One that went with its host answers nothing, and
nobody may ever come in its name: it is dropped when it has been silent for a quarter of an hour.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable

from baton.background import OnFault, current_watch
from baton.messages.node import KVSource
from kv_transfer.link.liveness import PROBE_DELAYS_S, PortState

LOOK_EVERY_S = 60.0
MAX_SILENT_LOOKS = 15
"""In a row."""
MAX_ABSENT = 256
"""Of more the one that left first is dropped, though it may come back: its port may be another process's by now."""

_log = logging.getLogger(__name__)


class AbsentSenders:
    """Lives on the loop."""

    def __init__(self, drop: Callable[[str], None], probe_port: Callable[[str], Awaitable[PortState]]) -> None:
        """`drop` lets go of the memory of an incarnation; it is called once for each, unless the sender came back."""
        self._watch = current_watch.get()
        self._drop = drop
        self._probe_port = probe_port
        self._absent: dict[str, KVSource] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Those that are cancelled and not over yet, too."""

    def __len__(self) -> int:
        return len(self._absent)

    def left(self, source: KVSource) -> None:
        """Its link has ended."""
        self._absent[source.incarnation] = source
        task = self._watch.start(
            lambda: self._look_for(source), "look-for", source.incarnation, on_fault=OnFault.RESTART, may_end=True
        )
        self._looking[source.incarnation] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if len(self._absent) > MAX_ABSENT:
            first = next(iter(self._absent))
            self._forget(first)
            self._drop(first)

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
        why = await self._gone(source.address)
        _log.info("%s is gone: %s %s", source.incarnation, source.address, why)
        del self._absent[source.incarnation], self._looking[source.incarnation]
        self._drop(source.incarnation)

    async def _gone(self, address: str) -> str:
        """Return, with the reason, when whoever listened there is taken for gone."""
        num_silent = 0
        for pause_s in itertools.chain(PROBE_DELAYS_S, itertools.repeat(LOOK_EVERY_S)):
            await asyncio.sleep(pause_s)
            port = await self._probe_port(address)
            if port is PortState.REFUSED:
                return "is free"
            num_silent = num_silent + 1 if port is PortState.SILENT else 0
            if num_silent > MAX_SILENT_LOOKS:
                return "answers nothing"
        raise AssertionError("it looks for ever")
