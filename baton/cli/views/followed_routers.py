"""`baton events -w`: every router of a cluster is heard at once, also one that comes later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from baton.cli.output import note
from baton.cli.views.merged_events import Merge
from baton.errors import BatonError, Unreachable

if TYPE_CHECKING:
    from baton.messages.steering import ClusterEvent

_ASK_S = 5.0
_LOOK_EVERY_S = 1.0
"""For routers that are new, or back."""


def follow(routers: Callable[[], Sequence[str]], after: int) -> Iterator[ClusterEvent]:
    """What the routers tell, from after this number of each on, and what is yet to come. Raises Unreachable when none
    is left.

    `routers`: where they are now; may raise Unreachable.
    """
    merge, heard = Merge(), _Heard()
    yield from merge.of(heard.so_far(routers(), after))
    while True:
        found = heard.next()
        if found is None:
            with suppress(Unreachable):
                heard.also(routers())
        elif not isinstance(found, BatonError):
            if merge.is_news(found):
                yield found
        elif heard.anybody:
            note(f"baton: {found}; going on with what other routers see")
        else:
            raise found


class _Heard:
    """Listens to routers, each on a thread of its own."""

    def __init__(self) -> None:
        self._news: SimpleQueue[tuple[str, ClusterEvent | BatonError]] = SimpleQueue()
        self._followed: set[str] = set()
        self._away: set[str] = set()

    @property
    def anybody(self) -> bool:
        return bool(self._followed)

    def so_far(self, places: Sequence[str], after: int) -> list[ClusterEvent]:
        """What they know, in whatever order; then they are followed. Raises Unreachable if none answers."""
        found: list[ClusterEvent] = []
        trouble: BatonError | None = None
        for place in places:
            try:
                told = _ask(place, after)
            except BatonError as error:
                trouble = trouble or error
                self._away.add(place)
                continue
            found += told
            self._begin(place, told[-1].seq if told else after)
        if not self.anybody and trouble is not None:
            raise trouble
        return found

    def also(self, places: Sequence[str]) -> None:
        """Follow those, too, that were not there. Who comes back counts from 1 again."""
        for place in places:
            if place not in self._followed:
                self._begin(place, 0)

    def next(self) -> ClusterEvent | BatonError | None:
        """The next event, or why somebody is not heard any more; None: nothing for a while."""
        while True:
            try:
                place, found = self._news.get(timeout=_LOOK_EVERY_S)
            except Empty:
                return None
            if not isinstance(found, BatonError):
                self._away.discard(place)
                return found
            self._followed.discard(place)
            if place not in self._away or not self.anybody:
                # Nobody is told again and again that it is still away.
                self._away.add(place)
                return found

    def _begin(self, place: str, after: int) -> None:
        self._followed.add(place)
        # A thread inherits no context, and what is shown to a router is in it.
        context = copy_context()
        Thread(target=lambda: context.run(self._listen, place, after), name=f"events-{place}", daemon=True).start()

    def _listen(self, place: str, after: int) -> None:
        from baton.client import OperatorClient

        try:
            with closing(OperatorClient(place)) as client:
                for event in client.events(after, follow=True):
                    self._news.put((place, event))
            self._news.put((place, Unreachable(f"the router at {place} ended the stream")))
        except BatonError as error:
            self._news.put((place, error))


def _ask(place: str, after: int) -> list[ClusterEvent]:
    from baton.client import OperatorClient

    with closing(OperatorClient(place)) as client:
        return list(client.events(after, timeout_s=_ASK_S))
