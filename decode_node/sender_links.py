"""The links of a decode node to prefill nodes: opens them, and opens those again whose sender is still wanted."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable

from baton.background import current_watch
from baton.clock import Clock
from baton.errors import TransferFailed
from baton.messages.ids import Peer
from baton.observe.metrics import Histogram
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
                # It is not wanted any more, or has been opened again.
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
