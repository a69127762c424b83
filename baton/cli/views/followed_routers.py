"""Follows the events of all routers of a cluster at once, including routers that start later (`baton events -w`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from cachetools import FIFOCache

from baton.cli.output import print_note
from baton.cli.target import ANSWER_TIMEOUT_S
from baton.errors import BatonError, Unreachable

if TYPE_CHECKING:
    from baton.messages.operator import ClusterEvent


SAME_S = 5.0
"""Equal events of two routers within this time are one event.

Routers check their nodes once a second and read the registry every two seconds, so they see an event within less time.
"""
_ONCE = frozenset({"NodeJoined", "NodeReady", "RouterJoined"})
"""Events that a router sees whenever it starts. Equal ones are one event at any distance in time."""
_REMEMBERED = 10_000
_CHECK_INTERVAL_S = 1.0
"""How often to look for routers that have started."""


class EventMerger:
    """Recognises events that another router has already reported."""

    def __init__(self) -> None:
        self._seen: FIFOCache[tuple[str, ...], tuple[float, str]] = FIFOCache(_REMEMBERED)

    def is_new(self, event: ClusterEvent) -> bool:
        """Whether no other router has reported this event."""
        key = (event.reason, event.subject, event.incarnation, event.request_id, event.detail)
        when, router = self._seen.get(key, (float("-inf"), event.router))
        if router != event.router and (event.reason in _ONCE or abs(event.time - when) < SAME_S):
            return False
        self._seen[key] = (event.time, event.router)
        return True

    def merge(self, events: Iterable[ClusterEvent]) -> list[ClusterEvent]:
        """The new ones among the events, the oldest first."""
        return [event for event in sorted(events, key=lambda event: event.time) if self.is_new(event)]


def follow_events(routers: Callable[[], Sequence[str]], after: int) -> Iterator[ClusterEvent]:
    """Yield the events of each router with a sequence number above `after`, then new events as they happen.

    `routers` returns the addresses at which routers run now, and may raise Unreachable. Raises Unreachable when no
    router answers any more.
    """
    merger, streams = EventMerger(), _RouterStreams()
    yield from merger.merge(streams.open(routers(), after))
    while True:
        event = streams.next_event()
        if event is None:
            with suppress(Unreachable):
                streams.open_new(routers())
        elif not isinstance(event, BatonError):
            if merger.is_new(event):
                yield event
        elif streams.has_any:
            print_note(f"baton: {event}; going on with the events of other routers")
        else:
            raise event


class _RouterStreams:
    """The event streams of several routers, each read by a thread of its own."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[str, ClusterEvent | BatonError]] = SimpleQueue()
        self._followed: set[str] = set()
        self._failed: set[str] = set()

    @property
    def has_any(self) -> bool:
        return bool(self._followed)

    def open(self, addresses: Sequence[str], after: int) -> list[ClusterEvent]:
        """Return past events in any order, and follow the routers from there. Raises Unreachable if none answers."""
        earlier: list[ClusterEvent] = []
        failure: BatonError | None = None
        for address in addresses:
            try:
                past = _past_events(address, after)
            except BatonError as error:
                failure = failure or error
                self._failed.add(address)
                continue
            earlier += past
            self._follow(address, past[-1].seq if past else after)
        if not self.has_any and failure is not None:
            raise failure
        return earlier

    def open_new(self, addresses: Sequence[str]) -> None:
        """Follow routers that were not followed. A router that has restarted numbers its events from 1 again."""
        for address in addresses:
            if address not in self._followed:
                self._follow(address, 0)

    def next_event(self) -> ClusterEvent | BatonError | None:
        """The next event, or the error that ended a stream; None if there was neither for a while."""
        while True:
            try:
                address, event = self._queue.get(timeout=_CHECK_INTERVAL_S)
            except Empty:
                return None
            if not isinstance(event, BatonError):
                self._failed.discard(address)
                return event
            self._followed.discard(address)
            if address not in self._failed or not self.has_any:
                # A router that stays away is reported once.
                self._failed.add(address)
                return event

    def _follow(self, address: str, after: int) -> None:
        self._followed.add(address)
        # A thread does not inherit the context, which holds the key and the certificates.
        context = copy_context()
        Thread(target=lambda: context.run(self._read, address, after), name=f"events-{address}", daemon=True).start()

    def _read(self, address: str, after: int) -> None:
        from baton.wire.clients.operator_client import OperatorClient

        try:
            with closing(OperatorClient(address)) as client:
                for event in client.events(after, follow=True):
                    self._queue.put((address, event))
            self._queue.put((address, Unreachable(f"the router at {address} ended the stream")))
        except BatonError as error:
            self._queue.put((address, error))


def _past_events(address: str, after: int) -> list[ClusterEvent]:
    from baton.wire.clients.operator_client import OperatorClient

    with closing(OperatorClient(address)) as client:
        return list(client.events(after, timeout_s=ANSWER_TIMEOUT_S))
