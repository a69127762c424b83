"""Lost nodes, and nodes that are back: their flights get the event together, a few in each turn of the event loop.

The links of many nodes break at once when a switch, a rack or this router fails. The router finds that out node by
node, within some seconds. Two rules keep that from harming the flights:

1. A turn's losses are one event. No flight is placed again before all of them are known, so that none is placed on a
   node that is about to be found lost.
2. A flight's event has all nodes that were lost within `MOMENT_S`, so that the flight does not charge its budget for a
   loss that it can't have caused (`router.flight.flight`, rule 5).

A node whose link is cut may be found lost later than others, so it counts in rule 2 from the cut on. When the link is
open again, its flights get an event for that, each for the attempt that ran there then.
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
"""Losses within so many seconds may have one cause: a node may be silent for so long before it counts as lost."""
FLIGHTS_PER_TURN = 32
"""Flights that get their event in one turn of the loop; each takes about as long as a placement."""


class NodeLosses:
    """Gives flights the events about nodes that are lost or back. Times: seconds on the clock of `timers`."""

    def __init__(
        self,
        active_requests: Callable[[], Iterable[ActiveRequest]],
        tell: Callable[[ActiveRequest, NodeGone | LinkBack], None],
        timers: Timers,
    ) -> None:
        """`active_requests` returns those that may be on lost nodes; `tell` gives one an event, and must not raise."""
        self._active = active_requests
        self._tell = tell
        self._lost_in_turn: dict[str, str] = {}
        """Nodes that were lost in this turn, with the reason."""
        self._recently_lost: dict[str, float] = {}
        """When each node was lost, or its link cut, within the last MOMENT_S; the earliest first."""
        self._to_tell: deque[tuple[ActiveRequest, AttemptKey, NodeGone | LinkBack]] = deque()
        self._continues_next_turn = False
        """Whether the next turn continues to give events to flights."""
        self._active_by_node: defaultdict[str, list[ActiveRequest]] | None = None
        """The requests of each node, from the first use in a turn to the end of that turn."""
        self._timers = timers

    def node_lost(self, incarnation: str, reason: str, now: float) -> None:
        """A node is gone. Its flights get the event in the next turn of the loop, or some turns later."""
        self._lost_in_turn[incarnation] = reason
        self.link_cut(incarnation, now)
        self._continue_next_turn()

    def link_cut(self, incarnation: str, now: float) -> None:
        """A node's link is cut, so the node may be lost."""
        self._recently_lost.pop(incarnation, None)
        self._recently_lost[incarnation] = now
        while now - self._recently_lost[first := next(iter(self._recently_lost))] > MOMENT_S:
            del self._recently_lost[first]

    def link_back(self, incarnation: str) -> None:
        """The link of a node that was cut is open again. Its flights get the event soon."""
        self._recently_lost.pop(incarnation, None)
        for active in self.active_on(incarnation):
            self._to_tell.append((active, active.flight.key, LinkBack(incarnation)))
        self._continue_next_turn()

    def active_on(self, incarnation: str) -> Sequence[ActiveRequest]:
        """The requests on a node whose link is cut.

        Hundreds of links may be opened again in one turn, so all requests are sorted by node once a turn. No request
        comes to such a node meanwhile, since nothing is placed there.
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

    def resolve_flights(self) -> None:
        """Find the flights on the nodes that were lost so far, before one of these nodes is attached again."""
        if not self._lost_in_turn:
            return
        lost, self._lost_in_turn = self._lost_in_turn, {}
        together = frozenset(self._recently_lost)
        for active in self._active():
            for incarnation in active.flight.incarnations & lost.keys():
                gone = NodeGone(incarnation, lost[incarnation], together)
                self._to_tell.append((active, active.flight.key, gone))

    def _continue_next_turn(self) -> None:
        if not self._continues_next_turn:
            self._continues_next_turn = True
            self._timers.call_soon(self._continue, "lost-nodes")

    def _continue(self) -> None:
        self._continues_next_turn = False
        self.resolve_flights()
        for _ in range(min(FLIGHTS_PER_TURN, len(self._to_tell))):
            active, attempt, event = self._to_tell.popleft()
            # The event of its other node may have come first: its next attempt may even be on this node, now back.
            if active.flight.key == attempt:
                self._tell(active, event)
        if self._to_tell or self._lost_in_turn:
            self._continue_next_turn()
