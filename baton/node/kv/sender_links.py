"""The nodes whose blocks this one reads: the links to them, and those whose link has ended.

The process of a sender whose link has ended may still run and open a link again, so its memory stays connected at
first. To disconnect it and connect it again would cost, over TCP, two sockets on each side that NIXL does not free
before one of the processes ends. A sender is dropped when its process is known to be gone: when its port refuses
connections, or when a newer process of its node has a link. A sender whose host went down does not answer at all, and
may have no successor: it is dropped when it has been silent for a quarter of an hour. Of too many absent senders the
memory of some is disconnected though their processes may run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable

from baton.background import OnFault, current_watch
from baton.clock import Clock
from baton.errors import TransferFailed
from baton.messages.ids import Peer
from baton.observe.metrics import Histogram
from baton.wire.liveness import PROBE_DELAYS_S, PortState
from kv_transfer.link.link_client import LinkClient
from kv_transfer.link.link_messages import ReaderMessage

HANDSHAKE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
REOPEN_S = 1.0
MAX_REOPEN_S = 60.0
"""The pause before a link is reopened, in seconds, doubles from REOPEN_S up to this value while reopening fails."""


class SenderLinks:
    """At most one link to each incarnation. Belongs to the event loop."""

    def __init__(self, open_link: Callable[[Peer], LinkClient], reopen: Callable[[Peer], bool], clock: Clock) -> None:
        """`open_link` makes a link, which opens at once. `reopen` is called after the pause that `reopen_later` began;
        it opens the link if it is still wanted, and returns whether it did.
        """
        self._open_link = open_link
        self._reopen = reopen
        self._clock = clock
        self._links: dict[str, LinkClient] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """The timers of links that will be reopened, by incarnation."""
        self._failed_reopens: Counter[str] = Counter()
        """How often in a row a link was reopened without success, by incarnation."""
        self._opened_at: dict[str, float] = {}
        """When each link was opened whose sender may not be used yet, by incarnation."""
        self.handshakes: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(HANDSHAKE_BUCKETS_S))
        """Seconds from opening a link until the sender could be used, by sender."""
        self._watch = current_watch.get()

    def __len__(self) -> int:
        return len(self._links)

    async def close(self) -> None:
        """End all links, and open none again."""
        for timer in self._timers.values():
            timer.cancel()
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close()

    def source(self, incarnation: str) -> Peer | None:
        """The sender to which there is a link; None: there is none."""
        link = self._links.get(incarnation)
        return link.source if link is not None else None

    def open(self, source: Peer) -> None:
        """Open a link to a sender that has none."""
        self._opened_at[source.incarnation] = self._clock.monotonic()
        self._links[source.incarnation] = self._open_link(source)

    def connected(self, incarnation: str) -> None:
        """The sender's memory is connected: the next pause is the shortest again."""
        self._failed_reopens.pop(incarnation, None)

    def proven(self, incarnation: str) -> None:
        """The sender may be used for requests."""
        opened_at, link = self._opened_at.pop(incarnation, None), self._links.get(incarnation)
        if opened_at is not None and link is not None:
            self.handshakes[link.source.node_id].observe(self._clock.monotonic() - opened_at)

    def tell(self, incarnation: str, message: ReaderMessage) -> None:
        """Send a message, if there is a link."""
        if (link := self._links.get(incarnation)) is not None:
            link.send(message)

    def cut(self, incarnation: str, error: TransferFailed) -> None:
        """End a link with this error, if there is one."""
        if (link := self._links.get(incarnation)) is not None:
            link.cut(error)

    def ended(self, incarnation: str) -> Peer | None:
        """A link has ended, or did not open; returns its sender, if it was one of these links."""
        self._opened_at.pop(incarnation, None)
        link = self._links.pop(incarnation, None)
        return link.source if link is not None else None

    def reopen_later(self, source: Peer) -> None:
        """Ask to reopen a link after a pause, which doubles while opening fails."""
        incarnation = source.incarnation

        def reopen() -> None:
            del self._timers[incarnation]
            if not self._reopen(source):
                # The link is not wanted any more, or has been opened again.
                self.give_up(incarnation)

        if incarnation not in self._timers:
            pause_s = min(REOPEN_S * 2.0 ** min(self._failed_reopens[incarnation], 16), MAX_REOPEN_S)
            self._failed_reopens[incarnation] += 1
            guarded = self._watch.guarded(reopen, "reopen-link")
            self._timers[incarnation] = asyncio.get_running_loop().call_later(pause_s, guarded)

    def give_up(self, incarnation: str) -> None:
        """Forget how often reopening this link has failed, unless it will be reopened."""
        if incarnation not in self._timers:
            self._failed_reopens.pop(incarnation, None)


PROBE_INTERVAL_S = 60.0
MAX_SILENT_PROBES = 15
"""A sender is dropped when it has left more than this number of probes in a row without an answer."""
MAX_ABSENT = 256
"""Limit of the absent senders. Beyond it, the memory of the one whose link ended first is disconnected, even if its
port answers: the port may belong to another process by now."""

_log = logging.getLogger(__name__)


class AbsentSenders:
    """The absent senders of one reader. Belongs to the event loop."""

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
