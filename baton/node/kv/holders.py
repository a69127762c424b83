"""From which nodes this one can pull what they have cached, and to which a link is being opened for that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.background import current_watch
from baton.clock import Clock
from baton.messages.ids import Peer

SHUNNED_S = 10.0
"""For how long nothing is pulled from an incarnation of which a pull has failed."""
MEET_S = 0.25
"""How long a prompt waits for the link over which its beginning is to be pulled."""


class Holders:
    """The holders of prefixes, by incarnation. Belongs to the event loop, but for what says otherwise."""

    def __init__(
        self,
        clock: Clock,
        post: Callable[[Callable[[], None]], object],
        open_link: Callable[[Peer], None],
        wake_engine: Callable[[], None],
    ) -> None:
        """`post` runs a callable on the event loop, from any thread. `open_link` opens a link, unless there is one or
        its other end can't be used."""
        self._clock = clock
        self._post = post
        self._open_link = open_link
        self._wake_engine = wake_engine
        self._watch = current_watch.get()
        self._pullable: set[str] = set()
        """The incarnations whose blocks are proven to be readable, and of the same size."""
        self._takes_pulls: dict[str, bool] = {}
        """For each linked one whether it is pullable once its blocks are proven."""
        self._shunned_until: dict[str, float] = {}
        """Until when nothing is pulled from it since a pull has failed, on the clock."""
        self._meeting: set[str] = set()
        """The incarnations to which a link is being opened."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """The timers that end the waiting for these links."""

    def may_pull(self, incarnation: str) -> bool:
        """Whether blocks can be pulled from it now. May be called from any thread."""
        return incarnation in self._pullable and not self._is_shunned(incarnation)

    def is_meeting(self, incarnation: str) -> bool:
        """Whether a link to it is being opened. May be called from any thread."""
        return incarnation in self._meeting

    def meet(self, source: Peer) -> None:
        """Open a link to a node from which something is to be pulled. The engine is woken when something can be, or
        when that has taken too long to wait for. May be called from any thread."""
        if source.incarnation not in self._meeting:
            self._meeting.add(source.incarnation)
            self._post(lambda: self._begin_meeting(source))

    def link_up(self, incarnation: str, *, takes_pulls: bool) -> None:
        """A link is open, and its blocks are still to be proven. `takes_pulls`: whether it can be pulled from then."""
        self._takes_pulls[incarnation] = takes_pulls

    def proven(self, incarnation: str) -> None:
        """Its blocks can be read."""
        if self._takes_pulls.get(incarnation):
            self._pullable.add(incarnation)
        self.met(incarnation)

    def link_down(self, incarnation: str) -> None:
        """Its link has ended, or did not open."""
        self._pullable.discard(incarnation)
        self._takes_pulls.pop(incarnation, None)
        self.met(incarnation)

    def failed(self, incarnation: str) -> None:
        """A pull from it has failed: that may happen again, and requests wait for it."""
        now = self._clock.monotonic()
        self._shunned_until = {name: until for name, until in self._shunned_until.items() if until > now}
        self._shunned_until[incarnation] = now + SHUNNED_S

    def close(self) -> None:
        """Wait for no link any more."""
        for timer in self._timers.values():
            timer.cancel()

    def _is_shunned(self, incarnation: str) -> bool:
        return self._shunned_until.get(incarnation, 0.0) > self._clock.monotonic()

    def _begin_meeting(self, source: Peer) -> None:
        name = source.incarnation
        # A node of an earlier version, or with blocks of another size, is linked and can't be pulled from.
        is_known = name in self._pullable or self._takes_pulls.get(name) is False
        if is_known or self._is_shunned(name):
            self.met(name)
            return
        over = self._watch.guarded(lambda: self.met(name), "meet-holder")
        self._timers[name] = asyncio.get_running_loop().call_later(MEET_S, over)
        self._open_link(source)

    def met(self, incarnation: str) -> None:
        """Nobody waits any more for a link to it."""
        if incarnation in self._meeting:
            if (timer := self._timers.pop(incarnation, None)) is not None:
                timer.cancel()
            self._meeting.discard(incarnation)
            self._wake_engine()
