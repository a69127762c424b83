"""Decides when to disconnect the memory of absent senders: those whose link has ended.

The process of an absent sender may still run and open a link again, so its memory stays connected at first. To
disconnect it and connect it again would cost, over TCP, two sockets on each side that NIXL does not free before one of
the processes ends. A sender is dropped when its process is known to be gone: when its port refuses connections, or when
a newer process of its node has a link. A sender whose host went down does not answer at all, and may have no successor:
it is dropped when it has been silent for a quarter of an hour. Of too many absent senders the memory of some is
disconnected though their processes may run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable

from baton.background import OnFault, current_watch
from baton.messages.ids import Peer
from kv_transfer.link.liveness import PROBE_DELAYS_S, PortState

PROBE_INTERVAL_S = 60.0
MAX_SILENT_PROBES = 15
"""A sender is dropped when it has left more than this number of probes in a row without an answer."""
MAX_ABSENT = 256
"""Limit of the absent senders. Beyond it, the memory of the one whose link ended first is disconnected, even if its
port answers: the port may belong to another process by now."""

_log = logging.getLogger(__name__)


class AbsentSenders:
    """The absent senders of one decode node. Belongs to the event loop."""

    def __init__(
        self,
        drop: Callable[[str], None],
        disconnect: Callable[[str], None],
        probe_port: Callable[[str], Awaitable[PortState]],
    ) -> None:
        """One of two callables is called once, when an incarnation is absent no more and has no link: `drop` if its
        process is gone, `disconnect` if it may live. Both disconnect its memory.
        """
        self._watch = current_watch.get()
        self._drop = drop
        self._disconnect = disconnect
        self._probe_port = probe_port
        self._absent: dict[str, Peer] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        """The task that probes each absent sender, by incarnation."""
        self._tasks: set[asyncio.Task[None]] = set()
        """All probing tasks that are not over, cancelled ones included."""

    def __len__(self) -> int:
        return len(self._absent)

    def link_ended(self, source: Peer) -> None:
        """Note that the link to this sender, which was open, has ended."""
        self._absent[source.incarnation] = source
        task = self._watch.start(
            lambda: self._drop_when_gone(source), "look-for", source.incarnation, on_fault=OnFault.RESTART, may_end=True
        )
        self._probes[source.incarnation] = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if len(self._absent) > MAX_ABSENT:
            first = next(iter(self._absent))
            self._forget(first)
            self._disconnect(first)

    def link_opened(self, node_id: str, incarnation: str) -> None:
        """Note that a link is open: its sender is not absent any more, and earlier processes of its node are gone."""
        self._forget(incarnation)
        for older in [name for name, source in self._absent.items() if source.node_id == node_id]:
            self._forget(older)
            self._drop(older)

    async def close(self) -> None:
        """Stop probing."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, incarnation: str) -> None:
        self._absent.pop(incarnation, None)
        task = self._probes.pop(incarnation, None)
        if task is not None:
            task.cancel()

    async def _drop_when_gone(self, source: Peer) -> None:
        reason = await self._wait_until_gone(source.address)
        _log.info("sender %s is gone: %s %s", source.incarnation, source.address, reason)
        del self._absent[source.incarnation], self._probes[source.incarnation]
        self._drop(source.incarnation)

    async def _wait_until_gone(self, address: str) -> str:
        """Wait until the process that listened at the address counts as gone. Returns the reason, which continues a
        sentence that begins with the address."""
        num_silent = 0
        for pause_s in itertools.chain(PROBE_DELAYS_S, itertools.repeat(PROBE_INTERVAL_S)):
            await asyncio.sleep(pause_s)
            port = await self._probe_port(address)
            if port is PortState.REFUSED:
                return "refuses connections"
            num_silent = num_silent + 1 if port is PortState.SILENT else 0
            if num_silent > MAX_SILENT_PROBES:
                return "does not answer"
        raise AssertionError("this loop is endless")
