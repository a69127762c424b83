"""Where requests are that have no nodes: finds some for them, in their order, or says why they must wait or go.

Who waits in which order is `admission`'s, where requests go `placer`'s; here is what happens between the two, and time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from baton.errors import BatonError, InvalidRequest, NoCapacity, Overloaded, QueueFull, WouldBeLate
from router.admission import AdmissionQueue, Hope, Ticket
from router.flight_table import Place
from router.limits import DispatchLimits
from router.placement import Candidate
from router.placer import Choice, Placer
from router.run import Run
from router.timers import Timers
from router.view import ClusterView


class WaitingRoom:
    """The requests of one router that wait for nodes, and how many have some."""

    def __init__(
        self,
        view: ClusterView,
        placer: Placer,
        timers: Timers,
        rng: Random,
        limits: DispatchLimits,
        place: Callable[[Run, Place], None],
        give_up: Callable[[Run, BatonError], None],
    ) -> None:
        """`place` is called for whoever is to try again, `give_up` for whoever has waited too long or must give way."""
        self._view = view
        self._placer = placer
        self._timers = timers
        self._limits = limits
        self._place = place
        self._give_up = give_up
        self._queue: AdmissionQueue[Run] = AdmissionQueue(limits.max_queue, limits.priority_ageing_s, rng)
        self.num_placed = 0
        """Requests that are on nodes, or whose client still reads what came from them."""

    def __len__(self) -> int:
        return len(self._queue)

    def check_room(self, priority: int) -> None:
        """Raises QueueFull if a newcomer of this priority could not even wait."""
        if self._queue:
            self._queue.check_room(priority, self.num_placed)

    def find_nodes(self, run: Run, place: Place) -> Choice | None:
        """Nodes for an attempt. None: it waits now.

        Raises InvalidRequest when no node is large enough, WouldBeLate when its time is too short, QueueFull.
        """
        ticket = run.ticket or self._new_ticket(run, place)
        try:
            choice = self._nodes_for(ticket, place)
        except (InvalidRequest, WouldBeLate):
            raise
        except Overloaded as error:
            self._wait(ticket, error)
            return None
        self.leave(run)
        return choice

    def placed(self, run: Run, at: float) -> None:
        """It has nodes, for the first time."""
        run.placed_at = at
        self.num_placed += 1

    def gone(self, run: Run) -> None:
        """Its client is served, or went away."""
        self.leave(run)
        self.num_placed -= run.placed_at is not None

    def ended(self, run: Run, first_token_at: float) -> None:
        """It ended well, now: what it took says what others will take."""
        if run.placed_at is not None:
            service_s = self._timers.monotonic() - run.placed_at
            self._queue.times.ended(first_token_at - run.placed_at, service_s, run.flight.num_output_tokens)

    def leave(self, run: Run) -> None:
        """It does not wait any more. Idempotent."""
        if run.ticket is not None:
            self._queue.leave(run.ticket)
            run.ticket = None
        if run.patience is not None:
            run.patience.cancel()
            run.patience = None

    def serve(self) -> None:
        """There may be room: let whoever can be placed be, in their order."""
        while (ticket := self._queue.first()) is not None:
            run = ticket.item
            if run.wanted is not None:
                self._place(run, run.wanted)
            if self._queue.first() is ticket:
                break

    def _nodes_for(self, ticket: Ticket[Run], place: Place) -> Choice:
        """Raises Overloaded, too, when there is no node or all are full."""
        run, candidates = ticket.item, self._view.candidates()
        if ticket.is_retry:
            # Its client is in mid-stream: whatever a node has to do, this comes first.
            return self._choose(candidates, run, place)
        if (first := self._queue.first()) is not None and not self._queue.is_next(ticket):
            raise _again(first.item.why_waiting)
        if self.num_placed >= self._limits.max_running:
            raise Overloaded(f"{self._limits.max_running} requests run, as many as may")
        try:
            choice = self._choose(_with_room(candidates), run, place)
        except (InvalidRequest, NoCapacity):
            choice = self._choose(candidates, run, place)
        placement = choice.placement
        chosen = {node.incarnation for node in (placement.prefill, placement.decode) if node is not None}
        if any(candidate.is_full for candidate in candidates if candidate.node.incarnation in chosen):
            raise Overloaded("every node is full")
        self._check_in_time(ticket.hope, choice)
        return choice

    def _check_in_time(self, hope: Hope, choice: Choice) -> None:
        terms = choice.found.terms if choice.found is not None else None
        # An idle node is always worth a try: else one bad measurement would refuse what could correct it.
        if terms is not None and terms.queue_ms > 0.0:
            first_s, each_s = terms.first_token_ms / 1e3, terms.token_ms / 1e3
            self._queue.check_in_time(hope, self._timers.monotonic(), first_s, each_s, self.num_placed)

    def _choose(self, candidates: Sequence[Candidate], run: Run, place: Place) -> Choice:
        now = self._timers.monotonic()
        return self._placer.choose(candidates, run.request, place.exclude, place.attempt, now - run.started, now)

    def _new_ticket(self, run: Run, place: Place) -> Ticket[Run]:
        is_retry = place.attempt > 1
        return self._queue.ticket(run, run.started, run.request.priority, run.hope(), is_retry=is_retry)

    def _wait(self, ticket: Ticket[Run], why: Overloaded) -> None:
        """Raises QueueFull or WouldBeLate when it can't."""
        run, now = ticket.item, self._timers.monotonic()
        run.why_waiting = why
        if run.ticket is not None:
            return
        displaced = self._queue.offer(ticket, now, self.num_placed)
        run.ticket, run.waiting_since = ticket, now
        self._await_patience(run)
        if displaced is not None:
            story = "the queue is full, and a more urgent request came"
            self._give_up(displaced.item, QueueFull(story, self._queue.retry_after_s(self.num_placed)))

    def _await_patience(self, run: Run) -> None:
        """Give it up when it has waited long enough for what it waits for by then."""
        limits = self._limits
        if run.ticket is not None and run.ticket.is_retry:
            patience_s = limits.recovery_wait_s
        else:
            patience_s = limits.capacity_wait_s if isinstance(run.why_waiting, NoCapacity) else limits.queue_wait_s
        until = run.waiting_since + patience_s
        if (slo := run.request.ttft_slo_ms) is not None and run.first_token_at is None:
            until = min(until, run.started + slo / 1e3)
        if self._timers.monotonic() < until:
            run.patience = self._timers.call_at(until, lambda: self._await_patience(run))
            return
        self._give_up(run, _again(run.why_waiting, self._queue.retry_after_s(self.num_placed)))


def _again(why: Overloaded, retry_after_s: float = 1.0) -> Overloaded:
    return type(why)(str(why), retry_after_s)


def _with_room(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Of each role those that are not full; all of them where none has room."""
    open_ones = [candidate for candidate in candidates if not candidate.is_full]
    if len(open_ones) == len(candidates):
        return candidates
    open_roles = {candidate.node.role for candidate in open_ones}
    return [*open_ones, *(candidate for candidate in candidates if candidate.node.role not in open_roles)]
