"""The shell around flights: feeds them what happens, does what they say, frees what they held.

Everything runs on one event loop and nothing in here waits, except a client's generator for its next event. So a
decision and its consequences are one piece: nobody sees a flight between them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from baton.config import MIN_PRIORITY
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    InvalidRequest,
    NoCapacity,
    RequestNotFound,
    SlowReader,
)
from baton.rpc.messages import (
    Accepted,
    Finished,
    GenerateEvent,
    GenerateRequest,
    ModelCard,
    NodeDescription,
    StepReport,
)
from router.answer import Answer
from router.event_queue import EventQueue
from router.flight import Flight
from router.flight_table import (
    AbortLeg,
    Cancel,
    Delta,
    EmitTokens,
    Fail,
    Finish,
    FlightEffect,
    FlightEvent,
    GiveUp,
    LegEnded,
    NodeGone,
    Place,
    Placed,
    SequenceEnded,
    StopStringFound,
    SubmitLeg,
)
from router.node_links import NodeLinks
from router.placement import Demand, choose
from router.request import ValidRequest
from router.text_stream import TextCodec
from router.timers import TimerHandle, Timers
from router.validation import validate
from router.view import ClusterView

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of one router."""

    capacity_wait_s: float = 10.0
    """How long a new request waits for a node to come before it is turned away."""
    recovery_wait_s: float = 120.0
    """How long a request whose nodes were lost waits for one to come back: long enough to load a model."""
    max_backlog_tokens: int = 256
    stall_s: float = 30.0
    """How long a client may leave more than the backlog unread."""
    min_priority: int = MIN_PRIORITY
    """Requests with a smaller one are refused."""
    thread_text_chars: int = 16_384
    """Longer prompts are tokenized in a thread, so that nobody else waits."""


@dataclass(slots=True)
class DispatchCounters:
    """Totals since start."""

    accepted: int = 0
    finished: int = 0
    failed: int = 0
    retried: int = 0
    late_deltas: int = 0
    """Deltas of requests that were over."""


class _Run:
    """A flight with everything impure around it."""

    def __init__(self, request: ValidRequest, flight_id: int, answer: Answer, started: float) -> None:
        self.request = request
        self.flight = Flight(request, flight_id)
        self.answer = answer
        self.queue = EventQueue()
        self.started = started
        self.first_token_at: float | None = None
        self.wanted: Place | None = None
        """Waits for nodes."""
        self.why_waiting: BatonError = NoCapacity("no node is up")
        self.deadline: TimerHandle | None = None
        self.patience: TimerHandle | None = None
        self.stall: TimerHandle | None = None

    @property
    def demand(self) -> Demand:
        request = self.request
        return Demand(request.model, len(request.prompt_token_ids), request.sampling_params.max_tokens)

    def cancel_timers(self) -> None:
        for timer in (self.deadline, self.patience, self.stall):
            if timer is not None:
                timer.cancel()


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
    ) -> None:
        self._view = view
        self._links = links
        self._codec = codec
        self._card = card
        self._timers = timers
        self._rng = rng
        self._limits = limits or DispatchLimits()
        self._runs: dict[str, _Run] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.counters = DispatchCounters()
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
        return sum(1 for run in self._runs.values() if run.wanted is not None)

    async def generate(
        self, raw: GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Accepted, Chunks, Finished; any end that is not a Finished is a BatonError. Closing it cancels the request.

        `timeout_s` counts from the first step of the generator.
        """
        started = self._timers.monotonic()
        if self._draining:
            raise Draining("this router is shutting down")
        request = await self._validated(raw)
        run = self._open(request, started, timeout_s)
        try:
            self._guarded(run, run.flight.start)
            seed = request.sampling_params.seed
            yield Accepted(request.request_id, seed, len(request.prompt_token_ids))
            while (event := await run.queue.get()) is not None:
                self._ease_stall(run)
                yield event
        finally:
            self._close(run)

    def cancel(self, request_id: str) -> None:
        """End a live request; its generator raises Cancelled. Raises RequestNotFound."""
        run = self._runs.get(request_id)
        if run is None or run.flight.is_over:
            raise RequestNotFound(f"no live request {request_id[:80]!r}")
        self._feed(run, Cancel("cancelled by the client"))

    def drain(self) -> None:
        """Take no new requests. Idempotent."""
        self._draining = True

    async def idle(self) -> None:
        """Return when no request is live."""
        await self._idle.wait()

    def end_all(self, error: BatonError) -> None:
        """End every live request with this error, on its nodes too."""
        for run in list(self._runs.values()):
            self._feed(run, GiveUp(error))

    def on_attached(self, description: NodeDescription) -> None:
        """A node is there: whoever waited for one may go on."""
        self._view.attached(description, self._timers.monotonic())
        self.changed.set()
        for run in list(self._runs.values()):
            if run.wanted is not None:
                self._guarded(run, partial(self._place, run, run.wanted))

    def on_report(self, incarnation: str, report: StepReport) -> None:
        """One engine step of a node."""
        for delta in report.deltas:
            run = self._runs.get(delta.attempt.request_id)
            if run is None:
                self.counters.late_deltas += 1
            else:
                self._feed(run, Delta(incarnation, delta))
        self._view.reported(incarnation, report.load, self._timers.monotonic())
        if report.notice is not None:
            self._view.noticed(incarnation, report.notice)
        if report.load.draining:
            self.changed.set()

    def on_lost(self, incarnation: str, reason: str) -> None:
        """A node is gone: every flight on it moves at once."""
        self._view.detached(incarnation, reason, self._timers.monotonic())
        self.changed.set()
        for run in list(self._runs.values()):
            self._feed(run, NodeGone(incarnation, reason))

    async def _validated(self, raw: GenerateRequest) -> ValidRequest:
        encode = self._codec.encode if self._codec is not None else None
        card = self._card()
        if isinstance(raw.prompt, str) and len(raw.prompt) > self._limits.thread_text_chars:
            return await asyncio.to_thread(validate, raw, card, encode, self._rng, self._limits.min_priority)
        return validate(raw, card, encode, self._rng, self._limits.min_priority)

    def _open(self, request: ValidRequest, started: float, timeout_s: float | None) -> _Run:
        if self._draining:
            raise Draining("this router is shutting down")
        if request.request_id in self._runs:
            raise DuplicateRequest(f"request {request.request_id!r} is live")
        run = _Run(request, self._rng.getrandbits(64), Answer(self._codec, request), started)
        if timeout_s is not None:
            error = DeadlineExceeded(f"the deadline of {timeout_s:.3f} s passed")
            if self._timers.monotonic() >= started + timeout_s:
                raise error
            run.deadline = self._timers.call_at(started + timeout_s, lambda: self._feed(run, GiveUp(error)))
        self._runs[request.request_id] = run
        self._idle.clear()
        self.counters.accepted += 1
        return run

    def _close(self, run: _Run) -> None:
        if not run.flight.is_over:
            self._feed(run, Cancel("the client went away"))
        run.cancel_timers()
        del self._runs[run.request.request_id]
        if not self._runs:
            self._idle.set()

    def _feed(self, run: _Run, event: FlightEvent) -> None:
        self._guarded(run, partial(run.flight.handle, event))

    def _guarded(self, run: _Run, decide: Callable[[], Sequence[FlightEffect]]) -> None:
        """Decide and act. A fault in here ends this flight, never the others."""
        try:
            self._perform(run, decide())
        except Exception as fault:
            _log.exception("request %s: %s", run.request.request_id, run.flight.story)
            error = BatonError(f"the router failed at this request: {fault}")
            if not run.flight.is_over:
                self._perform(run, run.flight.handle(GiveUp(error)))
            run.queue.end(error)

    def _perform(self, run: _Run, effects: Sequence[FlightEffect]) -> None:
        """Do what the flight says, and what follows from it, in order."""
        pending = deque(effects)
        while pending:
            match pending.popleft():
                case Place() as place:
                    pending.extend(self._place(run, place))
                case SubmitLeg(incarnation, submit):
                    self._view.dispatched(incarnation, submit.attempt, submit.num_sequences)
                    if not self._links.send(incarnation, submit):
                        pending.extend(run.flight.handle(NodeGone(incarnation, "its stream is closed")))
                case AbortLeg(incarnation, abort):
                    self._links.send(incarnation, abort)
                case LegEnded(incarnation, attempt):
                    self._view.released(incarnation, attempt)
                case EmitTokens() as tokens:
                    pending.extend(self._emit(run, tokens))
                case SequenceEnded() as ended:
                    run.queue.put_all(run.answer.end_sequence(ended))
                case Finish() as finish:
                    self._finish(run, finish)
                case Fail(error):
                    self.counters.failed += 1
                    self._end(run, error)

    def _place(self, run: _Run, place: Place) -> Sequence[FlightEffect]:
        if run.flight.is_over:
            return ()
        run.wanted = None
        try:
            placement = choose(self._view.candidates(), run.demand, place.exclude)
        except InvalidRequest as error:
            return run.flight.handle(GiveUp(error))
        except NoCapacity as error:
            run.wanted = place
            run.why_waiting = error
            if run.patience is None:
                limits = self._limits
                patience_s = limits.capacity_wait_s if place.attempt == 1 else limits.recovery_wait_s
                until = self._timers.monotonic() + patience_s
                run.patience = self._timers.call_at(until, lambda: self._feed(run, GiveUp(run.why_waiting)))
            return ()
        if run.patience is not None:
            run.patience.cancel()
            run.patience = None
        if place.attempt > 1:
            self.counters.retried += 1
            _log.info("request %s: attempt %d, %s", run.request.request_id, place.attempt, run.flight.story)
        return run.flight.handle(Placed(placement))

    def _emit(self, run: _Run, tokens: EmitTokens) -> Sequence[FlightEffect]:
        if run.first_token_at is None:
            run.first_token_at = self._timers.monotonic()
        run.queue.put_all(run.answer.push(tokens))
        if run.queue.backlog > self._limits.max_backlog_tokens and run.stall is None:
            until = self._timers.monotonic() + self._limits.stall_s
            error = SlowReader(f"{run.queue.backlog} tokens were left unread for {self._limits.stall_s:g} s")
            run.stall = self._timers.call_at(until, lambda: self._feed(run, GiveUp(error)))
        found = run.answer.found(tokens.sequence_index)
        return () if found is None else run.flight.handle(StopStringFound(found, tokens.sequence_index))

    def _ease_stall(self, run: _Run) -> None:
        if run.stall is not None and run.queue.backlog <= self._limits.max_backlog_tokens:
            run.stall.cancel()
            run.stall = None

    def _finish(self, run: _Run, finish: Finish) -> None:
        run.queue.put_all(run.answer.finish(finish))
        now = self._timers.monotonic()
        first = now if run.first_token_at is None else run.first_token_at
        timings = finish.timings
        run.queue.put(
            Finished(
                finish_reason=run.answer.finish_reason,
                stop_reason=run.answer.stop_reason,
                prompt_tokens=len(run.request.prompt_token_ids),
                completion_tokens=run.answer.num_tokens,
                cached_tokens=timings.cached_tokens,
                queue_ms=timings.queue_ms,
                prefill_ms=timings.prefill_ms,
                transfer_ms=timings.transfer_ms,
                ttft_ms=(first - run.started) * 1e3,
                total_ms=(now - run.started) * 1e3,
                kv_bytes=timings.kv_bytes,
                path=finish.path,
            )
        )
        self.counters.finished += 1
        self._end(run, None)

    def _end(self, run: _Run, error: BatonError | None) -> None:
        """The flight is over: nothing of it may fire any more, though its client may still read."""
        run.wanted = None
        run.cancel_timers()
        run.queue.end(error)
