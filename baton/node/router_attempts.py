"""Takes what routers ask of a node: submits, adoptions, aborts; and says which router gets the engine's results.

What a router asked for outlives its stream by a grace, in which any router can adopt it (`attempts/attempts.py`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from baton.background import current_watch
from baton.clock import Clock
from baton.engine.batch import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from baton.messages.adapters import AdapterList
from baton.messages.ids import AttemptKey
from baton.messages.node import (
    ENDED_WELL,
    Abort,
    Adopt,
    Leg,
    MoveOut,
    NodeDescription,
    Outcome,
    RequestDelta,
    RouterMessage,
    Submit,
    WatchKVCache,
)
from baton.node.adapters.node_adapters import NodeAdapters
from baton.node.attempts.attempt_times import AttemptClock, AttemptSpans
from baton.node.attempts.attempts import Attempt, AttemptBook
from baton.node.attempts.submit_check import engine_request, objection
from baton.node.drain import GIVEN_BACK, Drain
from baton.node.driver import EngineDriver
from baton.node.reports.logs import EventLog
from baton.node.reports.reports import request_delta
from baton.node.role import NodeRole
from baton.node.router_streams import Port, RouterStreams
from baton.observe.logs import of_attempt

_log = logging.getLogger(__name__)


class RouterAttempts:
    """The attempts of all routers on one node. Belongs to the event loop."""

    def __init__(
        self,
        description: NodeDescription,
        role: NodeRole,
        driver: EngineDriver,
        book: AttemptBook,
        streams: RouterStreams,
        drain: Drain,
        adapters: NodeAdapters,
        log: EventLog,
        clock: Clock,
        spans: AttemptSpans | None = None,
    ) -> None:
        """`spans` traces attempts; None: none are traced."""
        self._description = description
        self._role = role
        self._driver = driver
        self.book = book
        self._streams = streams
        self._drain = drain
        self._adapters = adapters
        self._log = log
        self._clock = clock
        self._spans = spans
        self._watch = current_watch.get()
        self._sweep: asyncio.TimerHandle | None = None
        """When orphans are looked for."""
        self._is_closed = False

    def open_port(self, router_id: str, router_incarnation: str, keeps: Sequence[AttemptKey]) -> Port:
        """Open the stream of a router.

        An earlier stream of the same router process is closed, and its attempts are aborted, except those that the
        router `keeps`: they wait to be adopted, like those of a router that is gone.
        """
        if router_incarnation:
            for port in self._streams.ports:
                if port.router_incarnation == router_incarnation:
                    port.close()
            self._abort_unwanted(self.book.forget_orphans_of(router_incarnation, frozenset(keeps)))
        return self._streams.open(router_id, router_incarnation, self._receive, self._refuse, self._port_closed)

    def close(self) -> None:
        """End all streams of routers, and abort what runs."""
        self._is_closed = True
        for port in self._streams.ports:
            port.close()
        self._abort_unwanted(self.book.expire(math.inf))
        if self._sweep is not None:
            self._sweep.cancel()

    def results(self, outputs: EngineCoreOutputs) -> Mapping[int | None, Sequence[RequestDelta]]:
        """What routers are told of the engine's outputs, by the client index of the router that owns the attempt now;
        None for an attempt without a router.
        """
        deltas: dict[int | None, list[RequestDelta]] = {}
        for client_index, of_client in outputs.items():
            for output in of_client:
                owner, delta = self._delta_and_owner(client_index, output)
                deltas.setdefault(owner, []).append(delta)
        if outputs:
            self._set_sweep_timer()
            self._drain.note_change()
        return deltas

    def record_event(self, event: EngineCoreEvent) -> None:
        """Log an event of the engine, and note it for the attempt's timings."""
        attempt, sequence_index = self.book.get(event.attempt), event.sequence_index
        detail = f"sequence {sequence_index}" if sequence_index else ""
        self._log.record_at(event.time, event.type.value, event.attempt, event.value, detail)
        if sequence_index or event.type is EngineCoreEventType.CHUNK_COMPUTED:
            return
        if attempt is not None and attempt.runs:
            attempt.clock.note(event)

    # --- messages of routers ---

    def _receive(self, port: Port, message: RouterMessage) -> None:
        """Do what a router asks for."""
        if isinstance(message, WatchKVCache):
            port.watches_kv_cache = True
            self._driver.watch_kv_cache()
            return
        if isinstance(message, AdapterList):
            self._adapters.set_list(port.client_index, message.adapters)
        elif isinstance(message, Adopt):
            self._adopt(port, message)
        elif isinstance(message, Abort):
            self._abort(port, message)
        elif isinstance(message, MoveOut):
            self._move(port, message)
        else:
            self._submit(port, message)

    def _submit(self, port: Port, submit: Submit) -> None:
        running = self.book.running(submit.attempt)
        if running is not None and running.owner == port.client_index:
            self._log.record("duplicate_submit", submit.attempt)
            return
        problem = objection(submit, self._description)
        if self._drain.refuses_new_work:
            self._reject(port, submit.attempt, "the node is draining", Outcome.REFUSED)
        elif running is not None:
            self._reject(port, submit.attempt, f"attempt: already runs here for {self._owner_name(running)}")
        elif problem is not None:
            self._reject(port, submit.attempt, problem)
        elif (adapter := submit.spec.adapter) and (why := self._adapters.book.why_not(adapter)):
            self._reject(port, submit.attempt, why, Outcome.ADAPTER_UNAVAILABLE)
        else:
            self._start_attempt(port, submit)

    def _start_attempt(self, port: Port, submit: Submit) -> None:
        # The time in the engine's inbox counts as time in the queue: the client waits during both.
        num_sequences = 1 if submit.leg is Leg.PREFILL else submit.spec.sampling_params.n
        clock = AttemptClock(self._clock.monotonic(), num_sequences=num_sequences)
        owner, router = port.client_index, port.router_incarnation
        attempt = Attempt(submit.attempt, owner, router, clock, submit.output_token_ids, submit.takeover)
        self.book.add(attempt)
        if self._spans is not None:
            self._spans.begun(submit, clock)
        port.moved_away.discard(submit.attempt)
        self._drain.note_change()
        # This tells the router that the attempt has begun here. One that had not may be tried elsewhere at no cost.
        self._streams.tell(port, RequestDelta(submit.attempt))
        request = engine_request(submit, self._description.eos_token_ids, port.client_index)
        self._driver.submit(request, self._adapters.book.directory_of(request.adapter) if request.adapter else "")

    def _owner_name(self, attempt: Attempt) -> str:
        owner = self._streams.get(attempt.owner)
        return f"router {owner.router_id}" if owner is not None else "a router that is gone"

    def _adopt(self, port: Port, adopt: Adopt) -> None:
        key, takeover = adopt.attempt, adopt.takeover
        newer = self.book.newer_takeover(key, takeover, port.router_incarnation)
        if newer is not None:
            # The message is late: the client has left that router, and has reached another one with a later call.
            self._log.record("fenced_adopt", key, takeover, port.router_id)
            self._reject_moved(port, key, "a router with a later call of the client has adopted it", newer)
            return
        known = self.book.get(key)
        before = self._streams.get(known.owner) if known is not None else None
        attempt = self.book.adopt(key, port.client_index, port.router_incarnation, self._clock.monotonic(), takeover)
        if attempt is None:
            self._reject(port, key, "the attempt is unknown here", Outcome.UNKNOWN)
            return
        self._log.record("adopted", key, 0, port.router_id)
        if before is not None and before is not port:
            before.moved_away.add(key)
            self._reject_moved(before, key, f"router {port.router_id} has adopted it", takeover)
        port.moved_away.discard(key)
        for delta in attempt.replayed(adopt.num_tokens):
            self._streams.tell(port, delta)
        self._set_sweep_timer()

    def _move(self, port: Port, move: MoveOut) -> None:
        """Let another node continue an attempt. If it can't, that node is told so, and its router by that node."""
        running = self.book.running(move.attempt)
        owner = running.owner if running is not None else port.client_index
        is_next = move.to.request_id == move.attempt.request_id and move.to != move.attempt
        if owner != port.client_index or not is_next or self.book.get(move.to) is not None:
            self._log.record("fenced_move", move.attempt, 0, port.router_id)
            return
        self._log.record("move", move.attempt, move.cut_by, str(move.to))
        # The engine answers, too, if the attempt is not there any more.
        self._role.move_asked(move.to, str(move.attempt))
        self._driver.move(str(move.attempt), move)

    def _abort(self, port: Port, abort: Abort) -> None:
        attempt = self.book.get(abort.attempt)
        has_other_owner = attempt is not None and attempt.owner not in (None, port.client_index)
        newer = self.book.newer_takeover(abort.attempt, abort.takeover, port.router_incarnation)
        if has_other_owner or abort.attempt in port.moved_away or newer is not None:
            self._log.record("fenced_abort", abort.attempt, 0, port.router_id)
            return
        self._log.record("abort", abort.attempt, 0, abort.reason)
        if abort.sequence_index is not None:
            self._driver.abort_sequence(str(abort.attempt), abort.sequence_index)
            return
        if attempt is not None:
            runs = attempt.runs
            self.book.aborted(attempt)
            self._end_span(attempt.key, "" if abort.reason == ENDED_WELL else abort.reason)
            if runs:
                self._driver.abort([str(abort.attempt)])
        # The blocks of an attempt that ended here long ago may still be offered.
        self._role.attempt_aborted(abort.attempt)

    # --- attempts that nobody wants, and how attempts end ---

    def _abort_unwanted(self, attempts: Sequence[Attempt]) -> None:
        """Abort attempts whose router is gone and that no other router has adopted."""
        self._driver.abort([str(attempt.key) for attempt in attempts])
        for attempt in attempts:
            self._end_span(attempt.key, "its router is gone")
            self._log.record("abort", attempt.key, 0, "its router is gone")
            self._role.attempt_aborted(attempt.key)

    def _expire(self) -> None:
        """Forget attempts whose grace is over."""
        self._sweep = None
        self._abort_unwanted(self.book.expire(self._clock.monotonic()))
        self._drain.note_change()
        self._set_sweep_timer()

    def _set_sweep_timer(self) -> None:
        due = self.book.next_deadline
        # A timer that is set already fires early enough, since later deadlines follow earlier ones.
        if due is not None and self._sweep is None and not self._is_closed:
            delay = max(0.0, due - self._clock.monotonic())
            expire = self._watch.guarded(self._expire, "orphans")
            self._sweep = asyncio.get_running_loop().call_later(delay, expire)

    @staticmethod
    def _log_end(key: AttemptKey, outcome: Outcome, error: str) -> None:
        if outcome is Outcome.ERROR:
            _log.warning("attempt failed: %s", error, extra=of_attempt(key))
        elif _log.isEnabledFor(logging.DEBUG):
            _log.debug("attempt ended", extra={**of_attempt(key), "outcome": outcome.value, "error": error})

    def _end_span(self, key: AttemptKey, error: str) -> None:
        if self._spans is not None:
            self._spans.ended(key, self._clock.monotonic(), error)

    def _reject(self, port: Port, attempt: AttemptKey, error: str, outcome: Outcome = Outcome.ERROR) -> None:
        """Tell a router that the attempt does not run here, and why."""
        self._streams.tell(port, RequestDelta(attempt, outcome=outcome, error=error))

    def _reject_moved(self, port: Port, attempt: AttemptKey, error: str, takeover: int) -> None:
        """Tell a router that the attempt belongs to another router, the one with this takeover number."""
        self._streams.tell(port, RequestDelta(attempt, outcome=Outcome.MOVED, error=error, takeover=takeover))

    def _refuse(self, port: Port, attempt: AttemptKey, error: str) -> None:
        """Answer a message that could not be read: abort its attempt, if it runs for this router, with an error."""
        running = self.book.running(attempt)
        if running is not None and running.owner == port.client_index:
            self._abort(port, Abort(attempt, error))
        self._reject(port, attempt, error)

    def _port_closed(self, port: Port) -> None:
        self._adapters.book.forget_port(port.client_index)
        now = self._clock.monotonic()
        self.book.detached(port.client_index, now)
        self._abort_unwanted(self.book.expire(now))
        self._set_sweep_timer()
        if port.watches_kv_cache and not any(remaining.watches_kv_cache for remaining in self._streams.ports):
            self._driver.unwatch_kv_cache()

    def _take_arrived(self, attempt: Attempt, end: int) -> None:
        """Note the tokens that have come with the KV of a stream that was moved here, before the one with index `end`.

        A router that has adopted the attempt meanwhile may lack them.
        """
        num_given = len(attempt.given)
        arrived = tuple(self._role.arrived_tokens(attempt.key)[: end - num_given])
        attempt.given += arrived
        port = self._streams.get(attempt.owner)
        if port is not None:
            self._streams.tell(port, RequestDelta(attempt.key, num_given, arrived))

    def _delta_and_owner(self, client_index: int, output: EngineCoreOutput) -> tuple[int | None, RequestDelta]:
        """The client index of the router that is told of an output, or None if no router is, and the delta for it."""
        key, outcome, is_first = output.attempt, output.outcome, output.sequence_index == 0
        attempt = self.book.get(key)
        if attempt is None:
            # The attempt was aborted a moment ago: its router is told of its end, if that still owned it.
            port = self._streams.get(client_index)
            owner = client_index if port is not None and key not in port.moved_away else None
            return owner, request_delta(output)
        timings = prompt_timings = None
        if is_first and attempt.lacks_tokens_before(output.first_index):
            self._take_arrived(attempt, output.first_index)
        if is_first and (outcome is not None or output.first_index - len(attempt.given) <= 1):
            moved, now = self._role.transfer_figures(key), self._clock.monotonic()
            timings = attempt.clock.timings(now, output.num_cached_tokens, output.num_external_tokens, moved)
            self._role.attempt_timed(key, timings)
            prompt_timings = moved.prompt_timings if moved is not None else None
        elif outcome is not None and attempt.timings is not None:
            timings = replace(attempt.timings, decode_ms=attempt.clock.decode_ms(self._clock.monotonic()))
        delta = request_delta(output, timings, prompt_timings)
        if self._drain.gives_back and outcome is Outcome.ABORTED:
            delta = replace(delta, error=GIVEN_BACK)
        if attempt.runs:
            attempt.note(delta)
            if outcome is not None and attempt.clock.sequence_ended(outcome):
                self.book.ended(attempt, self._clock.monotonic())
                error = str(output.error or "")
                self._end_span(key, error)
                self._log_end(key, outcome, error)
        return attempt.owner, delta
