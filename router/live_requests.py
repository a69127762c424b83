"""The live requests of a router: gives events to each flight, carries out what the flight decides, frees what it held.

Nothing in this module waits, and one event loop or one simulation calls all of it. Therefore no other code runs between
a flight's decision and its consequences. `router.dispatcher` puts clients' streams in front of it, and
`baton.bench.simulator` runs it in virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Protocol

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    RequestNotFound,
    SlowReader,
)
from baton.messages.generation import Finished, GenerateEvent
from baton.messages.ids import AttemptKey, unscoped
from baton.messages.node import Abort, NodeDescription, RequestDelta, RouterMessage, StepReport, WatchKVCache
from baton.observe.logs import of_attempt
from router.admission.request import ValidRequest
from router.flight.active_request import ActiveRequest
from router.flight.answer import Answer
from router.flight.event_queue import EventQueue
from router.flight.flight_journal import FlightJournal
from router.flight.flight_record import FlightRecord
from router.flight.flight_table import (
    AbortLeg,
    AdoptLeg,
    Cancel,
    Delta,
    EmitTokens,
    Fail,
    Finish,
    FlightEffect,
    FlightEvent,
    GiveUp,
    LegEnded,
    MovedAway,
    NodeGone,
    Place,
    Placed,
    SequenceEnded,
    StopStringFound,
    SubmitLeg,
)
from router.flight.request_spans import RequestSpans
from router.flight.timeline import TimelineLog
from router.limits import DispatchCounters, DispatchLimits
from router.losses import NodeLosses
from router.placement.placement import Placement
from router.placement.placer import PlacementSettings, Placer, Policy
from router.placement.view import ClusterView
from router.timers import Timers
from router.waiting_room import WaitingRoom

_log = logging.getLogger(__name__)


class NodeSender(Protocol):
    """Sends messages to nodes; `router.node_links.NodeLinks` is the real one."""

    def send(self, incarnation: str, message: RouterMessage) -> bool:
        """Queue a message, never wait. False when there is no stream to that incarnation."""
        ...


def _about(run: ActiveRequest, **more: str | float) -> dict[str, str | float]:
    """The fields that a log line about a request has."""
    return {**of_attempt(run.flight.key), **more}


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
        self._waiting = WaitingRoom(
            view,
            self.placer,
            timers,
            rng,
            limits,
            place=lambda run, place: self._guarded(run, partial(self._place, run, place)),
            give_up=lambda run, error: self.feed(run, GiveUp(error)),
        )
        self._room_came = False
        """A node has less to do, or there is a new one."""
        self._runs: dict[str, ActiveRequest] = {}
        self._adopting: dict[str, dict[str, ActiveRequest]] = {}
        """By node and request id: adopted requests whose node has not reported yet what it has of them."""
        self._cut: dict[str, list[Abort]] = {}
        """Nodes whose link is cut, and what each is sent when it is there again: at most one abort for each sequence
        that runs there."""
        self._losses = NodeLosses(lambda: list(self._runs.values()), self.feed, timers)
        self._serves_next_turn = False
        """There was no time to place all waiting requests: the next turn continues with them."""
        self.idle = asyncio.Event()
        """Set while no request is live."""
        self.idle.set()
        self.counters = DispatchCounters()
        self.timelines = TimelineLog()
        self.on_retry: Callable[[str, int, str], None] = lambda request_id, attempt, cause: None
        """Called when a request gets another attempt: its number, and why."""
        self.changed = asyncio.Event()
        """Set when nodes came, went or began to drain; whoever waits for it clears it."""

    @property
    def num_live(self) -> int:
        """Requests that are admitted and not over, or whose client still reads."""
        return len(self._runs)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a node."""
        return len(self._waiting)

    @property
    def num_placed(self) -> int:
        """Requests that are on nodes, or whose client still reads what came from them."""
        return self._waiting.num_placed

    @property
    def num_live_tokens(self) -> int:
        """Tokens of live requests that were given out so far."""
        return sum(run.flight.num_output_tokens for run in self._runs.values())

    def runs(self) -> Iterator[ActiveRequest]:
        """The live requests, the latest first; for looking only."""
        return reversed(self._runs.values())

    def run_of(self, request_id: str) -> ActiveRequest | None:
        """The live request with this id."""
        return self._runs.get(request_id)

    # How a request comes and goes.

    def check_room(self, priority: int, *, embeds: bool) -> None:
        """Raises QueueFull if a new request of this priority could not even wait for nodes."""
        self._waiting.check_room(priority, embeds=embeds)

    def open(
        self,
        request: ValidRequest,
        answer: Answer,
        queue: EventQueue,
        started: float,
        timeout_s: float | None = None,
        traceparent: str = "",
        takeover: int = 0,
    ) -> ActiveRequest:
        """Take a request in; `begin` starts it, and `close` ends it.

        `queue` receives its events; `started` is when it came, on the router's clock; `timeout_s` counts from then on.
        Raises DuplicateRequest for an id that is live, DeadlineExceeded when the time is over already.
        """
        if request.request_id in self._runs:
            raise DuplicateRequest(f"request {unscoped(request.request_id)!r} is live")
        run = ActiveRequest(request, self._rng.getrandbits(64), answer, queue, started, takeover)
        run.admitted_at = self._timers.monotonic()
        self.set_deadline(run, started, timeout_s)
        if self._spans is not None:
            run.span = self._spans.begin(request, traceparent, started)
        run.traceparent = run.span.traceparent if run.span is not None else traceparent
        self._runs[request.request_id] = run
        self.idle.clear()
        self.counters.accepted += 1
        return run

    def begin(self, run: ActiveRequest) -> None:
        """Start a request's flight; without effect once it has started."""
        begin, run.begin = run.begin, None
        if begin is not None:
            self._guarded(run, begin)

    def set_deadline(self, run: ActiveRequest, started: float, timeout_s: float | None) -> None:
        """Give a request `timeout_s` from `started` on, or no deadline.

        Raises DeadlineExceeded, and changes nothing, when that time has passed.
        """
        if timeout_s is None:
            run.deadline_at = run.deadline = None
            return
        error = DeadlineExceeded(f"the deadline of {timeout_s:.3f} s passed")
        if self._timers.monotonic() >= started + timeout_s:
            raise error
        run.deadline_at = started + timeout_s
        run.deadline = self._timers.call_at(run.deadline_at, lambda: self.feed(run, GiveUp(error)))

    def adopt(self, run: ActiveRequest, record: FlightRecord, placement: Placement) -> Sequence[FlightEffect]:
        """Let a request continue on the nodes where another router placed it; returns what its flight wants done."""
        self.counters.adopted += 1
        self.placer.adopted(run.request, record.key.attempt, placement, self._timers.monotonic())
        self._waiting.placed(run, run.admitted_at)
        run.placed_last_at = run.placed_at
        if placement.prefill is not None:
            run.settles_at = placement.decode.incarnation
            self._adopting.setdefault(run.settles_at, {})[run.request.request_id] = run
        run.is_adopted = True
        effects = run.flight.adopt(record.key, placement, record.num_given)
        # The next router that adopts it needs a larger number, and only this router may end its record.
        self._note(run, placement)
        return effects

    def close(self, run: ActiveRequest) -> None:
        """A request's client has everything, or is not there any more: end its flight and forget it."""
        if not run.flight.is_over:
            self.feed(run, Cancel("the client went away"))
        run.cancel_timers()
        self._settled(run)
        self._waiting.gone(run)
        self._forget(run)
        if self._waiting:
            self._serve_queue()

    def _note(self, run: ActiveRequest, placement: Placement) -> None:
        """Record where the running attempt is, for another router."""
        if self._journal is not None and not run.request.embeds:
            flight = run.flight
            self._journal.placed(
                run.request, flight.key, placement, flight.num_given, run.traceparent, flight.takeover, flight.flight_id
            )
            run.is_noted = True

    # What the links report.

    def on_attached(self, description: NodeDescription) -> None:
        """A node is there: requests that wait for nodes may be placed."""
        incarnation = description.incarnation
        self._losses.settle()
        self._view.attached(description, self._timers.monotonic())
        if self.placer.on_attached(description):
            self._nodes.send(incarnation, WatchKVCache())
        aborts = self._cut.pop(incarnation, None)
        if aborts is not None:
            self.counters.links_back += 1
            for abort in aborts:
                self._nodes.send(incarnation, abort)
            self._losses.back(incarnation)
        self.changed.set()
        self._serve_queue()

    def on_report(self, incarnation: str, report: StepReport) -> None:
        """A node reports one engine step."""
        now = self._timers.monotonic()
        if self.placer.on_report(incarnation, report, now):
            self._nodes.send(incarnation, WatchKVCache())
        for delta in report.deltas:
            run = self._runs.get(delta.attempt.request_id)
            if run is None:
                self.counters.late_deltas += 1
            elif run.flight.takes_next(incarnation, delta):
                self._heard(run, delta.sequence_index, now)
                self._relay(run, delta)
            else:
                self.feed(run, Delta(incarnation, delta))
        if adopting := self._adopting.get(incarnation):
            self._settle(adopting, incarnation, report)
        self._view.reported(incarnation, report.load)
        if report.notice is not None:
            self._view.noticed(incarnation, report.notice)
        if report.load.draining:
            self.changed.set()
        if self._waiting and not self._view.is_full(incarnation):
            self._serve_queue()

    def _settle(self, adopting: Mapping[str, ActiveRequest], incarnation: str, report: StepReport) -> None:
        """End the adoption of the requests that this report is about, or of all on this node if it is about none.

        A node replays what it has of an adopted request in reports that concern that request alone, and only then
        reports other things. So a report looks at the requests that it names; otherwise a thousand requests of a dead
        router would be looked at a thousand times each.
        """
        told = [run for delta in report.deltas if (run := adopting.get(delta.attempt.request_id)) is not None]
        for run in told or list(adopting.values()):
            if not told:
                self.counters.adoption_looks += 1
                self._guarded(run, partial(run.flight.settle, incarnation))
            if not run.flight.is_adopting:
                self._settled(run)

    def _settled(self, run: ActiveRequest) -> None:
        adopting = self._adopting.get(run.settles_at, {})
        if adopting.get(run.request.request_id) is run:
            del adopting[run.request.request_id]
            if not adopting:
                del self._adopting[run.settles_at]

    def attempts_on(self, incarnation: str) -> Sequence[AttemptKey]:
        """The attempts that run on a node for this router, as far as the router knows."""
        flights = (run.flight for run in self._losses.runs_on(incarnation))
        return [flight.key for flight in flights if not flight.is_over]

    def on_cut(self, incarnation: str, reason: str) -> None:
        """A node can't be reached: nothing is placed on it, and its flights wait until it is back or lost."""
        now = self._timers.monotonic()
        _log.info("the link to a node is cut", extra={"node": incarnation, "error": reason})
        self._cut[incarnation] = []
        self._view.detached(incarnation, reason, now)
        self._losses.suspected(incarnation, now)
        self.changed.set()

    def on_lost(self, incarnation: str, reason: str) -> None:
        """A node is gone: nothing is placed on it from now on, and its flights are told soon."""
        now = self._timers.monotonic()
        self._cut.pop(incarnation, None)
        self._view.detached(incarnation, reason, now)
        self.placer.on_lost(incarnation, now)
        self._losses.lost(incarnation, reason, now)
        self.changed.set()

    def _forget(self, run: ActiveRequest) -> None:
        """From now on the request is not found here. Idempotent."""
        if self._runs.get(run.request.request_id) is run:
            del self._runs[run.request.request_id]
        if not self._runs:
            self.idle.set()

    # What flights decide.

    def feed(self, run: ActiveRequest, event: FlightEvent) -> None:
        """Tell a flight of an event, and carry out what it decides."""
        self._guarded(run, partial(run.flight.handle, event))
        if self._room_came and self._waiting:
            self._serve_queue()

    def _serve_queue(self) -> None:
        self._room_came = False
        if not self._serves_next_turn and self._waiting.serve():
            self._serves_next_turn = True
            self._timers.call_soon(self._serve_more, "request-queue")

    def _serve_more(self) -> None:
        self._serves_next_turn = False
        self._serve_queue()

    def _guarded(self, run: ActiveRequest, decide: Callable[[], Sequence[FlightEffect]]) -> None:
        """Decide and act. A fault in here ends this flight, never the others."""
        try:
            self._perform(run, decide())
        except Exception as fault:
            self._fault(run, fault)

    def _fault(self, run: ActiveRequest, fault: Exception) -> None:
        _log.exception("the router failed at a request", extra=_about(run, story=run.flight.story))
        error = BatonError(f"the router failed at this request: {fault}")
        if not run.flight.is_over:
            self._perform(run, run.flight.handle(GiveUp(error)))
        run.queue.end(error)

    def _perform(self, run: ActiveRequest, effects: Sequence[FlightEffect]) -> None:
        """Carry out what the flight decided, and what follows from that, in order."""
        pending = deque(effects)
        while pending:
            match pending.popleft():
                case Place() as place:
                    pending.extend(self._place(run, place))
                case SubmitLeg(incarnation, submit):
                    if run.span is not None:
                        submit = replace(submit, traceparent=run.span.traceparent)
                    self._view.dispatched(incarnation, submit.attempt, submit.num_sequences)
                    if not self._nodes.send(incarnation, submit):
                        pending.extend(run.flight.handle(NodeGone(incarnation, "its stream is closed")))
                case AdoptLeg(incarnation, adopt, num_sequences):
                    self._view.dispatched(incarnation, adopt.attempt, num_sequences)
                    # A node whose link is cut again is asked again when it is back.
                    if not self._nodes.send(incarnation, adopt) and incarnation not in self._cut:
                        pending.extend(run.flight.handle(NodeGone(incarnation, "its stream is closed")))
                case AbortLeg(incarnation, abort):
                    if not self._nodes.send(incarnation, abort) and incarnation in self._cut:
                        self._cut[incarnation].append(abort)
                case LegEnded(incarnation, attempt):
                    self._view.released(incarnation, attempt)
                    self._room_came = True
                case EmitTokens() as tokens:
                    pending.extend(self._emit(run, tokens))
                case SequenceEnded() as ended:
                    run.queue.put_all(run.answer.end_sequence(ended))
                case Finish() as finish:
                    self._finish(run, finish)
                case Fail(error):
                    is_cancelled = isinstance(error, Cancelled)
                    self.counters.failed += not is_cancelled
                    self.counters.errors[type(error).__name__] += 1
                    level = logging.DEBUG if is_cancelled else logging.INFO
                    _log.log(level, "request failed: %s", error, extra=_about(run, error=type(error).__name__))
                    if run.first_token_at is None and isinstance(error, Overloaded | InvalidRequest):
                        self.counters.rejections[type(error).__name__] += 1
                    self._end(run, error)
                case MovedAway(error):
                    self.counters.moved += 1
                    run.is_noted = False
                    self._end(run, error)
                    # Its client may come back before it has read that: then the request is adopted anew.
                    self._forget(run)

    def _place(self, run: ActiveRequest, place: Place) -> Sequence[FlightEffect]:
        """Find nodes for an attempt, or let the request wait for some."""
        if not run.request.prompt_token_ids:
            why = "was lost with the nodes that another router had chosen, and no other process has its prompt"
            name = unscoped(run.request.request_id)
            return run.flight.handle(GiveUp(RequestNotFound(f"request {name!r} {why}: ask for it again")))
        choice = self._waiting.seat(run, place)
        if choice is None:
            return ()
        if isinstance(choice, GiveUp):
            return run.flight.handle(choice)
        self.counters.attempts[place.cause] += 1
        if place.attempt > 1:
            _log.info("another attempt", extra=_about(run, cause=place.cause.value, story=run.flight.story))
            self.on_retry(run.request.request_id, place.attempt, place.cause.value)
        run.placed_last_at = now = self._timers.monotonic()
        if run.placed_at is None:
            self._waiting.placed(run, now)
            self.counters.queue_time.observe(now - run.started)
        effects = run.flight.handle(Placed(choice.placement))
        self._note(run, choice.placement)
        return effects

    def _relay(self, run: ActiveRequest, delta: RequestDelta) -> None:
        """Pass on to the client what the flight has taken already."""
        try:
            if run.logprobs:
                run.logprobs[delta.sequence_index] += delta.logprobs
            effects = self._give(run, run.answer.push_next(delta), delta.sequence_index)
        except Exception as fault:
            self._fault(run, fault)
        else:
            if effects:
                self._guarded(run, lambda: effects)

    def _emit(self, run: ActiveRequest, tokens: EmitTokens) -> Sequence[FlightEffect]:
        now = self._timers.monotonic()
        self._heard(run, tokens.sequence_index, now)
        self._heard_first(run, now)
        if run.logprobs:
            run.logprobs[tokens.sequence_index] += tokens.logprobs
        return self._give(run, run.answer.push(tokens), tokens.sequence_index)

    def _heard_first(self, run: ActiveRequest, now: float) -> None:
        """Note when the first of what the client waits for came."""
        if run.first_token_at is None:
            run.first_token_at = now
            run.first = (run.placed_last_at, run.flight.measured())

    def _heard(self, run: ActiveRequest, sequence_index: int, now: float) -> None:
        """Note that tokens of this sequence came."""
        told_at, run.told_at[sequence_index] = run.told_at[sequence_index], now
        if told_at:
            self.counters.served.gaps.observe(now - told_at)

    def _give(self, run: ActiveRequest, events: Sequence[GenerateEvent], sequence_index: int) -> Sequence[FlightEffect]:
        run.queue.put_all(events)
        if run.stall is not None:
            self.ease_stall(run)
        elif run.queue.backlog > self._limits.max_backlog_tokens:
            until = self._timers.monotonic() + self._limits.stall_s
            run.stall = self._timers.call_at(until, lambda: self._on_stall(run))
        found = run.answer.found(sequence_index) if run.answer.may_be_cut else None
        return () if found is None else run.flight.handle(StopStringFound(found, sequence_index))

    def ease_stall(self, run: ActiveRequest) -> None:
        """Stop the timer of a slow reader that has caught up."""
        if run.stall is not None and run.queue.backlog <= self._limits.max_backlog_tokens:
            run.stall.cancel()
            run.stall = None

    def _on_stall(self, run: ActiveRequest) -> None:
        self.ease_stall(run)
        if run.stall is not None:
            unread = run.queue.backlog
            error = SlowReader(f"{unread} tokens were left unread for {self._limits.stall_s:g} s")
            self.feed(run, GiveUp(error))

    def _finish(self, run: ActiveRequest, finish: Finish) -> None:
        run.queue.put_all(run.answer.finish(finish))
        now = self._timers.monotonic()
        if finish.embedding:
            self._heard_first(run, now)
        first = now if run.first_token_at is None else run.first_token_at
        timings = finish.timings
        finished = Finished(
            finish_reason=run.answer.finish_reason,
            stop_reason=run.answer.stop_reason,
            prompt_tokens=run.request.num_prompt_tokens,
            completion_tokens=run.answer.num_tokens,
            cached_tokens=timings.cached_tokens,
            queue_ms=timings.queue_ms + ((run.placed_at or run.started) - run.started) * 1e3,
            prefill_ms=timings.prefill_ms,
            transfer_ms=timings.transfer_ms,
            ttft_ms=(first - run.started) * 1e3,
            total_ms=(now - run.started) * 1e3,
            kv_bytes=timings.kv_bytes,
            path=finish.path,
            embedding=finish.embedding,
        )
        if _log.isEnabledFor(logging.DEBUG):
            first_ms, total_ms = round(finished.ttft_ms, 3), round(finished.total_ms, 3)
            _log.debug("request finished", extra=_about(run, ttft_ms=first_ms, total_ms=total_ms))
        run.finish = (finish, finished)
        run.queue.put(finished)
        self.counters.finished += 1
        self.counters.served.ended(finished)
        self.placer.finished(run.request.request_id, timings, finished.ttft_ms, now)
        self._waiting.ended(run, first)
        self._end(run, None, now)

    def _end(self, run: ActiveRequest, error: BatonError | None, at: float | None = None) -> None:
        """The flight is over: its timers are cancelled, though its client may still read."""
        ended_at = self._timers.monotonic() if at is None else at
        traced = run.traced(ended_at, error)
        self.timelines.record(traced)
        if self._spans is not None and run.span is not None:
            self._spans.end(run.span, traced)
        run.wanted = None
        self._waiting.leave(run)
        self.placer.over(run.request.request_id)
        run.cancel_timers()
        run.queue.end(error)
        if run.is_noted and self._journal is not None:
            self._journal.ended(run.request.request_id, run.flight.flight_id)
