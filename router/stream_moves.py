"""Moves streams to other nodes while they are decoded: those of nodes that are to be empty, some of a node that is full
while another one has much room, and those that an operator names.

A node is to be empty while it drains (it was told to stop or to change its role) and while it is cordoned. Each router
moves its own streams, a few of each node at a time, since the other nodes reserve blocks for them and this one's steps
wait for the digests of what they read. A stream that can't be moved ends where it is, as all did before.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from cachetools import FIFOCache

from baton.errors import DeadlineExceeded, InvalidRequest, NoCapacity, NodeNotFound, RequestNotFound
from baton.messages.ids import AttemptKey, unscoped
from baton.messages.node import NodeDescription
from baton.messages.operator import MovedStream
from baton.observe.metrics import Figure
from router.flight.active_request import ActiveRequest
from router.flight.flight_table import MoveEnded, MoveTo, StopMove
from router.live_requests import LiveRequests
from router.placement.placement import Candidate
from router.placement.view import ClusterView
from router.timers import NextTurn, TimerHandle, Timers, sleep_until

AT_ONCE = 8
"""Streams of one node that are moved at the same time."""
MOST_TOKENS = 256
"""How many further tokens a stream may have by the time it is moved; the other node reserves blocks for them."""
MOVE_S = 10.0
"""A stream that has not moved by then stays where it is, since the other node may have no room for it."""
RETRY_S = 1.0
"""After this long a stream that stayed on a node which is to be empty is tried again."""
BALANCE_S = 1.0
"""How often a stream leaves a node that is full while another one has much room."""
WORTH_TOKENS = 64
"""A stream leaves such a node only if it may have so many more tokens."""
_LOOK_S = 0.25
"""How often streams are looked for that are to move."""
_MOST_PUT_OFF = 65_536


@dataclass(slots=True)
class _UnderWay:
    """A move that has begun."""

    source: NodeDescription
    to: NodeDescription
    timer: TimerHandle
    answered: Callable[[MoveEnded], None]


def _nobody_asks(ended: MoveEnded) -> None:
    return


class StreamMoves:
    """The moves of one router's streams. Belongs to its event loop."""

    def __init__(self, requests: LiveRequests, view: ClusterView, timers: Timers, *, is_on: bool = True) -> None:
        """`is_on`: whether streams are moved that no operator has named."""
        self._requests = requests
        self._view = view
        self._timers = timers
        self._is_on = is_on
        self._balance_at = 0.0
        """When a stream may leave a crowded node again."""
        self._under_way: dict[AttemptKey, _UnderWay] = {}
        """By the attempt that is to have the stream."""
        self._num_leaving: Counter[str] = Counter()
        """How many of them leave each incarnation."""
        self._queue: deque[ActiveRequest] = deque()
        """Streams on nodes that are to be empty, as of the last look."""
        self._not_before: FIFOCache[str, float] = FIFOCache(_MOST_PUT_OFF)
        """When streams that stayed where they are may be tried again, by request id."""
        self._next_moves = NextTurn(timers, self._begin_moves, "stream-moves")
        self.num_ended: Counter[str] = Counter()
        """Moves that have ended, by how: moved, stayed, over (the request ended meanwhile)."""
        requests.on_move_ended.add(self._ended)

    def figures(self) -> Iterator[Figure]:
        """The metrics, for the metrics page."""
        text = "Streams that were to move to another node, by how that ended: over, if their requests ended meanwhile."
        for end in ("moved", "stayed", "over"):
            yield Figure("router_stream_moves_total", text, self.num_ended[end], {"end": end})

    async def run(self) -> None:
        """Look for streams that are to move, until cancelled."""
        while True:
            self.look()
            await sleep_until(self._timers, self._timers.monotonic() + _LOOK_S)

    def look(self) -> None:
        """Look for streams on nodes that are to be empty or are crowded, and begin to move them."""
        if not self._is_on:
            return
        self._queue.clear()
        if leaving := self._view.leaving():
            self._queue.extend(active for active in self._requests.active_requests() if _decodes_on(active, leaving))
            self._begin_moves()
        now = self._timers.monotonic()
        if now >= self._balance_at and (crowded := self._view.crowded()) and not self._num_leaving[crowded]:
            self._balance_at = now + BALANCE_S
            self._leave(crowded)

    def _leave(self, crowded: str) -> None:
        """Move one stream away: the latest one that has many tokens to come, since it has the least KV."""
        for active in self._requests.active_requests():
            num_left = active.request.sampling_params.max_tokens - active.flight.num_output_tokens
            if (
                num_left >= WORTH_TOKENS
                and _decodes_on(active, frozenset((crowded,)))
                and not active.flight.why_not_movable()
            ):
                with suppress(NoCapacity, InvalidRequest):
                    self._begin(active, None, _nobody_asks)
                return

    async def move(self, request_id: str, to: str = "") -> MovedStream:
        """Move a stream, and wait until it has moved. `to`: the name of the node; empty: the least loaded one.

        Raises RequestNotFound, NodeNotFound, InvalidRequest if it can't be moved, NoCapacity if no node takes it, and
        DeadlineExceeded with the reason if it stays where it is.
        """
        active = self._requests.find(request_id)
        if active is None:
            raise RequestNotFound(f"this router has no live request {unscoped(request_id)[:80]!r}")
        if why := active.flight.why_not_movable():
            raise InvalidRequest("request", why)
        answered: asyncio.Future[MoveEnded] = asyncio.get_running_loop().create_future()

        def answer(ended: MoveEnded) -> None:
            if not answered.done():
                answered.set_result(ended)

        source, node = self._begin(active, self._named(to), answer)
        ended = await answered
        if ended.placement is None:
            why = ended.why or "the request has ended"
            raise DeadlineExceeded(f"{unscoped(request_id)} stays on {source.node_id}: {why}")
        return MovedStream(source.node_id, node.node_id)

    def _named(self, name: str) -> NodeDescription | None:
        if not name:
            return None
        named = [node for node in self._view.descriptions() if node.node_id == name]
        if not named:
            raise NodeNotFound(f"no node is called {name[:80]}")
        return named[-1]

    def _begin_moves(self) -> None:
        now = self._timers.monotonic()
        waiting, self._queue = self._queue, deque()
        for active in waiting:
            flight = active.flight
            source = flight.decoder
            if source is None or self._not_before.get(active.request.request_id, 0.0) > now:
                continue
            if self._num_leaving[source.incarnation] >= AT_ONCE:
                self._queue.append(active)
            elif not flight.why_not_movable():
                try:
                    self._begin(active, None, _nobody_asks)
                except (NoCapacity, InvalidRequest):
                    self._not_before[active.request.request_id] = now + RETRY_S

    def _begin(
        self, active: ActiveRequest, to: NodeDescription | None, answered: Callable[[MoveEnded], None]
    ) -> tuple[NodeDescription, NodeDescription]:
        """Begin a move; returns from where and to which node. `to`: None: one is chosen. Raises as `choose_move`."""
        flight, source, now = active.flight, active.flight.decoder, self._timers.monotonic()
        assert source is not None
        candidates: Sequence[Candidate] = self._view.candidates()
        if to is not None:
            candidates = [candidate for candidate in candidates if candidate.node.incarnation == to.incarnation]
            if not candidates:
                raise NoCapacity(f"{to.node_id} takes no requests now")
        node = self._requests.placer.choose_move(candidates, active.request, source, flight.origin, now, flight.kv_bits)
        self._requests.feed(active, MoveTo(node, MOST_TOKENS))
        key = flight.moving_to
        if key is None:
            # A node was gone already, or the request ended.
            answered(MoveEnded(flight.key, None, "a node was lost"))
            return source, node
        stop = partial(self._stop, active, key)
        timer = self._timers.call_at(now + MOVE_S, stop)
        self._under_way[key] = _UnderWay(source, node, timer, answered)
        self._num_leaving[source.incarnation] += 1
        return source, node

    def _stop(self, active: ActiveRequest, key: AttemptKey) -> None:
        self._requests.feed(active, StopMove(key, f"it had not moved after {MOVE_S:g} s"))

    def _ended(self, active: ActiveRequest, ended: MoveEnded) -> None:
        move = self._under_way.pop(ended.to, None)
        if move is None:
            return
        move.timer.cancel()
        self._num_leaving[move.source.incarnation] -= 1
        if not self._num_leaving[move.source.incarnation]:
            del self._num_leaving[move.source.incarnation]
        how = "moved" if ended.placement is not None else "stayed" if ended.why else "over"
        self.num_ended[how] += 1
        if how == "stayed":
            self._not_before[active.request.request_id] = self._timers.monotonic() + RETRY_S
        move.answered(ended)
        if self._queue:
            self._next_moves.request()


def _decodes_on(active: ActiveRequest, incarnations: frozenset[str]) -> bool:
    decoder = active.flight.decoder
    return decoder is not None and decoder.incarnation in incarnations
