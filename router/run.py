"""A flight with everything impure around it: its client's queue, its timers, what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.outputs import TokenLogprobs
from baton.errors import NoCapacity, Overloaded
from baton.rpc.messages import Finished
from router.admission import Hope, Ticket
from router.answer import Answer
from router.event_queue import EventQueue
from router.flight import Flight
from router.flight_table import Finish, FlightEffect, Place
from router.request import ValidRequest
from router.timers import TimerHandle


class Run:
    """What the dispatcher keeps of a request while its client is served."""

    def __init__(
        self, request: ValidRequest, flight_id: int, answer: Answer, queue: EventQueue, started: float
    ) -> None:
        """`started`: when the request came, in seconds on the router's clock."""
        self.request = request
        self.flight = Flight(request, flight_id)
        self.answer = answer
        self.queue = queue
        self.started = started
        self.first_token_at: float | None = None
        self.placed_at: float | None = None
        """When nodes were found for the first time."""
        self.wanted: Place | None = None
        """Waits for nodes."""
        self.ticket: Ticket[Run] | None = None
        """Its place in the queue while it does."""
        self.why_waiting: Overloaded = NoCapacity("no node is up")
        self.waiting_since = 0.0
        self.deadline_at: float | None = None
        self.deadline: TimerHandle | None = None
        self.patience: TimerHandle | None = None
        self.stall: TimerHandle | None = None
        self.begin: Callable[[], Sequence[FlightEffect]] | None = self.flight.start
        """What is to be done first; None once it is."""
        self.logprobs: list[list[TokenLogprobs]] = []
        """Of each sequence, where there are any: for a client that comes back."""
        if request.sampling_params.logprobs is not None:
            self.logprobs = [[] for _ in range(request.sampling_params.n)]
        self.finish: tuple[Finish, Finished] | None = None
        """How it ended, if it ended well."""
        self.is_noted = False
        """There is a record of it."""

    def hope(self) -> Hope:
        """What it must be in time for."""
        slo_ms, params = self.request.ttft_slo_ms, self.request.sampling_params
        may_stop = not params.ignore_eos or params.stop_token_ids or self.request.stop
        return Hope(
            deadline=self.deadline_at,
            first_token_by=None if slo_ms is None else self.started + slo_ms / 1e3,
            least_tokens=max(1, params.min_tokens) if may_stop else params.max_tokens,
        )

    def cancel_timers(self) -> None:
        """Nothing of it fires any more."""
        for timer in (self.deadline, self.patience, self.stall):
            if timer is not None:
                timer.cancel()
