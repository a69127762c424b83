"""The shell around flights: feeds them what happens, does what they say, frees what they held.

Everything runs on one event loop and nothing in here waits, except a client's generator for its next event. So a
decision and its consequences are one piece: nobody sees a flight between them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import TypeVar

from baton.background import current_watch
from baton.errors import (
    BatonError,
    Cancelled,
    ContinuedElsewhere,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    QueueFull,
    RequestNotFound,
    SlowReader,
)
from baton.fair_executor import FairExecutor
from baton.messages.generation import Accepted, Finished, GenerateEvent, GenerateRequest, ModelCard, TakeChunk
from baton.messages.ids import SCOPED_ID_PATTERN, AttemptKey, unscoped
from baton.messages.node import Abort, NodeDescription, RequestDelta, StepReport, WatchKVCache
from baton.observe.logs import of_attempt
from router.admission.request import ValidRequest
from router.admission.schemas import SchemaCheck
from router.admission.validation import validate
from router.flight.active_request import ActiveRequest
from router.flight.answer import Answer
from router.flight.event_queue import EventQueue
from router.flight.fair_queue import FairQueue
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
    LetGo,
    MovedAway,
    NodeGone,
    Place,
    Placed,
    SequenceEnded,
    StopStringFound,
    SubmitLeg,
)
from router.flight.request_spans import RequestSpans
from router.flight.resumption import ResumedAnswer, check_positions, replayed, where_it_runs
from router.flight.text_stream import TextCodec
from router.flight.timeline import TimelineLog
from router.limits import NUM_TEXT_THREADS, DispatchCounters, DispatchLimits
from router.losses import NodeLosses
from router.node_links import NodeLinks
from router.placement.placement import Placement
from router.placement.placer import PlacementSettings, Placer, Policy
from router.placement.view import ClusterView
from router.timers import Timers
from router.waiting_room import WaitingRoom

_log = logging.getLogger(__name__)

T = TypeVar("T")


def _about(run: ActiveRequest, **more: str | float) -> dict[str, str | float]:
    """What a line of the log says of a request."""
    return {**of_attempt(run.flight.key), **more}


class Dispatcher:
    """Every live request of this router. Hears of the links, and is what the front calls."""

    def __init__(
        self,
        view: ClusterView,
        links: NodeLinks,
        codec: TextCodec | None,
        card: Callable[[], ModelCard],
        timers: Timers,
        rng: Random,
        limits: DispatchLimits | None = None,
        journal: FlightJournal | None = None,
        placer: Placer | None = None,
        spans: RequestSpans | None = None,
        schemas: SchemaCheck | None = None,
    ) -> None:
        """Without a journal no other router can go on with a flight of this one, nor this one with another's. Without a
        placer the least loaded nodes are taken, without `spans` nothing is traced.
        """
        self._journal = journal
        self._spans = spans
        self.placer = placer or Placer(PlacementSettings(Policy.LEAST_LOADED))
        self._view = view
        self._links = links
        self._codec = codec
        self._schemas = schemas or SchemaCheck()
        self._card = card
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
            give_up=lambda run, error: self._feed(run, GiveUp(error)),
        )
        self._room_came = False
        """A node has less to do, or there is a new one."""
        self._texts = FairExecutor("router-texts", NUM_TEXT_THREADS, limits.max_tokenizing)
        self._runs: dict[str, ActiveRequest] = {}
        self._adopting: dict[str, dict[str, ActiveRequest]] = {}
        """By node and request id, those of which the node has yet to tell what it brought for another router."""
        self._cut: dict[str, list[Abort]] = {}
        """Nodes whose link is cut, and what each is to be told when it is there again: at most one abort for each
        sequence that runs there."""
        self._turns = FairQueue()
        self._losses = NodeLosses(lambda: list(self._runs.values()), self._feed)
        self._more_to_serve: asyncio.Handle | None = None
        self._watch = current_watch.get()
        """Goes on with the queue in the next turn."""
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.counters = DispatchCounters()
        self.timelines = TimelineLog()
        self.on_retry: Callable[[str, int, str], None] = lambda request_id, attempt, cause: None
        """Called when a request gets another attempt: its number, and why."""
        self.changed = asyncio.Event()
        """Set when nodes came, went or began to drain; whoever waits for it clears it."""
        links.listen(self)

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
        """Tokens given out of them so far."""
        return sum(run.flight.num_output_tokens for run in self._runs.values())

    def runs(self) -> Iterator[ActiveRequest]:
        """Of the same requests, the latest first; for looking only."""
        return reversed(self._runs.values())

    def run_of(self, request_id: str) -> ActiveRequest | None:
        """One of them, by its id."""
        return self._runs.get(request_id)

    def generate(
        self, raw: GenerateRequest, timeout_s: float | None = None, take: TakeChunk | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Accepted, Chunks, Finished; any end that is not a Finished is a BatonError. Closing it cancels the request.

        `timeout_s` counts from the first step of the generator. Who is turned away at once hears no Accepted. Chunks
        that `take` takes while the generator is waited for are not among its events.
        """
        return self._answer(lambda started: self._admit(raw, started, timeout_s), take)

    def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None = None,
        take: TakeChunk | None = None,
        call: int = 0,
        repeat: GenerateRequest | None = None,
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Accepted, then what lies behind these positions (`Chunk.next_position`, one for each sequence), Finished.

        For a client that lost its stream, here or at another router; a stream that is still open ends with Cancelled.
        `call`: the how-manieth call of its client for this request it is; 0: the client does not say. Raises
        ContinuedElsewhere when a later one is served, RequestNotFound when nobody knows the request, or nobody has its
        prompt any more, at once or later: the same request with the same seed gives the same. `repeat`: the request,
        where the client sent it again, for its prompt.
        """
        return self._answer(
            lambda started: self._come_back(request_id, next_token_index, started, timeout_s, call, repeat), take
        )

    async def _answer(
        self, enter: Callable[[float], Awaitable[ActiveRequest]], take: TakeChunk | None
    ) -> AsyncGenerator[GenerateEvent, None]:
        run = await enter(self._timers.monotonic())
        queue, request = run.queue, run.request
        queue.hand_to(take)
        try:
            if run.begin is not None:
                begin, run.begin = run.begin, None
                self._guarded(run, begin)
            if run.finish is not None or not run.flight.is_over:
                name = unscoped(request.request_id)
                yield Accepted(name, request.sampling_params.seed, request.num_prompt_tokens)
            while (event := await queue.get()) is not None:
                self._ease_stall(run)
                yield event
        finally:
            # Another stream may have taken the run over.
            if run.queue is queue:
                self._close(run)

    async def _admit(self, raw: GenerateRequest, started: float, timeout_s: float | None) -> ActiveRequest:
        with self._counted_if_rejected():
            if self._draining:
                raise self._closing()
            # Before anything is done for it.
            self._waiting.check_room(raw.priority, embeds=raw.embeds)
            request = await self._validated(raw)
            answer, takeover = Answer(self._codec, request), max(1, raw.call)
            return self._open(request, answer, started, timeout_s, raw.traceparent, takeover)

    async def _come_back(
        self,
        request_id: str,
        positions: Sequence[int],
        started: float,
        timeout_s: float | None,
        call: int,
        repeat: GenerateRequest | None,
    ) -> ActiveRequest:
        run = self._runs.get(request_id)
        if run is None:
            record = await self._record(request_id)
            if record is not None and repeat is not None:
                record = replace(record, request=await self._with_prompt(record.request, repeat))
            # Somebody may have been quicker.
            run = self._runs.get(request_id)
            if run is None and record is None:
                raise RequestNotFound(f"nobody knows a request {unscoped(request_id)[:80]!r}")
        if run is not None and run.request.embeds:
            raise RequestNotFound(f"request {unscoped(request_id)[:80]!r} is for an embedding, which is no stream")
        if run is None:
            assert record is not None
            takeover = _following(call, record.takeover)
            self.counters.resumed += 1
            return self._reopen(record, positions, started, timeout_s, takeover)
        takeover = _following(call, run.flight.takeover)
        self.counters.resumed += 1
        return self._take_over(run, positions, started, timeout_s, takeover)

    async def _with_prompt(self, request: ValidRequest, repeat: GenerateRequest) -> ValidRequest:
        """Raises InvalidRequest for another request than that one."""
        prompt = (await self._validated(repeat)).prompt_token_ids
        if len(prompt) != request.num_prompt_tokens:
            raise InvalidRequest("prompt", f"has {len(prompt)} tokens; the request had {request.num_prompt_tokens}")
        return replace(request, prompt_token_ids=prompt, prompt_length=0)

    async def _record(self, request_id: str) -> FlightRecord | None:
        if self._journal is None or not SCOPED_ID_PATTERN.match(request_id):
            return None
        return await self._journal.find(request_id, self._card())

    def _reopen(
        self,
        record: FlightRecord,
        positions: Sequence[int],
        started: float,
        timeout_s: float | None,
        takeover: int,
    ) -> ActiveRequest:
        """A flight that another router began, or this one before its client went away."""
        check_positions(record.request, positions)
        answer = ResumedAnswer(self._codec, record.request, positions)
        run = self._open(record.request, answer, started, timeout_s, record.traceparent, takeover)
        placement = where_it_runs(record, positions, {node.incarnation: node for node in self._view.descriptions()})
        if placement is None:
            run.begin = partial(run.flight.start, record.attempt)
        else:
            run.begin = partial(self._adopt, run, record, placement)
        return run

    def _adopt(self, run: ActiveRequest, record: FlightRecord, placement: Placement) -> Sequence[FlightEffect]:
        self.counters.adopted += 1
        self.placer.adopted(run.request, record.key.attempt, placement, self._timers.monotonic())
        self._waiting.placed(run, run.admitted_at)
        run.placed_last_at = run.placed_at
        if placement.prefill is not None:
            run.settles_at = placement.decode.incarnation
            self._adopting.setdefault(run.settles_at, {})[run.request.request_id] = run
        run.is_adopted = True
        effects = run.flight.adopt(record.key, placement, record.num_given)
        # The next one to adopt it has to have a larger number, and our end is the one that counts.
        self._note(run, placement)
        return effects

    def _take_over(
        self, run: ActiveRequest, positions: Sequence[int], started: float, timeout_s: float | None, takeover: int
    ) -> ActiveRequest:
        """Another stream of the same client goes on with a live run."""
        check_positions(run.request, positions)
        timers = run.deadline, run.stall
        self._set_deadline(run, started, timeout_s)
        run.flight.takeover = takeover
        for timer in timers:
            if timer is not None:
                timer.cancel()
        run.stall = None
        before, run.queue = run.queue, EventQueue(self._turns)
        before.end(Cancelled("continued elsewhere"))
        run.answer = ResumedAnswer(self._codec, run.request, positions)
        run.queue.put_all(replayed(run.answer, run.flight.sequences, run.logprobs))
        if run.finish is not None:
            finish, finished = run.finish
            run.queue.put_all(run.answer.finish(finish))
            run.queue.put(finished)
        if run.flight.is_over:
            run.queue.end(before.error)
        return run

    def cancel(self, request_id: str) -> None:
        """End a live request; its generator raises Cancelled. Raises RequestNotFound."""
        run = self._runs.get(request_id)
        if run is None or run.flight.is_over:
            raise RequestNotFound(f"no live request {unscoped(request_id)[:80]!r}")
        self._feed(run, Cancel("cancelled by the client"))

    def drain(self) -> None:
        """Take no new requests. Idempotent."""
        self._draining = True

    async def idle(self) -> None:
        """Return when no request is live."""
        await self._idle.wait()

    def close(self) -> None:
        """End its threads and processes; waits for them. No request may be live. Idempotent."""
        self._schemas.close()
        self._texts.close()

    def let_go_of_all(self) -> None:
        """End every live stream here and leave its nodes to whichever router the client goes to.

        What no other router could find ends on its nodes, too: embeddings, what waits for nodes, all without a journal.
        """
        for run in list(self._runs.values()):
            if run.is_noted and not run.flight.is_over:
                self._feed(run, LetGo(ContinuedElsewhere("this router is shutting down: go on at another one")))
            else:
                self._feed(run, GiveUp(self._closing()))

    def on_attached(self, description: NodeDescription) -> None:
        """A node is there: whoever waited for one may go on."""
        incarnation = description.incarnation
        self._losses.settle()
        self._view.attached(description, self._timers.monotonic())
        if self.placer.on_attached(description):
            self._links.send(incarnation, WatchKVCache())
        aborts = self._cut.pop(incarnation, None)
        if aborts is not None:
            self.counters.links_back += 1
            for abort in aborts:
                self._links.send(incarnation, abort)
            self._losses.back(incarnation)
        self.changed.set()
        self._serve_queue()

    def on_report(self, incarnation: str, report: StepReport) -> None:
        """One engine step of a node."""
        now = self._timers.monotonic()
        if self.placer.on_report(incarnation, report, now):
            self._links.send(incarnation, WatchKVCache())
        for delta in report.deltas:
            run = self._runs.get(delta.attempt.request_id)
            if run is None:
                self.counters.late_deltas += 1
            elif run.flight.takes_next(incarnation, delta):
                self._heard(run, delta.sequence_index, now)
                self._relay(run, delta)
            else:
                self._feed(run, Delta(incarnation, delta))
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
        """A node that tells of other things has told all that it had of those that are adopted from it.

        What it tells again comes in reports of its own, one for each request: those concern nobody else, or a thousand
        requests of a dead router would be looked at a thousand times each.
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
        """What runs on a node for this router, as far as it knows."""
        flights = (run.flight for run in self._losses.runs_on(incarnation))
        return [flight.key for flight in flights if not flight.is_over]

    def on_cut(self, incarnation: str, reason: str) -> None:
        """A node can't be reached: nothing is placed on it, and its flights wait for it to be there again, or lost."""
        now = self._timers.monotonic()
        _log.info("the link to a node is cut", extra={"node": incarnation, "error": reason})
        self._cut[incarnation] = []
        self._view.detached(incarnation, reason, now)
        self._losses.suspected(incarnation, now)
        self.changed.set()

    def on_lost(self, incarnation: str, reason: str) -> None:
        """A node is gone: nothing is placed on it from now on, and its flights hear of it soon."""
        now = self._timers.monotonic()
        self._cut.pop(incarnation, None)
        self._view.detached(incarnation, reason, now)
        self.placer.on_lost(incarnation, now)
        self._losses.lost(incarnation, reason, now)
        self.changed.set()

    async def _validated(self, raw: GenerateRequest) -> ValidRequest:
        encode = self._codec.encode if self._codec is not None else None
        card = self._card()
        args = raw, card, encode, self._rng, self._limits.min_priority
        if raw.prompt is not None and len(raw.prompt) > self._limits.thread_text_chars:
            request = await self.in_thread(raw.tenant, validate, *args)
        else:
            request = validate(*args)
        if request.sampling_params.has_grammar:
            await self._schemas.check(request.sampling_params.json_schema, raw.tenant)
        return request

    async def in_thread(self, tenant: str, work: Callable[..., T], *args: object) -> T:
        """Do what takes long without keeping the loop from others; raises QueueFull when too much of it waits."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._texts.of(tenant), work, *args)
        except QueueFull as error:
            error.retry_after_s = self._rng.uniform(0.75, 1.25)
            raise

    def _closing(self) -> Draining:
        return Draining("this router is shutting down", self._rng.uniform(0.75, 1.25))

    @contextmanager
    def _counted_if_rejected(self) -> Iterator[None]:
        try:
            yield
        except BatonError as error:
            self.counters.rejections[type(error).__name__] += 1
            raise

    def _open(
        self,
        request: ValidRequest,
        answer: Answer,
        started: float,
        timeout_s: float | None,
        traceparent: str,
        takeover: int,
    ) -> ActiveRequest:
        if self._draining:
            raise self._closing()
        if request.request_id in self._runs:
            raise DuplicateRequest(f"request {unscoped(request.request_id)!r} is live")
        run = ActiveRequest(request, self._rng.getrandbits(64), answer, EventQueue(self._turns), started, takeover)
        run.admitted_at = self._timers.monotonic()
        self._set_deadline(run, started, timeout_s)
        if self._spans is not None:
            run.span = self._spans.begin(request, traceparent, started)
        run.traceparent = run.span.traceparent if run.span is not None else traceparent
        self._runs[request.request_id] = run
        self._idle.clear()
        self.counters.accepted += 1
        return run

    def _set_deadline(self, run: ActiveRequest, started: float, timeout_s: float | None) -> None:
        """Raises DeadlineExceeded, and changes nothing, when it has passed."""
        if timeout_s is None:
            run.deadline_at = run.deadline = None
            return
        error = DeadlineExceeded(f"the deadline of {timeout_s:.3f} s passed")
        if self._timers.monotonic() >= started + timeout_s:
            raise error
        run.deadline_at = started + timeout_s
        run.deadline = self._timers.call_at(run.deadline_at, lambda: self._feed(run, GiveUp(error)))

    def _close(self, run: ActiveRequest) -> None:
        if not run.flight.is_over:
            self._feed(run, Cancel("the client went away"))
        run.cancel_timers()
        self._settled(run)
        self._waiting.gone(run)
        self._forget(run)
        if self._waiting:
            self._serve_queue()

    def _forget(self, run: ActiveRequest) -> None:
        """Whoever comes back for it is not to find it here. Idempotent."""
        if self._runs.get(run.request.request_id) is run:
            del self._runs[run.request.request_id]
        if not self._runs:
            self._idle.set()

    def _feed(self, run: ActiveRequest, event: FlightEvent) -> None:
        self._guarded(run, partial(run.flight.handle, event))
        if self._room_came and self._waiting:
            self._serve_queue()

    def _serve_queue(self) -> None:
        self._room_came = False
        if self._more_to_serve is None and self._waiting.serve():
            serve_more = self._watch.guarded(self._serve_more, "request-queue")
            self._more_to_serve = asyncio.get_running_loop().call_soon(serve_more)

    def _serve_more(self) -> None:
        self._more_to_serve = None
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
        """Do what the flight says, and what follows from it, in order."""
        pending = deque(effects)
        while pending:
            match pending.popleft():
                case Place() as place:
                    pending.extend(self._place(run, place))
                case SubmitLeg(incarnation, submit):
                    if run.span is not None:
                        submit = replace(submit, traceparent=run.span.traceparent)
                    self._view.dispatched(incarnation, submit.attempt, submit.num_sequences)
                    if not self._links.send(incarnation, submit):
                        pending.extend(run.flight.handle(NodeGone(incarnation, "its stream is closed")))
                case AdoptLeg(incarnation, adopt, num_sequences):
                    self._view.dispatched(incarnation, adopt.attempt, num_sequences)
                    # One whose link is cut again hears of it when it is back again.
                    if not self._links.send(incarnation, adopt) and incarnation not in self._cut:
                        pending.extend(run.flight.handle(NodeGone(incarnation, "its stream is closed")))
                case AbortLeg(incarnation, abort):
                    if not self._links.send(incarnation, abort) and incarnation in self._cut:
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
                    self.counters.failed += 1
                    how = logging.DEBUG if isinstance(error, Cancelled) else logging.INFO
                    _log.log(how, "request failed: %s", error, extra=_about(run, error=type(error).__name__))
                    if run.first_token_at is None and isinstance(error, Overloaded | InvalidRequest):
                        self.counters.rejections[type(error).__name__] += 1
                    self._end(run, error)
                case MovedAway(error):
                    self.counters.moved += 1
                    run.is_noted = False
                    self._end(run, error)
                    # Its client may come back before it has read that: then it is to be adopted anew.
                    self._forget(run)

    def _place(self, run: ActiveRequest, place: Place) -> Sequence[FlightEffect]:
        """Find nodes, or wait for some."""
        if not run.request.prompt_token_ids:
            why = "nodes have lost it that another router had chosen, and nobody else has its prompt: ask for it again"
            return run.flight.handle(GiveUp(RequestNotFound(f"request {unscoped(run.request.request_id)!r}: {why}")))
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

    def _note(self, run: ActiveRequest, placement: Placement) -> None:
        """Leave word of the running attempt, for another router."""
        if self._journal is not None and not run.request.embeds:
            flight = run.flight
            self._journal.placed(
                run.request, flight.key, placement, flight.num_given, run.traceparent, flight.takeover, flight.flight_id
            )
            run.is_noted = True

    def _relay(self, run: ActiveRequest, delta: RequestDelta) -> None:
        """Hand on what the flight has taken already."""
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
        """What its client waits for came, if it is the first of it."""
        if run.first_token_at is None:
            run.first_token_at = now
            run.first = (run.placed_last_at, run.flight.measured())

    def _heard(self, run: ActiveRequest, sequence_index: int, now: float) -> None:
        """Tokens of this sequence came."""
        told_at, run.told_at[sequence_index] = run.told_at[sequence_index], now
        if told_at:
            self.counters.served.gaps.observe(now - told_at)

    def _give(self, run: ActiveRequest, events: Sequence[GenerateEvent], sequence_index: int) -> Sequence[FlightEffect]:
        run.queue.put_all(events)
        if run.stall is not None:
            self._ease_stall(run)
        elif run.queue.backlog > self._limits.max_backlog_tokens:
            until = self._timers.monotonic() + self._limits.stall_s
            run.stall = self._timers.call_at(until, lambda: self._on_stall(run))
        found = run.answer.found(sequence_index) if run.answer.may_be_cut else None
        return () if found is None else run.flight.handle(StopStringFound(found, sequence_index))

    def _ease_stall(self, run: ActiveRequest) -> None:
        if run.stall is not None and run.queue.backlog <= self._limits.max_backlog_tokens:
            run.stall.cancel()
            run.stall = None

    def _on_stall(self, run: ActiveRequest) -> None:
        self._ease_stall(run)
        if run.stall is not None:
            unread = run.queue.backlog
            error = SlowReader(f"{unread} tokens were left unread for {self._limits.stall_s:g} s")
            self._feed(run, GiveUp(error))

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
        """The flight is over: nothing of it may fire any more, though its client may still read."""
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


def _following(call: int, takeover: int) -> int:
    """The number of a call that wants what call number `takeover` has; raises ContinuedElsewhere for an earlier one."""
    if 0 < call <= takeover:
        raise ContinuedElsewhere(f"call {call} of its client came behind call {takeover}, which is served")
    return call or takeover + 1
