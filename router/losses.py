"""Nodes that were lost, or are back: their flights hear of it together, a few in each turn of the event loop.

The links of many nodes break at once when a switch, a rack or this router fails. The router finds that out node by
node, within some seconds. Two rules keep that from harming the flights:

1. A turn's losses are one event. No flight is placed again before all of them are known, so that none is placed on a
   node that is about to be found lost.
2. A flight hears which other nodes were lost within `MOMENT_S`. It does not charge its budget for a loss that it can't
   have caused (`router.flight.flight`, rule 5).

A node whose link is cut may be lost with others that are found lost first, so it counts in rule 2 from the cut on. When
the link is there again its flights hear of that, each for the attempt that ran there then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from baton.messages.ids import AttemptKey
from baton.messages.node import HEARTBEAT_S
from router.flight.active_request import ActiveRequest
from router.flight.flight_table import LinkBack, NodeGone
from router.timers import Timers

MOMENT_S = 3 * HEARTBEAT_S
"""Losses within so many seconds may have one cause: so long may a node be silent before it counts as lost."""
FLIGHTS_PER_TURN = 32
"""Flights that are placed again in one turn of the loop; each takes about as long as a placement."""


class NodeLosses:
    """Tells flights of lost nodes, and of those that are back. Times are in seconds on the clock of `timers`."""

    def __init__(
        self,
        active_requests: Callable[[], Iterable[ActiveRequest]],
        tell: Callable[[ActiveRequest, NodeGone | LinkBack], None],
        timers: Timers,
    ) -> None:
        """`runs` gives those that may be on lost nodes; `tell` must not raise."""
        self._active = active_requests
        self._tell = tell
        self._new: dict[str, str] = {}
        """Lost in this turn, and why."""
        self._recent: dict[str, float] = {}
        """When each node of the last moment was lost, or its link cut, the earliest first."""
        self._untold: deque[tuple[ActiveRequest, AttemptKey, NodeGone | LinkBack]] = deque()
        self._goes_on = False
        """The next turn continues to tell flights."""
        self._active_by_node: defaultdict[str, list[ActiveRequest]] | None = None
        """By node, from when they were asked for to the end of that turn."""
        self._timers = timers

    def lost(self, incarnation: str, reason: str, now: float) -> None:
        """A node is gone. Its flights hear of it soon: in the next turn of the loop, or some turns later."""
        self._new[incarnation] = reason
        self.suspected(incarnation, now)
        self._go_on_next_turn()

    def suspected(self, incarnation: str, now: float) -> None:
        """A node's link is cut: it may be lost."""
        self._recent.pop(incarnation, None)
        self._recent[incarnation] = now
        while now - self._recent[first := next(iter(self._recent))] > MOMENT_S:
            del self._recent[first]

    def back(self, incarnation: str) -> None:
        """The node whose link was cut is there again. Its flights hear of it soon."""
        self._recent.pop(incarnation, None)
        for active in self.active_on(incarnation):
            self._untold.append((active, active.flight.key, LinkBack(incarnation)))
        self._go_on_next_turn()

    def active_on(self, incarnation: str) -> Sequence[ActiveRequest]:
        """The flights on a node whose link is cut.

        Hundreds of links may be opened again in one turn: all flights are looked at once. None comes to such a node
        meanwhile, since nothing is placed there.
        """
        if self._active_by_node is None:
            self._active_by_node = defaultdict(list)
            for active in self._active():
                for node in active.flight.incarnations:
                    self._active_by_node[node].append(active)
            self._timers.call_soon(self._forget_active_by_node, "lost-nodes")
        return [
            active for active in self._active_by_node.get(incarnation, ()) if incarnation in active.flight.incarnations
        ]

    def _forget_active_by_node(self) -> None:
        self._active_by_node = None

    def settle(self) -> None:
        """Note now whom the losses so far concern, as one of these nodes is about to be there again."""
        if not self._new:
            return
        lost, self._new = self._new, {}
        together = frozenset(self._recent)
        for active in self._active():
            for incarnation in active.flight.incarnations & lost.keys():
                gone = NodeGone(incarnation, lost[incarnation], together)
                self._untold.append((active, active.flight.key, gone))

    def _go_on_next_turn(self) -> None:
        if not self._goes_on:
            self._goes_on = True
            self._timers.call_soon(self._go_on, "lost-nodes")

    def _go_on(self) -> None:
        self._goes_on = False
        self.settle()
        for _ in range(min(FLIGHTS_PER_TURN, len(self._untold))):
            active, attempt, news = self._untold.popleft()
            # Its other node may have been told of first: the next attempt may even be on the same node, come back.
            if active.flight.key == attempt:
                self._tell(active, news)
        if self._untold or self._new:
            self._go_on_next_turn()
