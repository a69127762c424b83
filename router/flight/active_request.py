"""A request that a router serves: its flight, the queue of its client's events, and its timers; and adopted ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from baton.errors import BatonError, NoCapacity, Overloaded
from baton.messages.generation import Delivery, Finished, PromptLogprobs
from baton.messages.ids import tenant_of
from baton.messages.logprob_rows import LogprobLog
from baton.messages.node import StepReport
from baton.observe.tracing import Span
from baton.values import value
from router.admission.admission import LatencyTargets, Ticket
from router.admission.ledger import Charge
from router.admission.logprob_budget import LogprobReservation
from router.admission.quotas import RequestQuota
from router.admission.request import ValidRequest
from router.admission.service_class import ServiceClass
from router.admission.turns import Turn
from router.flight.answer import Answer
from router.flight.event_queue import EventQueue
from router.flight.flight import Flight
from router.flight.flight_attempt import AttemptTimings
from router.flight.flight_table import Finish, FlightEffect, Place
from router.flight.timeline import EndedRequest, Moments
from router.timers import TimerHandle


@value(frozen=True, slots=True)
class ClientCall:
    """One call of a client for a request, the first one or one that continues its stream."""

    started: float
    """When it arrived, in seconds on the router's clock."""
    timeout_s: float | None = None
    """Counts from then."""
    traceparent: str = ""
    """The W3C traceparent of the caller."""
    takeover: int = 0
    """The number of the call, with which the router claims the request's attempts on nodes."""
    delivery: Delivery = "stream"
    """The delivery that GenerateRequest asks for."""
    service_class: ServiceClass = ServiceClass.NORMAL
    weight: float = 1.0
    """How much of the service its tenant gets beside others that wait."""


class ActiveRequest:
    """The router's state of one request while its client is served."""

    # CPython 3.11 shares the keys of instances with at most 30 attributes. With more, each would have its own dict, in
    # which every token's relay would look.
    __slots__ = (
        "admitted_at",
        "adopting_node",
        "answer",
        "cached_on",
        "charge",
        "counts_as_placed",
        "deadline_at",
        "deadline_timer",
        "delivery",
        "finish",
        "first_token_at",
        "first_token_timings",
        "flight",
        "has_record",
        "is_adopted",
        "last_tokens_at",
        "logprobs",
        "may_reserve_more",
        "num_adopted_tokens",
        "num_replayed",
        "num_row_bytes",
        "placed_at",
        "placed_last_at",
        "prompt_logprobs",
        "queue",
        "quota",
        "request",
        "reservation",
        "service_class",
        "span",
        "stall_timer",
        "start_flight",
        "started",
        "tenant",
        "ticket",
        "traceparent",
        "turn",
        "wait_timer",
        "waiting_since",
        "wanted",
        "weight",
        "why_waiting",
    )

    def __init__(
        self,
        request: ValidRequest,
        flight_id: int,
        answer: Answer,
        queue: EventQueue,
        call: ClientCall,
        reservation: LogprobReservation,
        *,
        may_cross: bool = False,
    ) -> None:
        """`reservation`: the memory of its log-probabilities. `may_cross`: see `Flight`."""
        started, delivery = call.started, call.delivery
        self.request = request
        self.tenant = tenant_of(request.request_id)
        """The tenant whose request it is; empty where there are no tenants."""
        self.flight = Flight(request, flight_id, call.takeover, may_cross=may_cross)
        self.answer = answer
        self.queue = queue
        self.started = started
        """When the request arrived."""
        self.admitted_at = started
        """When the request had passed every check; this and all other moments: seconds on the router's clock."""
        self.first_token_at: float | None = None
        self.placed_at: float | None = None
        """When nodes were found for the first attempt."""
        self.counts_as_placed = False
        """Whether it counts as one of those that are on nodes, or are still read."""
        self.cached_on: Mapping[str, int] = {}
        """How many tokens of its prompt are expected to be cached on the nodes of its last attempt."""
        self.charge: Charge | None = None
        """What its tenant was charged for it; None: it has no nodes yet, or has ended."""
        self.turn: Turn | None = None
        """Its turn on them; None: it has no nodes yet, or has ended."""
        self.placed_last_at: float | None = None
        """When nodes were found for the running attempt."""
        self.span: Span | None = None
        """None: the request is not traced."""
        self.traceparent = call.traceparent
        """The W3C traceparent of its own span, or of its caller's: the parent of all further spans of the request."""
        self.last_tokens_at = [0.0] * request.sampling_params.n
        """For each sequence, when tokens of it came last; 0: none have come."""
        self.first_token_timings: tuple[float | None, AttemptTimings] = (None, AttemptTimings())
        """When the attempt that brought the first token was placed, and its nodes' timings at that token."""
        self.wanted: Place | None = None
        """The attempt for which the request waits for nodes; None: it does not wait."""
        self.ticket: Ticket[ActiveRequest] | None = None
        """Its place in the queue while it waits."""
        self.why_waiting: Overloaded = NoCapacity("no node is up")
        self.waiting_since = 0.0
        self.deadline_at: float | None = None
        self.deadline_timer: TimerHandle | None = None
        self.wait_timer: TimerHandle | None = None
        """Ends the request when it has waited for nodes for too long."""
        self.stall_timer: TimerHandle | None = None
        """Ends the request if its client reads too slowly for too long."""
        self.start_flight: Callable[[], Sequence[FlightEffect]] | None = self.flight.start
        """Returns the flight's first effects; None once it was called."""
        self.reservation = reservation
        self.may_reserve_more = self.reservation.bytes_each > 0
        """Whether its log-probabilities may need more memory. It is asked with each token."""
        self.delivery = delivery
        self.service_class = call.service_class
        self.weight = call.weight
        self.num_row_bytes = request.num_row_bytes
        """How many bytes of rows and images count for it among those of all requests."""
        self.logprobs: list[LogprobLog] = []
        """The latest log-probabilities of each sequence, kept for a client that comes back; empty if none are wanted,
        or nobody comes back."""
        if request.sampling_params.logprobs is not None and delivery == "stream":
            self.logprobs = [LogprobLog() for _ in range(request.sampling_params.n)]
        self.num_replayed = 0
        """So many tokens had come, of all sequences together, when the client came back last."""
        self.prompt_logprobs: PromptLogprobs | None = None
        """Kept for a client that comes back; None if none are wanted, or as long as they have not come."""
        self.finish: tuple[Finish, Finished] | None = None
        """How the request ended, if it ended well."""
        self.has_record = False
        """Whether the journal has a record of it, with which another router could continue it."""
        self.adopting_node = ""
        """The incarnation that may still replay what it computed for another router; empty: none."""
        self.is_adopted = False
        """Whether its first attempt here was begun by another router."""
        self.num_adopted_tokens = 0
        """So many tokens, of all sequences together, its client had when this router adopted it."""
        self.quota: RequestQuota | None = None
        """What the client's stream has taken of quotas; None: it has none."""

    def tokens_computed(self) -> tuple[int, int]:
        """Tokens of the prompt that were not in a cache, as far as that is known, and those that were generated.

        Without what was computed for another router.
        """
        num_new = max(0, self.flight.num_output_tokens - self.num_adopted_tokens)
        num_output = self._with_beams(num_new)
        if self.is_adopted:
            return 0, num_output
        cached = 0 if self.finish is None else self.finish[0].timings.cached_tokens
        return max(0, self.request.num_prompt_tokens - cached), num_output

    def tokens_used(self) -> int:
        """Tokens that count in quotas: the whole prompt, once nodes were found for it, and what was generated.

        With what was computed for another router, which the quota of a stream that goes on here counts as paid.
        """
        num_output = self._with_beams(self.flight.num_output_tokens)
        return 0 if self.placed_at is None else self.request.num_prompt_tokens + num_output

    def _with_beams(self, num_tokens: int) -> int:
        """How many tokens nodes compute for so many of the client."""
        return num_tokens * self.num_computed // self.request.sampling_params.n

    @property
    def num_computed(self) -> int:
        """The number of sequences that nodes compute for it: beams, too, of which the client gets some."""
        return self.request.num_computed

    def targets(self) -> LatencyTargets:
        """The latency targets of the request, by which a queue says early that they can't be met."""
        slo_ms, each_ms, params = self.request.ttft_slo_ms, self.request.tpot_slo_ms, self.request.sampling_params
        may_stop = not params.ignore_eos or params.stop_token_ids or self.request.stop
        return LatencyTargets(
            deadline=self.deadline_at,
            first_token_by=None if slo_ms is None else self.started + slo_ms / 1e3,
            least_tokens=max(1, params.min_tokens) if may_stop else params.max_tokens,
            token_s=None if each_ms is None or self.request.embeds or params.max_tokens < 2 else each_ms / 1e3,
        )

    def finished(self, finish: Finish, now: float) -> Finished:
        """The last event of a request that ended well, with the times that its client is told."""
        first = now if self.first_token_at is None else self.first_token_at
        timings = finish.timings
        return Finished(
            finish_reason=self.answer.finish_reason,
            stop_reason=self.answer.stop_reason,
            prompt_tokens=self.request.num_prompt_tokens,
            completion_tokens=self.answer.num_tokens,
            cached_tokens=timings.cached_tokens,
            queue_ms=timings.queue_ms + ((self.placed_at or self.started) - self.started) * 1e3,
            prefill_ms=timings.prefill_ms,
            transfer_ms=timings.transfer_ms,
            ttft_ms=(first - self.started) * 1e3,
            total_ms=(now - self.started) * 1e3,
            kv_bytes=timings.kv_bytes,
            path=finish.path,
            embedding=finish.embedding,
            draft_counts=self.flight.draft_counts,
            bit_exact=finish.bit_exact,
        )

    def note_first_token(self, now: float) -> None:
        """Note when the first token (or the embedding) came."""
        if self.first_token_at is None:
            self.first_token_at = now
            self.first_token_timings = (self.placed_last_at, self.flight.attempt_timings())

    def ended_request(self, ended_at: float, error: BatonError | None) -> EndedRequest:
        """The facts about this request that are kept when it has ended, with this error or well."""
        placed_for_first, at_first_token = self.first_token_timings
        moments = Moments(
            received=self.started,
            admitted=self.admitted_at,
            placed=self.placed_at,
            placed_last=self.placed_last_at,
            placed_for_first=placed_for_first,
            first_token=self.first_token_at,
        )
        return EndedRequest(
            request_id=self.request.request_id,
            moments=moments,
            ended_at=ended_at,
            state=self.flight.state.value,
            detail=self.answer.finish_reason if error is None else str(error),
            attempts=self.flight.key.attempt,
            is_adopted=self.is_adopted,
            at_first_token=at_first_token,
            at_end=self.flight.attempt_timings(),
            prompt_tokens=self.request.num_prompt_tokens,
            completion_tokens=self.answer.num_tokens,
            draft_counts=self.flight.draft_counts,
            trace_id=self.span.trace_id if self.span is not None else "",
            bit_exact=self.flight.bit_exact,
        )

    def cancel_timers(self) -> None:
        """Cancel all timers of the request. Idempotent."""
        for timer in (self.deadline_timer, self.wait_timer, self.stall_timer):
            if timer is not None:
                timer.cancel()


class Adoptions:
    """The adopted requests whose nodes may still replay what they have of them."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[str, ActiveRequest]] = {}
        """By incarnation and request id."""

    def __bool__(self) -> bool:
        return bool(self._by_node)

    def add(self, active: ActiveRequest, incarnation: str) -> None:
        """The request is adopted from this node, which decodes it."""
        active.adopting_node = incarnation
        self._by_node.setdefault(incarnation, {})[active.request.request_id] = active

    def remove(self, active: ActiveRequest) -> None:
        """The node has replayed all, or the request has ended. Idempotent."""
        on_node = self._by_node.get(active.adopting_node, {})
        if on_node.get(active.request.request_id) is active:
            del on_node[active.request.request_id]
            if not on_node:
                del self._by_node[active.adopting_node]

    def concerned(self, incarnation: str, report: StepReport) -> tuple[Sequence[ActiveRequest], bool]:
        """The adopted requests about which a node's report says something, and whether it replays just these.

        A node replays an adopted request in reports that concern that request alone, before its other reports. So a
        report about adopted requests says something of those alone, and any other report that the node has replayed all
        that it had; otherwise each of a thousand requests of a dead router would be checked a thousand times.
        """
        on_node = self._by_node.get(incarnation)
        if on_node is None:
            return (), False
        replayed = [active for delta in report.deltas if (active := on_node.get(delta.attempt.request_id)) is not None]
        return replayed or list(on_node.values()), bool(replayed)
