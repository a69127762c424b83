"""A request that a router serves: its flight, its client's queue, and its timers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.errors import BatonError, NoCapacity, Overloaded
from baton.messages.generation import Finished
from baton.messages.sampling import TokenLogprobs
from baton.observe.tracing import Span
from router.admission.admission import LatencyTargets, Ticket
from router.admission.request import ValidRequest
from router.flight.answer import Answer
from router.flight.event_queue import EventQueue
from router.flight.flight import Flight
from router.flight.flight_leg import Measured
from router.flight.flight_table import Finish, FlightEffect, Place
from router.flight.timeline import Moments, Traced
from router.timers import TimerHandle


class ActiveRequest:
    """The router's state of one request while its client is served."""

    def __init__(
        self,
        request: ValidRequest,
        flight_id: int,
        answer: Answer,
        queue: EventQueue,
        started: float,
        takeover: int = 0,
    ) -> None:
        """`started`: when the request arrived, in seconds on the router's clock. `takeover`: the number of the client's
        call, with which the router claims the request's attempts on nodes.
        """
        self.request = request
        self.flight = Flight(request, flight_id, takeover)
        self.answer = answer
        self.queue = queue
        self.started = started
        self.admitted_at = started
        """When it had passed every check."""
        self.first_token_at: float | None = None
        self.placed_at: float | None = None
        """When nodes were found for the first time..."""
        self.placed_last_at: float | None = None
        """... and for the attempt that runs."""
        self.span: Span | None = None
        """None: it is not traced."""
        self.traceparent = ""
        """Whose children spans of it are, at whatever router: those of its own span, or of its caller's."""
        self.told_at = [0.0] * request.sampling_params.n
        """When tokens of each sequence came last; 0: none have."""
        self.first: tuple[float | None, Measured] = (None, Measured())
        """When the attempt that brought the first token had its nodes, and what those had said by then."""
        self.wanted: Place | None = None
        """Waits for nodes."""
        self.ticket: Ticket[ActiveRequest] | None = None
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
        self.settles_at = ""
        """The node that has yet to tell what it brought for another router; empty: none."""
        self.is_adopted = False
        """Another router began its first attempt here."""

    def targets(self) -> LatencyTargets:
        """What it must be in time for."""
        slo_ms, each_ms, params = self.request.ttft_slo_ms, self.request.tpot_slo_ms, self.request.sampling_params
        may_stop = not params.ignore_eos or params.stop_token_ids or self.request.stop
        return LatencyTargets(
            deadline=self.deadline_at,
            first_token_by=None if slo_ms is None else self.started + slo_ms / 1e3,
            least_tokens=max(1, params.min_tokens) if may_stop else params.max_tokens,
            token_s=None if each_ms is None or self.request.embeds or params.max_tokens < 2 else each_ms / 1e3,
        )

    def traced(self, ended: float, error: BatonError | None) -> Traced:
        """What is kept of it when it is over."""
        placed_for_first, first = self.first
        moments = Moments(
            received=self.started,
            admitted=self.admitted_at,
            placed=self.placed_at,
            placed_last=self.placed_last_at,
            placed_for_first=placed_for_first,
            first_token=self.first_token_at,
        )
        return Traced(
            request_id=self.request.request_id,
            moments=moments,
            ended=ended,
            state=self.flight.state.value,
            detail=self.answer.finish_reason if error is None else str(error),
            attempts=self.flight.key.attempt,
            is_adopted=self.is_adopted,
            first=first,
            last=self.flight.measured(),
            prompt_tokens=self.request.num_prompt_tokens,
            completion_tokens=self.answer.num_tokens,
            trace_id=self.span.trace_id if self.span is not None else "",
        )

    def cancel_timers(self) -> None:
        """Nothing of it fires any more."""
        for timer in (self.deadline, self.patience, self.stall):
            if timer is not None:
                timer.cancel()
