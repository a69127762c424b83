"""Stands between a node's routers and its engine: takes submits, aborts and adoptions, and reports each step.

What a router asked for outlives its stream by a grace, in which any router can adopt it (`attempts/attempts.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from baton.background import current_watch
from baton.clock import Clock
from baton.engine.batch import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
)
from baton.engine.kv_cache.events import KVEventBatch, KVSnapshot
from baton.engine.sequences.sequence_group import lone_sequence_id, split_sequence_id
from baton.errors import ConfigError, Draining, InvalidRequest
from baton.messages.adapters import AdapterList, AdapterReport
from baton.messages.ids import AttemptKey
from baton.messages.node import (
    ENDED_WELL,
    HEARTBEAT_S,
    Abort,
    Adopt,
    Leg,
    LoadReport,
    NodeDescription,
    Outcome,
    RequestDelta,
    Role,
    RouterMessage,
    StepFigures,
    StepReport,
    Submit,
    WatchKVCache,
)
from baton.messages.node_report import ComputePath, NodeReport, OpenHandoff, RankReport, TraceEvent, TraceStep
from baton.model_formats.adapters import AdapterInfo
from baton.node.adapters.adapter_threads import AdapterThreads
from baton.node.adapters.node_adapters import NodeAdapters
from baton.node.attempts.attempt_clock import AttemptClock
from baton.node.attempts.attempt_spans import AttemptSpans
from baton.node.attempts.attempts import Attempt, AttemptBook
from baton.node.attempts.engine_request import engine_request
from baton.node.attempts.submit_check import objection
from baton.node.driver import EngineDriver, StepNews
from baton.node.leftovers import GIVE_UP_AFTER_S, describe_left, only_reads_left
from baton.node.port import Port
from baton.node.prefix_cache_reset import forget_cached_blocks
from baton.node.reports.deltas import request_delta, split_by_size
from baton.node.reports.event_log import EventLog
from baton.node.reports.kv_cache_updates import kv_cache_updates
from baton.node.reports.reports import handoff_notice, load_report, step_figures
from baton.node.reports.step_log import StepLog
from baton.node.role import NodeRole
from baton.observe.logs import of_attempt
from baton.observe.metrics import Figure

_log = logging.getLogger(__name__)
_GIVEN_BACK = "it changes its role, and what it ran had its time to end"
LOAD_EVERY_S = 0.1
"""A router without requests here is told of the load at most this often. Of ten routers of a busy node nine may have
none, and would otherwise get a report of each step for the load alone."""


class NodeService:
    """The service of one node for its routers. Belongs to the event loop."""

    def __init__(
        self,
        description: NodeDescription,
        role: NodeRole,
        driver: EngineDriver,
        log: EventLog,
        clock: Clock,
        on_drain: Callable[[], None],
        orphan_grace_s: float = 0.0,
        on_set_role: Callable[[Role], None] = lambda role: None,
        spans: AttemptSpans | None = None,
        compute_paths: Sequence[ComputePath] = (),
        gave_up: str = "",
        ranks: Callable[[], Sequence[RankReport]] = tuple,
        adapters: AdapterThreads | None = None,
    ) -> None:
        """`orphan_grace_s`: how long attempts outlive their router's stream, and are kept when they have ended.

        `on_drain` and `on_set_role` ask the process to end, or to start again in another role. `spans` traces attempts;
        None: none are traced. `gave_up`: what the drain of the incarnation before left behind, for operators.
        `ranks` reports on the processes that compute the model. `adapters` inspects adapters; None: all are refused.
        """
        self._description = description
        self._compute_paths = compute_paths
        self._ranks = ranks
        self._watch = current_watch.get()
        self._role = role
        self._driver = driver
        self._log = log
        self._steps = StepLog()
        self._clock = clock
        self._on_drain = on_drain
        self._on_set_role = on_set_role
        self._attempts = AttemptBook(orphan_grace_s)
        self._adapters = NodeAdapters(adapters, self._push_adapters, driver.keep_adapters)
        self._spans = spans
        self._sweep: asyncio.TimerHandle | None = None
        self._ports: dict[int, Port] = {}
        self._indices = itertools.count(1)
        self._load = LoadReport(total_blocks=description.num_blocks, free_blocks=description.num_blocks)
        self._waiting_by_reason: Mapping[str, int] = {}
        self._gave_up = gave_up
        self._notice = gave_up
        self._draining = False
        self._gives_back = False
        """Whether what ran was given back, so that an attempt which ends as aborted is not the router's doing."""
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    # Called by gRPC (`NodeHandler`).

    def describe(self) -> NodeDescription:
        return self._description

    def report(self) -> NodeReport:
        handoff = self._role.handoff_report()
        return NodeReport(
            self._description,
            self._load,
            self._waiting_by_reason,
            handoff,
            self._compute_paths,
            self._ranks(),
            self._adapters.rows(),
        )

    def open_port(self, router_id: str, router_incarnation: str = "", keeps: Sequence[AttemptKey] = ()) -> Port:
        """Open the stream of a router; raises Draining once the node has closed.

        An earlier stream of the same router process is closed, and its attempts are aborted, except those that the
        router `keeps`: they wait to be adopted, like those of a router that is gone.
        """
        if self._closed:
            raise Draining(f"node {self._description.node_id} has stopped")
        if router_incarnation:
            self._end_earlier_streams(router_incarnation, keeps)
        index = next(self._indices)
        port = Port(index, router_id, router_incarnation, self._receive, self._refuse, self._close_port)
        self._ports[port.client_index] = port
        port.push(StepReport((), self._load, notice=self._notice or None))
        return port

    def drain(self) -> None:
        """Ask the process to refuse new work, and to end when the running work is done."""
        self._on_drain()

    def set_role(self, incarnation: str, role: Role) -> None:
        """Ask the process to start again in this role when the running work is done.

        Raises ConfigError if this is not the incarnation that is meant, InvalidRequest for a role that no node has.
        """
        self._require_incarnation(incarnation)
        if role is Role.ROUTER:
            raise InvalidRequest("role", "a node can be prefill or decode")
        if role is not self._description.role or self._draining:
            self._on_set_role(role)

    async def reset_prefix_cache(self, incarnation: str) -> int:
        """Forget all cached KV; returns how many blocks that were.

        Raises ConfigError if this is not the incarnation that is meant, CacheInUse while blocks are in use, and
        DeadlineExceeded when a step takes too long.
        """
        self._require_incarnation(incarnation)
        found = await forget_cached_blocks(self._driver)
        _log.info("the prefix cache was reset, as an operator asked", extra={"blocks": found})
        return found

    async def inspect_adapter(self, incarnation: str, directory: str) -> AdapterInfo:
        """Read the adapter in a directory and compare it with the model.

        Raises ConfigError if this is not the incarnation that is meant, AdapterRefused, DeadlineExceeded, Overloaded.
        """
        self._require_incarnation(incarnation)
        return await self._adapters.inspect(directory)

    def adapter_figures(self) -> Sequence[Figure]:
        """The metrics of adapters."""
        return self._adapters.figures()

    def trace(self, after: int) -> Sequence[TraceEvent]:
        return self._log.after(after)

    def steps(self, after: int) -> Sequence[TraceStep]:
        return self._steps.after(after)

    # Called by the process.

    def refuse_new_work(self) -> None:
        """Answer every submit with REFUSED from now on."""
        self._draining = True
        self._set_load(replace(self._load, draining=True))
        self._push_reports({})

    async def wait_idle(self) -> Sequence[OpenHandoff]:
        """Return when no request runs or waits, no block is leased or quarantined, and nothing waits for adoption.

        Returns also when nothing but reads was left for GIVE_UP_AFTER_S, since those may never end. The result is the
        hand-offs that those reads belong to; operators are told of them.
        """
        since: float | None = None
        while not self._idle.is_set():
            left, now = self._open_handoffs(), self._clock.monotonic()
            if self._has_requests or not only_reads_left(left):
                since = None
            elif since is None:
                since = now
            elif now - since >= GIVE_UP_AFTER_S:
                self._give_up_on(left)
                return left
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._idle.wait()
        return ()

    def give_back_work(self) -> int:
        """Abort all attempts that run, so that their routers continue them at other nodes; returns how many.

        To be called after `refuse_new_work`. Blocks that peers still read stay until those reads are over.
        """
        self._gives_back = True
        given_back = self._attempts.all_running()
        self._driver.abort([str(attempt.key) for attempt in given_back])
        for attempt in given_back:
            self._log.record("abort", attempt.key, 0, _GIVEN_BACK)
            self._role.attempt_aborted(attempt.key)
        return len(given_back)

    def work_left(self) -> str:
        """What keeps the node from being idle, for a log line."""
        load, waiting = self._load, self._load.waiting + self._load.waiting_for_remote_kvs
        blocks = f"{load.leased_blocks} blocks leased, {load.quarantined_blocks} quarantined"
        return f"{load.running} requests running, {waiting} waiting, {self._attempts.num_awaited} to adopt, {blocks}"

    async def heartbeat(self) -> None:
        """Send a report to every router that got none for a while, as a sign of life. Runs until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._push_changed_notice()
            for port in list(self._ports.values()):
                if port.is_silent:
                    port.push(StepReport((), self._load))
                port.is_silent = True

    def on_step(self, news: StepNews) -> None:
        """Report what a step of the engine brought."""
        for event in news.events:
            self._record_event(event)
        if news.adapters is not None:
            self._adapters.on_news(news.adapters)
        self._waiting_by_reason = dict(news.stats.num_requests_waiting_by_reason.items())
        self._set_load(load_report(news.stats, draining=self._draining))
        step = step_figures(news.step) if news.step is not None else None
        if news.step is not None and step is not None:
            self._steps.record(news.step.ended_at, step, news.step.goes_on)
        goes_on = news.step is not None and news.step.goes_on
        self._push_reports({index: outputs.outputs for index, outputs in news.outputs.items()}, step, goes_on=goes_on)
        if news.kv_cache is not None:
            self._push_kv_cache(news.kv_cache)

    def close(self) -> None:
        """End all streams of routers, abort what runs, and accept no more streams."""
        self._closed = True
        for port in list(self._ports.values()):
            port.close()
        self._abort_unwanted(self._attempts.expire(math.inf))
        if self._sweep is not None:
            self._sweep.cancel()
        self._adapters.close()

    def running_for(self, port: Port) -> list[AttemptKey]:
        """The attempts that this router submitted or adopted and that have not ended."""
        return [attempt.key for attempt in self._attempts.running_for(port.client_index)]

    # State of the node.

    def _require_incarnation(self, incarnation: str) -> None:
        ours = self._description.incarnation
        if incarnation not in ("", ours):
            raise ConfigError(f"this is {ours}, not {incarnation}")

    @property
    def _has_requests(self) -> bool:
        load = self._load
        return bool(load.running or load.waiting or load.waiting_for_remote_kvs or self._attempts.num_awaited)

    def _open_handoffs(self) -> Sequence[OpenHandoff]:
        return self._role.handoff_report().open

    def _give_up_on(self, left: Sequence[OpenHandoff]) -> None:
        self._gave_up = describe_left(left)
        _log.warning("%s", self._gave_up)
        for handoff in left:
            self._log.record("drain_gave_up", handoff.attempt, handoff.num_blocks, f"{handoff.state} {handoff.peer}")
        self._push_changed_notice()

    def _push_changed_notice(self) -> None:
        """Tell all routers what operators should know, if that has changed."""
        notice = self._gave_up or handoff_notice(self._role.refused_links(), self._role.failed_probes())
        if notice == self._notice:
            return
        self._notice = notice
        for port in list(self._ports.values()):
            port.push(StepReport((), self._load, notice=notice))

    # Messages of routers.

    def _receive(self, port: Port, message: RouterMessage) -> None:
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
        else:
            self._submit(port, message)

    def _submit(self, port: Port, submit: Submit) -> None:
        running = self._attempts.running(submit.attempt)
        if running is not None and running.owner == port.client_index:
            self._log.record("duplicate_submit", submit.attempt)
            return
        problem = objection(submit, self._description)
        if self._draining:
            self._reject(port, submit.attempt, "the node is draining", Outcome.REFUSED)
        elif running is not None:
            self._reject(port, submit.attempt, f"attempt: already runs here for {self._owner_name(running)}")
        elif problem is not None:
            self._reject(port, submit.attempt, problem)
        elif submit.adapter and (why := self._adapters.why_not(submit.adapter)):
            self._reject(port, submit.attempt, why, Outcome.ADAPTER_UNAVAILABLE)
        else:
            self._start_attempt(port, submit)

    def _start_attempt(self, port: Port, submit: Submit) -> None:
        # The time in the engine's inbox counts as time in the queue: the client waits during both.
        num_sequences = 1 if submit.leg is Leg.PREFILL else submit.sampling_params.n
        clock = AttemptClock(self._clock.monotonic(), num_sequences=num_sequences)
        owner, router = port.client_index, port.router_incarnation
        attempt = Attempt(submit.attempt, owner, router, clock, submit.output_token_ids, submit.takeover)
        self._attempts.add(attempt)
        if self._spans is not None:
            self._spans.begun(submit, clock)
        port.moved_away.discard(submit.attempt)
        self._idle.clear()
        # This tells the router that the attempt has begun here. One that had not may be tried elsewhere at no cost.
        port.push(StepReport((RequestDelta(submit.attempt),), self._load))
        request = engine_request(submit, self._description.eos_token_ids, port.client_index)
        self._driver.submit(request, self._adapters.directory_of(submit.adapter) if submit.adapter else "")

    def _owner_name(self, attempt: Attempt) -> str:
        owner = self._ports.get(attempt.owner) if attempt.owner is not None else None
        return f"router {owner.router_id}" if owner is not None else "a router that is gone"

    def _adopt(self, port: Port, adopt: Adopt) -> None:
        key, takeover = adopt.attempt, adopt.takeover
        newer = self._attempts.newer_takeover(key, takeover, port.router_incarnation)
        if newer is not None:
            # The message is late: the client has left that router, and has reached another one with a later call.
            self._log.record("fenced_adopt", key, takeover, port.router_id)
            self._reject_moved(port, key, "a router with a later call of the client has adopted it", newer)
            return
        known = self._attempts.get(str(key))
        before = self._ports.get(known.owner) if known is not None and known.owner is not None else None
        attempt = self._attempts.adopt(
            key, port.client_index, port.router_incarnation, self._clock.monotonic(), takeover
        )
        if attempt is None:
            self._reject(port, key, "the attempt is unknown here", Outcome.UNKNOWN)
            return
        self._log.record("adopted", key, 0, port.router_id)
        if before is not None and before is not port:
            before.moved_away.add(key)
            self._reject_moved(before, key, f"router {port.router_id} has adopted it", takeover)
        port.moved_away.discard(key)
        for delta in attempt.replayed(adopt.num_tokens):
            port.push(StepReport((delta,), self._load))
        self._set_sweep_timer()

    def _abort(self, port: Port, abort: Abort) -> None:
        attempt = self._attempts.get(str(abort.attempt))
        has_other_owner = attempt is not None and attempt.owner not in (None, port.client_index)
        newer = self._attempts.newer_takeover(abort.attempt, abort.takeover, port.router_incarnation)
        if has_other_owner or abort.attempt in port.moved_away or newer is not None:
            self._log.record("fenced_abort", abort.attempt, 0, port.router_id)
            return
        self._log.record("abort", abort.attempt, 0, abort.reason)
        if abort.sequence_index is not None:
            self._driver.abort([lone_sequence_id(str(abort.attempt), abort.sequence_index)])
            return
        if attempt is not None:
            runs = attempt.runs
            self._attempts.aborted(attempt)
            self._end_span(attempt.key, "" if abort.reason == ENDED_WELL else abort.reason)
            if runs:
                self._driver.abort([str(abort.attempt)])
        # The blocks of an attempt that ended here long ago may still be offered.
        self._role.attempt_aborted(abort.attempt)

    def _end_earlier_streams(self, router_incarnation: str, keeps: Sequence[AttemptKey]) -> None:
        for port in list(self._ports.values()):
            if port.router_incarnation == router_incarnation:
                port.close()
        self._abort_unwanted(self._attempts.forget_orphans_of(router_incarnation, frozenset(keeps)))

    # Attempts that nobody wants, and how attempts end.

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
        self._abort_unwanted(self._attempts.expire(self._clock.monotonic()))
        self._set_load(self._load)
        self._set_sweep_timer()

    def _set_sweep_timer(self) -> None:
        due = self._attempts.next_deadline
        # A timer that is set already fires early enough, since later deadlines follow earlier ones.
        if due is not None and self._sweep is None and not self._closed:
            delay = max(0.0, due - self._clock.monotonic())
            expire = self._watch.guarded(self._expire, "orphans")
            self._sweep = asyncio.get_running_loop().call_later(delay, expire)

    @staticmethod
    def _log_end(key: AttemptKey, outcome: Outcome, error: str | None) -> None:
        if outcome is Outcome.ERROR:
            _log.warning("attempt failed: %s", error, extra=of_attempt(key))
        elif _log.isEnabledFor(logging.DEBUG):
            _log.debug("attempt ended", extra={**of_attempt(key), "outcome": outcome.value, "error": error or ""})

    def _end_span(self, key: AttemptKey, error: str) -> None:
        if self._spans is not None:
            self._spans.ended(key, self._clock.monotonic(), error)

    def _reject(self, port: Port, attempt: AttemptKey, error: str, outcome: Outcome = Outcome.ERROR) -> None:
        """Tell a router that the attempt does not run here, and why."""
        port.push(StepReport((RequestDelta(attempt, outcome=outcome, error=error),), self._load))

    def _reject_moved(self, port: Port, attempt: AttemptKey, error: str, takeover: int) -> None:
        """Tell a router that the attempt belongs to another router, the one with this takeover number."""
        delta = RequestDelta(attempt, outcome=Outcome.MOVED, error=error, takeover=takeover)
        port.push(StepReport((delta,), self._load))

    def _refuse(self, port: Port, attempt: AttemptKey, error: str) -> None:
        """Answer a message that could not be read: abort its attempt, if it runs for this router, with an error."""
        running = self._attempts.running(attempt)
        if running is not None and running.owner == port.client_index:
            self._abort(port, Abort(attempt, error))
        self._reject(port, attempt, error)

    def _close_port(self, port: Port) -> None:
        self._ports.pop(port.client_index, None)
        self._adapters.forget_port(port.client_index)
        now = self._clock.monotonic()
        self._attempts.detached(port.client_index, now)
        self._abort_unwanted(self._attempts.expire(now))
        self._set_sweep_timer()
        if port.watches_kv_cache and not any(other.watches_kv_cache for other in self._ports.values()):
            self._driver.unwatch_kv_cache()

    # News of the engine.

    def _record_event(self, event: EngineCoreEvent) -> None:
        request_id, sequence_index = split_sequence_id(event.request_id)
        attempt = self._attempts.get(request_id)
        key = attempt.key if attempt is not None else AttemptKey.parse(request_id)
        detail = f"sequence {sequence_index}" if sequence_index else ""
        self._log.record_at(event.time, event.type.value, key, event.value, detail)
        if sequence_index or event.type is EngineCoreEventType.CHUNK_COMPUTED:
            return
        if attempt is not None and attempt.runs:
            attempt.clock.note(event)

    def _set_load(self, load: LoadReport) -> None:
        self._load = load
        if self._has_requests or load.leased_blocks or load.quarantined_blocks:
            self._idle.clear()
        else:
            self._idle.set()

    def _push_reports(
        self,
        outputs: Mapping[int, Sequence[EngineCoreOutput]],
        step: StepFigures | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        """Push a report with the outputs to each router that needs one.

        `goes_on`: another step follows, so that a router which is not told of this one is told of a later one.
        """
        deltas: dict[int | None, list[RequestDelta]] = {index: [] for index in self._ports}
        for client_index, of_client in outputs.items():
            for output in of_client:
                owner, delta = self._delta_and_owner(client_index, output)
                if owner in deltas:
                    deltas[owner].append(delta)
        now = self._clock.monotonic()
        owners = self._attempts.owners() if goes_on and len(self._ports) > 1 else set(self._ports)
        for index, port in list(self._ports.items()):
            if index not in owners and not deltas[index] and now - port.step_reported_at < LOAD_EVERY_S:
                continue
            port.step_reported_at = now
            *parts, last = split_by_size(deltas[index])
            for part in parts:
                port.push(StepReport(part, self._load))
            port.push(StepReport(last, self._load, step=step))
        if outputs:
            self._set_sweep_timer()
            self._set_load(self._load)

    def _push_adapters(self, client_index: int, report: AdapterReport) -> None:
        """Tell a router which of its adapters the node acknowledges."""
        port = self._ports.get(client_index)
        if port is not None:
            port.push(StepReport((), self._load, adapters=report))

    def _push_kv_cache(self, news: KVEventBatch | KVSnapshot) -> None:
        """Push changes of the prefix cache; they come after the tokens, because nobody waits for them."""
        updates = kv_cache_updates(news)
        for port in list(self._ports.values()):
            port.knows_kv_cache |= port.watches_kv_cache and isinstance(news, KVSnapshot)
            if port.knows_kv_cache:
                for update in updates:
                    port.push(StepReport((), self._load, update))

    def _delta_and_owner(self, client_index: int, output: EngineCoreOutput) -> tuple[int | None, RequestDelta]:
        """The client index of the router that is told of an output, or None if no router is, and the delta for it."""
        request_id, sequence_index = output.request_id, 0
        attempt = self._attempts.get(request_id)
        if attempt is None:
            request_id, sequence_index = split_sequence_id(request_id)
            attempt = self._attempts.get(request_id)
        outcome = output.outcome
        if attempt is None:
            # It was aborted a moment ago: the router that submitted it is told of its end, if it still owned it.
            key = AttemptKey.parse(request_id)
            port = self._ports.get(client_index)
            owner = client_index if port is not None and key not in port.moved_away else None
            return owner, request_delta(key, sequence_index, output, outcome)
        timings = prompt_timings = None
        if sequence_index == 0 and (outcome is not None or output.first_index - len(attempt.given) <= 1):
            moved, now = self._role.transfer_figures(attempt.key), self._clock.monotonic()
            timings = attempt.clock.timings(now, output.num_cached_tokens, output.num_external_tokens, moved)
            self._role.attempt_timed(attempt.key, timings)
            prompt_timings = moved.prompt_timings if moved is not None else None
        elif outcome is not None and attempt.timings is not None:
            timings = replace(attempt.timings, decode_ms=attempt.clock.decode_ms(self._clock.monotonic()))
        delta = request_delta(attempt.key, sequence_index, output, outcome, timings, prompt_timings)
        if self._gives_back and outcome is Outcome.ABORTED:
            delta = replace(delta, error=_GIVEN_BACK)
        if attempt.runs:
            attempt.note(delta)
            if outcome is not None and attempt.clock.sequence_ended(outcome):
                self._attempts.finished(attempt, self._clock.monotonic())
                self._end_span(attempt.key, output.error or "")
                self._log_end(attempt.key, outcome, output.error)
        return attempt.owner, delta
