"""Follows the events of all routers of a cluster at once, including routers that start later (`baton events -w`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from baton.cli.output import print_note
from baton.cli.target import ANSWER_TIMEOUT_S
from baton.cli.views.merged_events import EventMerger
from baton.errors import BatonError, Unreachable

if TYPE_CHECKING:
    from baton.messages.operator import ClusterEvent

_CHECK_INTERVAL_S = 1.0
"""How often to look for routers that have started."""


def follow_events(routers: Callable[[], Sequence[str]], after: int) -> Iterator[ClusterEvent]:
    """Yield the events of each router with a sequence number above `after`, then new events as they happen.

    `routers` returns the addresses at which routers run now, and may raise Unreachable. Raises Unreachable when no
    router answers any more.
    """
    merger, streams = EventMerger(), _RouterStreams()
    yield from merger.merge(streams.open(routers(), after))
    while True:
        found = streams.next_event()
        if found is None:
            with suppress(Unreachable):
                streams.open_new(routers())
        elif not isinstance(found, BatonError):
            if merger.is_new(found):
                yield found
        elif streams.has_any:
            print_note(f"baton: {found}; going on with the events of other routers")
        else:
            raise found


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
        found: list[ClusterEvent] = []
        failure: BatonError | None = None
        for address in addresses:
            try:
                past = _past_events(address, after)
            except BatonError as error:
                failure = failure or error
                self._failed.add(address)
                continue
            found += past
            self._follow(address, past[-1].seq if past else after)
        if not self.has_any and failure is not None:
            raise failure
        return found

    def open_new(self, addresses: Sequence[str]) -> None:
        """Follow routers that were not followed. A router that has restarted numbers its events from 1 again."""
        for address in addresses:
            if address not in self._followed:
                self._follow(address, 0)

    def next_event(self) -> ClusterEvent | BatonError | None:
        """The next event, or the error that ended a stream; None if there was neither for a while."""
        while True:
            try:
                address, found = self._queue.get(timeout=_CHECK_INTERVAL_S)
            except Empty:
                return None
            if not isinstance(found, BatonError):
                self._failed.discard(address)
                return found
            self._followed.discard(address)
            if address not in self._failed or not self.has_any:
                # A router that stays away is reported once.
                self._failed.add(address)
                return found

    def _follow(self, address: str, after: int) -> None:
        self._followed.add(address)
        # A thread does not inherit the context, which holds the key and the certificates.
        context = copy_context()
        Thread(target=lambda: context.run(self._read, address, after), name=f"events-{address}", daemon=True).start()

    def _read(self, address: str, after: int) -> None:
        from baton.client import OperatorClient

        try:
            with closing(OperatorClient(address)) as client:
                for event in client.events(after, follow=True):
                    self._queue.put((address, event))
            self._queue.put((address, Unreachable(f"the router at {address} ended the stream")))
        except BatonError as error:
            self._queue.put((address, error))


def _past_events(address: str, after: int) -> list[ClusterEvent]:
    from baton.client import OperatorClient

    with closing(OperatorClient(address)) as client:
        return list(client.events(after, timeout_s=ANSWER_TIMEOUT_S))
