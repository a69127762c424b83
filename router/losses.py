"""Lost nodes, and nodes that are back: their flights get the event together, a few in each turn of the event loop.

The links of many nodes break at once when a switch, a rack or this router fails. The router finds that out node by
node, within some seconds. Two rules keep that from harming the flights:

1. A turn's losses are one event. No flight is placed again before all of them are known, so that none is placed on a
   node that is about to be found lost.
2. A flight's event has all nodes that were lost within `MOMENT_S`, so that the flight does not charge its budget for a
   loss that it can't have caused (`router.flight.flight`, rule 5).

A node whose link is cut may be found lost later than others, so it counts in rule 2 from the cut on. When the link is
open again, it gets the aborts that it missed (`router.leg_messages`), and then its flights get an event for that, each
for the attempt that ran there then.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from baton.messages.ids import AttemptKey
from baton.messages.node import HEARTBEAT_S
from router.flight.active_request import ActiveRequest
from router.flight.flight_table import LinkBack, NodeGone
from router.timers import NextTurn, Timers

MOMENT_S = 3 * HEARTBEAT_S
"""Losses within so many seconds may have one cause: a node may be silent for so long before it counts as lost."""
FLIGHTS_PER_TURN = 32
"""Flights that get their event in one turn of the loop; each takes about as long as a placement."""


class NodeLosses:
    """Finds the events of flights whose nodes are lost or back. Times: seconds on the clock of `timers`."""

    def __init__(self, active: Mapping[str, ActiveRequest], timers: Timers) -> None:
        """`active`: the live requests, by id."""
        self._active = active
        self._lost_in_turn: dict[str, str] = {}
        """Nodes that were lost in this turn, with the reason."""
        self._recently_lost: dict[str, float] = {}
        """When each node was lost, or its link cut, within the last MOMENT_S; the earliest first."""
        self._to_tell: deque[tuple[ActiveRequest, AttemptKey, NodeGone | LinkBack]] = deque()
        self._active_by_node: defaultdict[str, list[ActiveRequest]] | None = None
        """The requests of each node, from the first use in a turn to the end of that turn."""
        self._end_of_turn = NextTurn(timers, self._forget_active_by_node, "lost-nodes")

    @property
    def has_events(self) -> bool:
        """Whether `events` has more."""
        return bool(self._to_tell or self._lost_in_turn)

    def node_lost(self, incarnation: str, reason: str, now: float) -> None:
        """A node is gone."""
        self._lost_in_turn[incarnation] = reason
        self.link_cut(incarnation, now)

    def link_cut(self, incarnation: str, now: float) -> None:
        """A node's link is cut, so the node may be lost."""
        self._recently_lost.pop(incarnation, None)
        self._recently_lost[incarnation] = now
        while now - self._recently_lost[first := next(iter(self._recently_lost))] > MOMENT_S:
            del self._recently_lost[first]

    def link_back(self, incarnation: str) -> None:
        """The link of a node that was cut is open again."""
        self._recently_lost.pop(incarnation, None)
        for active in self.active_on(incarnation):
            self._to_tell.append((active, active.flight.key, LinkBack(incarnation)))

    def active_on(self, incarnation: str) -> Sequence[ActiveRequest]:
        """The requests on a node whose link is cut.

        Hundreds of links may be opened again in one turn, so all requests are sorted by node once a turn. No request
        comes to such a node meanwhile, since nothing is placed there.
        """
        if self._active_by_node is None:
            self._active_by_node = defaultdict(list)
            for active in self._active.values():
                for node in active.flight.incarnations:
                    self._active_by_node[node].append(active)
            self._end_of_turn.request()
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
        for active in self._active.values():
            for incarnation in active.flight.incarnations & lost.keys():
                gone = NodeGone(incarnation, lost[incarnation], together)
                self._to_tell.append((active, active.flight.key, gone))

    def events(self) -> Iterator[tuple[ActiveRequest, NodeGone | LinkBack]]:
        """The events of this turn. Each is to be given to its flight before the next one is asked for."""
        self.resolve_flights()
        for _ in range(min(FLIGHTS_PER_TURN, len(self._to_tell))):
            active, attempt, event = self._to_tell.popleft()
            # The event of its other node may have come first: its next attempt may even be on this node, now back.
            if active.flight.key == attempt:
                yield active, event
