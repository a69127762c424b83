"""The live requests of a router: gives each flight its events, and carries out the effects that the flight returns.

Nothing in this module waits, and one event loop or one simulation calls all of it. Therefore no other code runs between
a flight's decision and its consequences. (One class, and more than 500 lines, since whatever comes from clients, nodes
and timers meets here: what can decide alone is in the modules around it.) `router.dispatcher` puts clients' streams in
front of it, and `baton.bench.simulator` runs it in virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from cachetools import FIFOCache

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    QueueFull,
    RequestNotFound,
)
from baton.messages.generation import Finished, PromptLogprobs
from baton.messages.ids import AttemptKey, unscoped
from baton.messages.node import NodeDescription, RequestDelta, StepReport, WatchKVCache
from baton.messages.operator import QueuePlace, TenantRows
from baton.observe.logs import of_attempt
from router.admission.admission import Ticket
from router.admission.exchange import LedgerExchange
from router.admission.limits import DispatchLimits
from router.admission.logprob_budget import LogprobBudget
from router.admission.request import ValidRequest
from router.admission.service_class import ServiceClass
from router.admission.tenant_figures import TenantFigures
from router.attainment import Attainment, Kept, kept_by
from router.counters import DispatchCounters
from router.flight.active_request import ActiveRequest, Adoptions, ClientCall
from router.flight.answer import Answer
from router.flight.event_queue import EventQueue
from router.flight.flight_record import FlightJournal, FlightRecord
from router.flight.flight_table import (
    AbortLeg,
    AdoptLeg,
    AttemptCause,
    Cancel,
    Delta,
    EmitPromptLogprobs,
    EmitTokens,
    Fail,
    Finish,
    FlightEffect,
    FlightEvent,
    GiveUp,
    LegEnded,
    MovedAway,
    MoveEnded,
    MoveStream,
    NodeGone,
    Place,
    Placed,
    SequenceEnded,
    SubmitLeg,
)
from router.flight.timeline import RequestSpans, TimelineLog
from router.leg_messages import LegMessages, NodeSender
from router.listeners import Listeners
from router.losses import NodeLosses
from router.output_relay import OutputRelay
from router.placement.placement import Origin, Placement
from router.placement.placer import PlacementSettings, Placer, Policy
from router.placement.view import ClusterView
from router.timers import NextTurn, Timers
from router.waiting_room import Wait, WaitingRoom

_log = logging.getLogger(__name__)

PLACED_PER_TURN = 32
"""Waiting requests that are placed in one turn of the event loop: thousands may wait when nodes come back."""
_MOST_BEGUN = 4096
"""Streams without a prompt whose origins are remembered until their clients send them again."""


def _log_fields(active: ActiveRequest, **more: str | float) -> dict[str, str | float]:
    """The fields of a log line about a request."""
    return {**of_attempt(active.flight.key), **more}


class LiveRequests:
    """Keeps the live requests of one router, and is the listener of its links."""

    def __init__(
        self,
        view: ClusterView,
        nodes: NodeSender,
        timers: Timers,
        rng: Random,
        limits: DispatchLimits | None = None,
        journal: FlightJournal | None = None,
        placer: Placer | None = None,
        spans: RequestSpans | None = None,
    ) -> None:
        """Without a journal no other router can continue a flight of this one. Without a placer the least loaded nodes
        are chosen, without `spans` nothing is traced.
        """
        self._journal = journal
        self._spans = spans
        self.placer = placer or Placer(PlacementSettings(Policy.LEAST_LOADED))
        self._view = view
        self._nodes = nodes
        self._timers = timers
        self._rng = rng
        self._limits = limits = limits or DispatchLimits()
        self._waiting = WaitingRoom(view, self.placer, timers, rng, limits)
        self._has_new_room = False
        """Whether a node has less to do than when the queue was served last."""
        self._active: dict[str, ActiveRequest] = {}
        self._unread: set[ActiveRequest] = set()
        """Requests of which nothing is to do but that their clients read the whole answer."""
        self._num_row_bytes = 0
        """Bytes of the rows and images that their prompts have in place of tokens."""
        self.logprob_budget = LogprobBudget(limits.logprob_memory, rng)
        self._adoptions = Adoptions()
        self._legs = LegMessages(view, nodes)
        self._begun: FIFOCache[str, Origin] = FIFOCache(_MOST_BEGUN)
        """Where streams began that were ended because no process had their prompt, by request id: their clients send
        the same request again at once."""
        self._losses = NodeLosses(self._active, timers)
        self._next_losses = NextTurn(timers, self._tell_losses, "lost-nodes")
        self._next_placements = NextTurn(timers, self._serve_queue, "request-queue")
        """Places further waiting requests if there was no time for all of them."""
        self.idle = asyncio.Event()
        """Set while no request is live, and no whole answer is unread."""
        self.idle.set()
        self.counters = DispatchCounters()
        self.attainment = Attainment()
        self.relay = OutputRelay(limits, self.counters, self.logprob_budget)
        self.timelines = TimelineLog()
        self.on_retry: Listeners[str, int, str] = Listeners()
        """Called when a request gets another attempt, with the request's id, the attempt's number and its cause."""
        self.on_admitted: Listeners[ActiveRequest] = Listeners()
        """Called when a request was admitted."""
        self.on_ended: Listeners[ActiveRequest, Kept | None] = Listeners()
        """Called when a request has ended that its client did not cancel, with the targets that it kept; None: it had
        none."""
        self.on_node: Listeners[str] = Listeners()
        """Called when a node is attached, with its incarnation."""
        self.on_adapters: Listeners[str] = Listeners()
        """Called when a node has said which adapters it acknowledges, with its incarnation."""
        self.on_move_ended: Listeners[ActiveRequest, MoveEnded] = Listeners()
        """Called when a stream has moved to another node, or stays where it is."""
        self.changed = asyncio.Event()
        """Set when nodes came, went or began to drain; its one reader clears it."""

    @property
    def num_live(self) -> int:
        """Number of requests that were admitted and have not ended, or whose client still reads."""
        return len(self._active) + len(self._unread)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for nodes."""
        return len(self._waiting)

    @property
    def num_placed(self) -> int:
        """Number of requests that are on nodes, or whose client still reads their output."""
        return self._waiting.num_placed

    @property
    def tenants(self) -> TenantFigures:
        """What was done for each tenant."""
        return self._waiting.tenants

    @property
    def exchange(self) -> LedgerExchange:
        """What tenants were charged, for other routers and by them."""
        return self._waiting.exchange

    def queue_place(self, request_id: str) -> QueuePlace | None:
        """Where this request waits; None: it does not."""
        active = self._active.get(request_id)
        return None if active is None else self._waiting.queue_place(active)

    def tenant_rows(self, limit: int) -> TenantRows:
        """What was done for each tenant, at most `limit` of them; 0: all."""
        running, waiting = Counter[str](), Counter[str]()
        for active in self._active.values():
            (running if active.wanted is None else waiting)[active.tenant] += 1
        return self.tenants.rows(running, waiting, self._timers.monotonic(), limit)

    @property
    def num_live_tokens(self) -> int:
        """Number of tokens that clients of live requests were given so far."""
        return sum(active.flight.num_output_tokens for active in self._active.values())

    def adapters_in_use(self) -> set[str]:
        """The digests of the adapters of all live requests."""
        return {active.request.adapter for active in self._active.values() if active.request.adapter}

    def active_requests(self) -> Iterator[ActiveRequest]:
        """The live requests, the latest first; not to be changed."""
        return reversed(self._active.values())

    def find(self, request_id: str) -> ActiveRequest | None:
        """The live request with this id, if there is one."""
        return self._active.get(request_id)

    # --- requests come and go ---

    def check_room(
        self, priority: int, tenant: str, service_class: ServiceClass, weight: float, *, embeds: bool
    ) -> None:
        """Raises QueueFull if a new request of this priority could not even wait for nodes."""
        try:
            self._waiting.check_room(priority, tenant, service_class, weight, embeds=embeds)
        except QueueFull:
            self.tenants.refused(tenant)
            raise

    def open(self, request: ValidRequest, answer: Answer, queue: EventQueue, call: ClientCall) -> ActiveRequest:
        """Take in a request, which `start` begins and `close` ends.

        `queue` receives its events. Raises DuplicateRequest for an id that is live, DeadlineExceeded if the timeout has
        passed already, QueueFull if live requests have too many bytes of given rows or images, and what
        `LogprobBudget.reserve` raises.
        """
        if request.request_id in self._active:
            raise DuplicateRequest(f"request {unscoped(request.request_id)!r} is live")
        num_row_bytes = self._num_row_bytes + request.num_row_bytes
        if request.num_row_bytes and num_row_bytes > self._limits.held_row_bytes:
            raise QueueFull(
                "live requests have too many bytes of images or prompt_embeds", self._rng.uniform(0.75, 1.25)
            )
        reservation = self.logprob_budget.reserve(request, call.delivery)
        flight_id, may_cross = self._rng.getrandbits(64), self.placer.may_cross
        active = ActiveRequest(request, flight_id, answer, queue, call, reservation, may_cross=may_cross)
        active.admitted_at = self._timers.monotonic()
        begun = self._begun.pop(request.request_id, None)
        if begun is not None and call.takeover > 1:
            active.start_flight = partial(active.flight.start, 0, begun)
        try:
            self.set_deadline(active, call)
            if self._spans is not None:
                active.span = self._spans.begin(request, call.traceparent, call.started)
        except BaseException:
            self.logprob_budget.release(reservation)
            raise
        if active.span is not None:
            active.traceparent = active.span.traceparent
        self._active[request.request_id] = active
        self._num_row_bytes = num_row_bytes
        self.idle.clear()
        self.counters.accepted += 1
        self.on_admitted(active)
        return active

    def start(self, active: ActiveRequest) -> None:
        """Start a request's flight. Idempotent."""
        begin, active.start_flight = active.start_flight, None
        if begin is not None:
            self._guarded(active, begin)

    def set_deadline(self, active: ActiveRequest, call: ClientCall) -> None:
        """Give a request the deadline of its client's call, or none.

        Raises DeadlineExceeded, and changes nothing, when it has passed.
        """
        if call.timeout_s is None:
            active.deadline_at = active.deadline_timer = None
            return
        error = DeadlineExceeded(f"the deadline of {call.timeout_s:.3f} s passed")
        until = call.started + call.timeout_s
        if self._timers.monotonic() >= until:
            raise error
        active.deadline_at = until
        active.deadline_timer = self._timers.call_at(until, partial(self.feed, active, GiveUp(error)))

    def adopt(
        self, active: ActiveRequest, record: FlightRecord, placement: Placement, origin: Origin | None
    ) -> Sequence[FlightEffect]:
        """Let a request continue on the nodes where another router placed it; returns its flight's first effects.

        `origin`: where its stream began, if its client has tokens.
        """
        self.counters.adopted += 1
        self.placer.adopted(active.request, record.key.attempt, placement, self._timers.monotonic())
        active.is_adopted = True
        self._waiting.placed(active, active.admitted_at)
        active.placed_last_at = active.placed_at
        if placement.prefill is not None:
            self._adoptions.add(active, placement.decode.incarnation)
        effects = active.flight.adopt(record.key, placement, record.num_given, origin)
        # The next router that adopts it needs a larger number, and only this router may delete its record.
        self._write_record(active, placement)
        return effects

    def abandon(self, active: ActiveRequest, reason: str) -> None:
        """End a request that its client sends again at once, and forget it before its stream is closed."""
        self.feed(active, Cancel(reason))
        self._forget(active)

    def all_taken(self, active: ActiveRequest) -> None:
        """Note that a request has ended well, and that its reader has taken its last event: others get its place.

        The reader may keep the answer until its client has read it. So the memory that the answer takes stays reserved
        until `close`. An answer to which nobody comes back is forgotten: its id may be used again.
        """
        self._waiting.end(active)
        if active.delivery != "stream":
            self._unread.add(active)
            self._forget(active)
        if self._waiting:
            self._serve_queue()

    def close(self, active: ActiveRequest) -> None:
        """End a request whose client has everything or is gone, with its flight if that is live, and forget it."""
        if not active.flight.is_over:
            self.feed(active, Cancel("the client went away"))
        active.cancel_timers()
        self._adoptions.remove(active)
        self._waiting.end(active)
        self._unread.discard(active)
        self._forget(active)
        self._num_row_bytes -= active.num_row_bytes
        active.num_row_bytes = 0
        self.logprob_budget.release(active.reservation)
        if self._waiting:
            self._serve_queue()

    def _write_record(self, active: ActiveRequest, placement: Placement) -> None:
        """Write the record with which another router can continue the running attempt.

        Where log-probabilities of the prompt are wanted there is none: the client sends the request again.
        """
        request = active.request
        if self._journal is not None and not request.embeds and request.sampling_params.prompt_logprobs is None:
            flight = active.flight
            self._journal.write(
                request,
                flight.key,
                placement,
                flight.num_given,
                active.traceparent,
                flight.takeover,
                flight.flight_id,
                flight.origin_with(placement),
            )
            active.has_record = True

    # --- reports of the links to nodes ---

    def on_attached(self, description: NodeDescription) -> None:
        """A stream to a node is open: waiting requests may be placed there."""
        incarnation = description.incarnation
        self._losses.resolve_flights()
        self._view.attached(description, self._timers.monotonic())
        if self.placer.on_attached(description):
            self._nodes.send(incarnation, WatchKVCache())
        self.on_node(incarnation)
        if self._legs.link_open(incarnation):
            self.counters.links_back += 1
            self._losses.link_back(incarnation)
            self._next_losses.request()
        self.changed.set()
        self._serve_queue()

    def on_report(self, incarnation: str, report: StepReport) -> None:
        """A node reports one engine step."""
        now = self._timers.monotonic()
        if report.step is not None or not report.load.running:
            self._view.step_reported(incarnation)
        if self.placer.on_report(incarnation, report, now):
            self._nodes.send(incarnation, WatchKVCache())
        for delta in report.deltas:
            active = self._active.get(delta.attempt.request_id)
            if active is None:
                self.counters.late_deltas += 1
            elif active.flight.take_if_next(incarnation, delta):
                self._relay_next(active, delta, now)
            else:
                self.feed(active, Delta(incarnation, delta))
        if self._adoptions:
            self._end_adoptions(incarnation, report)
        self._view.reported(incarnation, report.load)
        if report.adapters is not None:
            self._view.adapters_reported(incarnation, report.adapters)
            self.on_adapters(incarnation)
        if report.notice is not None:
            self._view.noticed(incarnation, report.notice)
        if report.load.draining:
            self.changed.set()
        if self._waiting and (report.adapters is not None or self._waiting.may_have_room(incarnation)):
            self._serve_queue()

    def _end_adoptions(self, incarnation: str, report: StepReport) -> None:
        """End adoptions on a node as far as its report shows that the node has replayed all that it had."""
        concerned, is_replay = self._adoptions.concerned(incarnation, report)
        for active in concerned:
            if not is_replay:
                self.counters.adoption_looks += 1
                self._guarded(active, partial(active.flight.end_adoption, incarnation))
            if not active.flight.is_adopting:
                self._adoptions.remove(active)

    def attempts_on(self, incarnation: str) -> Sequence[AttemptKey]:
        """The attempts on a node that this router wants to continue when its link is open again."""
        flights = (active.flight for active in self._losses.active_on(incarnation))
        return [key for flight in flights if not flight.is_over for key in flight.keys_on(incarnation)]

    def on_cut(self, incarnation: str, reason: str) -> None:
        """The link to a node is cut: nothing is placed on it, and its flights wait until it is open again or lost."""
        now = self._timers.monotonic()
        _log.info("the link to a node is cut", extra={"node": incarnation, "error": reason})
        self._legs.link_cut(incarnation)
        self._view.detached(incarnation, reason, now)
        self._losses.link_cut(incarnation, now)
        self.changed.set()

    def on_lost(self, incarnation: str, reason: str) -> None:
        """A node is gone: nothing is placed on it from now on, and its flights get the event soon."""
        now = self._timers.monotonic()
        self._legs.node_lost(incarnation)
        self._view.detached(incarnation, reason, now)
        self.placer.on_lost(incarnation, now)
        self._losses.node_lost(incarnation, reason, now)
        self._next_losses.request()
        self.changed.set()

    def _tell_losses(self) -> None:
        for active, event in self._losses.events():
            self.feed(active, event)
        if self._losses.has_events:
            self._next_losses.request()

    def _forget(self, active: ActiveRequest) -> None:
        """Remove the request from the live ones; what is kept for it stays reserved until `close`. Idempotent."""
        if self._active.get(active.request.request_id) is active:
            del self._active[active.request.request_id]
        if not self.num_live:
            self.idle.set()

    # --- events for flights, and their effects ---

    def feed(self, active: ActiveRequest, event: FlightEvent) -> None:
        """Give a flight an event, and carry out its effects."""
        self._guarded(active, partial(active.flight.handle, event))
        if self._has_new_room and self._waiting:
            self._serve_queue()

    def _serve_queue(self) -> None:
        """Try to place waiting requests in their order, PLACED_PER_TURN of them at most in this turn."""
        self._has_new_room = False
        if self._next_placements.is_due:
            return
        tried: set[Ticket[ActiveRequest]] = set()
        while (ticket := self._waiting.next_to_place(tried)) is not None:
            if len(tried) >= PLACED_PER_TURN:
                self._next_placements.request()
                return
            tried.add(ticket)
            active = ticket.item
            if active.wanted is not None:
                self._guarded(active, partial(self._place, active, active.wanted))

    def _guarded(self, active: ActiveRequest, decide: Callable[[], Sequence[FlightEffect]]) -> None:
        """Let a flight decide, and carry out its effects. If that raises, this flight ends, and no other one."""
        try:
            self._perform(active, decide())
        except Exception as fault:
            self._fault(active, fault)

    def _fault(self, active: ActiveRequest, fault: Exception) -> None:
        _log.exception(
            "handling a request raised; it is ended",
            extra=_log_fields(active, history=active.flight.history),
        )
        error = BatonError(f"the router failed while it handled this request: {fault}")
        if not active.flight.is_over:
            self._perform(active, active.flight.handle(GiveUp(error)))
        active.queue.end(error)

    def _perform(self, active: ActiveRequest, effects: Sequence[FlightEffect]) -> None:
        """Carry out the effects of a flight, and the further effects that follow from them, in order."""
        pending = deque(effects)
        while pending:
            match pending.popleft():
                case Place() as place:
                    pending.extend(self._place(active, place))
                case SubmitLeg(incarnation, submit):
                    if active.span is not None:
                        submit = replace(submit, traceparent=active.span.traceparent)
                    if not self._legs.submit(incarnation, submit, active.cached_on.get(incarnation, 0)):
                        pending.extend(active.flight.handle(NodeGone(incarnation, "its stream is closed")))
                case AdoptLeg(incarnation, adopt, num_sequences):
                    if not self._legs.adopt(incarnation, adopt, num_sequences):
                        pending.extend(active.flight.handle(NodeGone(incarnation, "its stream is closed")))
                case AbortLeg(incarnation, abort):
                    self._legs.abort(incarnation, abort)
                case MoveStream(incarnation, move):
                    # If the node is gone, the flight is told so.
                    self._nodes.send(incarnation, move)
                case MoveEnded() as ended:
                    if ended.placement is not None:
                        self._moved(active, ended.placement)
                    self.on_move_ended(active, ended)
                case LegEnded(incarnation, attempt):
                    self._view.released(incarnation, attempt)
                    self._has_new_room = True
                case EmitPromptLogprobs(positions):
                    active.prompt_logprobs = PromptLogprobs(positions)
                    active.queue.put(active.prompt_logprobs)
                case EmitTokens() as tokens:
                    event = self.relay.push(active, tokens, self._timers.monotonic())
                    self._watch_reader(active)
                    if event is not None:
                        pending.extend(active.flight.handle(event))
                case SequenceEnded() as ended:
                    active.queue.put_all(active.answer.end_sequence(ended))
                case Finish() as finish:
                    self._finish(active, finish)
                case Fail(error):
                    is_cancelled = isinstance(error, Cancelled)
                    self.counters.failed += not is_cancelled
                    self.counters.errors[type(error).__name__] += 1
                    level = logging.DEBUG if is_cancelled else logging.INFO
                    _log.log(level, "request failed: %s", error, extra=_log_fields(active, error=type(error).__name__))
                    if not isinstance(error, Cancelled | InvalidRequest):
                        self._count_kept(active, None)
                    if active.first_token_at is None and isinstance(error, Overloaded | InvalidRequest):
                        self.counters.rejections[type(error).__name__] += 1
                        if isinstance(error, Overloaded):
                            self.tenants.refused(active.tenant)
                    self._end(active, error)
                case MovedAway(error):
                    self.counters.moved += 1
                    active.has_record = False
                    self._end(active, error)
                    # Its client may come back before it has read the error: then the request is adopted again.
                    self._forget(active)

    def _place(self, active: ActiveRequest, place: Place) -> Sequence[FlightEffect]:
        """Find nodes for an attempt, or let the request wait for nodes."""
        if not active.request.prompt_token_ids:
            if place.origin is not None:
                self._begun[active.request.request_id] = place.origin
            why = "was lost with the nodes that another router had chosen, and no other process has its prompt"
            name = unscoped(active.request.request_id)
            return active.flight.handle(GiveUp(RequestNotFound(f"request {name!r} {why}: ask for it again")))
        if active.flight.is_over:
            return ()
        choice = self._waiting.find_nodes(active, place)
        if isinstance(choice, GiveUp):
            return active.flight.handle(choice)
        if isinstance(choice, Wait):
            if active.wait_timer is None:
                self._give_up_when_due(active)
            if choice.displaced is not None:
                self.tenants.displaced(choice.displaced.tenant)
                self.feed(choice.displaced, GiveUp(self._waiting.displaced_error(choice.displaced)))
            return ()
        self.counters.attempts[place.cause] += 1
        if place.attempt > 1:
            _log.info(
                "another attempt", extra=_log_fields(active, cause=place.cause.value, history=active.flight.history)
            )
            self.on_retry(active.request.request_id, place.attempt, place.cause.value)
        active.placed_last_at = now = self._timers.monotonic()
        if active.placed_at is None:
            self._waiting.placed(active, now)
            self.counters.queue_time.observe(now - active.started)
        active.cached_on = choice.cached_on
        turn = self._waiting.turn_in_s(active, place, now)
        effects = active.flight.handle(Placed(choice.placement, turn))
        self._write_record(active, choice.placement)
        return effects

    def _moved(self, active: ActiveRequest, placement: Placement) -> None:
        """The stream goes on at another node, as the next attempt."""
        now, key = self._timers.monotonic(), active.flight.key
        self.counters.attempts[AttemptCause.MOVED] += 1
        active.placed_last_at = now
        self.placer.moved(active.request, key.attempt, placement, now)
        # The node that had the stream is not needed by a router that adopts it.
        self._write_record(active, replace(placement, prefill=None))

    def _give_up_when_due(self, active: ActiveRequest) -> None:
        """Give a request up if it has waited long enough for what it waits for now; otherwise check again later."""
        until = self._waiting.waits_until(active)
        if self._timers.monotonic() < until:
            active.wait_timer = self._timers.call_at(until, partial(self._give_up_when_due, active))
        else:
            self.feed(active, GiveUp(self._waiting.waited_error(active)))

    def _relay_next(self, active: ActiveRequest, delta: RequestDelta, now: float) -> None:
        """Give the client the tokens of a delta that the flight has taken by `take_if_next`."""
        try:
            event = self.relay.push_next(active, delta, now)
            if active.queue.backlog > self._limits.max_backlog_tokens:
                self._watch_reader(active)
        except Exception as fault:
            self._fault(active, fault)
        else:
            if event is not None:
                self._guarded(active, partial(active.flight.handle, event))

    def _watch_reader(self, active: ActiveRequest) -> None:
        """Start the timer of a reader that has become slow."""
        if active.stall_timer is None and self.relay.is_behind(active):
            until = self._timers.monotonic() + self._limits.stall_s
            active.stall_timer = self._timers.call_at(until, partial(self._on_stall, active))

    def _on_stall(self, active: ActiveRequest) -> None:
        give_up = self.relay.stalled(active)
        if give_up is not None:
            self.feed(active, give_up)

    def _finish(self, active: ActiveRequest, finish: Finish) -> None:
        active.queue.put_all(active.answer.finish(finish))
        now = self._timers.monotonic()
        if finish.embedding:
            active.note_first_token(now)
        finished = active.finished(finish, now)
        if _log.isEnabledFor(logging.DEBUG):
            first_ms, total_ms = round(finished.ttft_ms, 3), round(finished.total_ms, 3)
            _log.debug("request finished", extra=_log_fields(active, ttft_ms=first_ms, total_ms=total_ms))
        active.finish = (finish, finished)
        active.queue.put(finished)
        self.counters.finished += 1
        self.counters.served.count(finished)
        self._count_kept(active, finished)
        self.placer.note_times(active.request.request_id, finish.timings, finished.ttft_ms, now)
        self._waiting.note_times(active)
        self._end(active, None, now)

    def _count_kept(self, active: ActiveRequest, finished: Finished | None) -> None:
        """A request has ended that its client did not cancel. `finished`: None if it ended with an error."""
        kept = kept_by(self.placer.target.of(active.request), finished)
        if kept is not None:
            self.attainment.count(active.service_class, kept)
        self.on_ended(active, kept)

    def _end(self, active: ActiveRequest, error: BatonError | None, at: float | None = None) -> None:
        """Clean up after a flight that has ended: its timers are cancelled, but its client may still read."""
        ended_at = self._timers.monotonic() if at is None else at
        ended = active.ended_request(ended_at, error)
        self.timelines.add(ended)
        if self._spans is not None and active.span is not None:
            self._spans.end(active.span, ended)
        active.wanted = None
        self._waiting.remove(active)
        self.placer.end(active.request.request_id)
        active.cancel_timers()
        active.queue.end(error)
        if active.has_record and self._journal is not None:
            self._journal.delete(active.request.request_id, active.flight.flight_id)
