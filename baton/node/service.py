"""The node between its routers and its engine: submits, aborts, and each step's news back to whoever asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from baton.clock import Clock
from baton.engine.kv_events import KVEventBatch, KVSnapshot
from baton.engine.outputs import (
    ComputedStep,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    SchedulerStats,
)
from baton.engine.request import FinishReason, Leg, Request
from baton.engine.sequence_group import lone_sequence_id, split_sequence_id
from baton.errors import Draining
from baton.ids import AttemptKey
from baton.node.attempt_clock import AttemptClock
from baton.node.driver import EngineDriver, StepNews
from baton.node.event_log import EventLog
from baton.node.kv_cache_updates import kv_cache_updates
from baton.node.port import Port
from baton.node.role import NodeRole
from baton.node.submit_check import objection
from baton.rpc.messages import (
    HEARTBEAT_S,
    Abort,
    Adopt,
    HandoffReport,
    LoadReport,
    NodeDescription,
    NodeReport,
    Outcome,
    RequestDelta,
    RouterMessage,
    StepFigures,
    StepReport,
    Submit,
    TraceEvent,
    WatchKVCache,
)

_OUTCOMES = {
    FinishReason.STOP: Outcome.STOP,
    FinishReason.LENGTH: Outcome.LENGTH,
    FinishReason.HANDED_OFF: Outcome.HANDED_OFF,
    FinishReason.ABORT: Outcome.ABORTED,
    FinishReason.IGNORED: Outcome.IGNORED,
    FinishReason.ERROR: Outcome.ERROR,
}

_REFUSAL_SHOWN_S = 300.0


class NodeService:
    """Lives on the loop."""

    def __init__(
        self,
        description: NodeDescription,
        role: NodeRole,
        driver: EngineDriver,
        log: EventLog,
        clock: Clock,
        on_drain: Callable[[], None],
    ) -> None:
        self._description = description
        self._role = role
        self._driver = driver
        self._log = log
        self._clock = clock
        self._on_drain = on_drain
        self._ports: dict[int, Port] = {}
        self._indices = itertools.count(1)
        self._load = LoadReport(total_blocks=description.num_blocks, free_blocks=description.num_blocks)
        self._waiting_by_reason: Mapping[str, int] = {}
        self._notice = ""
        self._draining = False
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    # What the wire asks of a node (NodeHandler).

    def describe(self) -> NodeDescription:
        return self._description

    def report(self) -> NodeReport:
        return NodeReport(self._description, self._load, self._waiting_by_reason, self._role.handoff_report())

    def open_port(self, router_id: str) -> Port:
        """A router attached; raises Draining once the node has closed."""
        if self._closed:
            raise Draining(f"node {self._description.node_id} has stopped")
        port = Port(next(self._indices), router_id, self._receive, self._give_up, self._close_port)
        self._ports[port.client_index] = port
        port.push(StepReport((), self._load, notice=self._notice or None))
        return port

    def drain(self) -> None:
        """Refuse new work and ask the process to end when the running work is done."""
        self._on_drain()

    def trace(self, after: int) -> Sequence[TraceEvent]:
        return self._log.after(after)

    # What the process asks of it.

    def refuse_new_work(self) -> None:
        """From now on every submit is answered REFUSED."""
        self._draining = True
        self._set_load(replace(self._load, draining=True))
        self._send({})

    async def wait_idle(self) -> None:
        """Return when no request runs or waits, and no block is leased or quarantined."""
        await self._idle.wait()

    async def heartbeat(self) -> None:
        """Tell every router that the node lives, also when it has nothing to say. Runs until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._look_for_news()
            for port in list(self._ports.values()):
                if port.silent:
                    port.push(StepReport((), self._load))
                port.silent = True

    def on_step(self, news: StepNews) -> None:
        """Take a step's news, on the loop."""
        for event in news.events:
            self._note(event)
        self._waiting_by_reason = dict(news.stats.num_requests_waiting_by_reason.items())
        self._set_load(_load_report(news.stats, self._draining))
        step = _step_figures(news.step) if news.step is not None else None
        self._send({index: outputs.outputs for index, outputs in news.outputs.items()}, step)
        if news.kv_cache is not None:
            self._tell_kv_cache(news.kv_cache)

    def close(self) -> None:
        """End every router's stream, and take no more of them."""
        self._closed = True
        for port in list(self._ports.values()):
            port.close()

    # Inside.

    def _look_for_news(self) -> None:
        """Tell every router what operators should know, when that has changed."""
        notice = _notice(self._role.handoff_report())
        if notice == self._notice:
            return
        self._notice = notice
        for port in list(self._ports.values()):
            port.push(StepReport((), self._load, notice=notice))

    def _receive(self, port: Port, message: RouterMessage) -> None:
        if isinstance(message, WatchKVCache):
            port.watches_kv_cache = True
            self._driver.watch_kv_cache()
            return
        if isinstance(message, Adopt):
            self._reject(port, message.attempt, "nothing of it is here", Outcome.UNKNOWN)
            return
        owner = self._owner(message.attempt)
        if isinstance(message, Abort):
            if owner in (port, None):
                self._abort(port, message)
            return
        if owner is port:
            self._log.record("duplicate_submit", message.attempt)
            return
        problem = objection(message, self._description)
        if self._draining:
            self._reject(port, message.attempt, "the node is draining", Outcome.REFUSED)
        elif owner is not None:
            self._reject(port, message.attempt, f"attempt: runs here for router {owner.router_id}")
        elif problem is not None:
            self._reject(port, message.attempt, problem)
        else:
            # From here on it is the client who waits, whether in the engine's inbox or in its queue.
            num_sequences = 1 if message.leg is Leg.PREFILL else message.sampling_params.n
            port.live[message.attempt] = AttemptClock(self._clock.monotonic(), num_sequences=num_sequences)
            self._idle.clear()
            # An attempt that dies with a node which never said so may be tried elsewhere at no cost.
            port.push(StepReport((RequestDelta(message.attempt),), self._load))
            self._driver.submit(self._request(port, message))

    def _owner(self, attempt: AttemptKey) -> Port | None:
        """Whom the attempt runs for, while it does."""
        return next((port for port in self._ports.values() if attempt in port.live), None)

    def _abort(self, port: Port, abort: Abort) -> None:
        self._log.record("abort", abort.attempt, 0, abort.reason)
        if abort.sequence_index is not None:
            self._driver.abort([lone_sequence_id(str(abort.attempt), abort.sequence_index)])
            return
        if port.live.pop(abort.attempt, None) is not None:
            self._driver.abort([str(abort.attempt)])
        # What ended here long ago may still be on offer.
        self._role.attempt_aborted(abort.attempt)

    def _reject(self, port: Port, attempt: AttemptKey, error: str, outcome: Outcome = Outcome.ERROR) -> None:
        """Nothing of the attempt runs here, and the router is told why."""
        port.push(StepReport((RequestDelta(attempt, outcome=outcome, error=error),), self._load))

    def _give_up(self, port: Port, attempt: AttemptKey, error: str) -> None:
        """End the attempt, should it run for this router: it will hear nothing more of it."""
        if attempt in port.live:
            self._abort(port, Abort(attempt, error))
        self._reject(port, attempt, error)

    def _request(self, port: Port, submit: Submit) -> Request:
        return Request(
            str(submit.attempt),
            submit.prompt_token_ids,
            submit.sampling_params,
            eos_token_ids=self._description.eos_token_ids,
            client_index=port.client_index,
            priority=submit.priority,
            cache_salt=submit.cache_salt,
            leg=submit.leg,
            kv_source=submit.kv_source,
        )

    def _close_port(self, port: Port) -> None:
        self._ports.pop(port.client_index, None)
        self._driver.abort([str(attempt) for attempt in port.live])
        for attempt in port.live:
            self._role.attempt_aborted(attempt)
        port.live.clear()
        if port.watches_kv_cache and not any(other.watches_kv_cache for other in self._ports.values()):
            self._driver.unwatch_kv_cache()

    def _note(self, event: EngineCoreEvent) -> None:
        request_id, sequence_index = split_sequence_id(event.request_id)
        attempt = AttemptKey.parse(request_id)
        detail = f"sequence {sequence_index}" if sequence_index else ""
        self._log.record_at(event.time, event.type.value, attempt, event.value, detail)
        if sequence_index or event.type is EngineCoreEventType.CHUNK_COMPUTED:
            return
        for port in self._ports.values():
            clock = port.live.get(attempt)
            if clock is not None:
                clock.note(event)

    def _set_load(self, load: LoadReport) -> None:
        self._load = load
        busy = load.running or load.waiting or load.waiting_for_remote_kvs
        busy = busy or load.leased_blocks or load.quarantined_blocks or any(port.live for port in self._ports.values())
        if busy:
            self._idle.clear()
        else:
            self._idle.set()

    def _send(self, outputs: Mapping[int, Sequence[EngineCoreOutput]], step: StepFigures | None = None) -> None:
        for index, port in list(self._ports.items()):
            deltas = [self._delta(port, output) for output in outputs.get(index, ())]
            port.push(StepReport(deltas, self._load, step=step))
        if outputs:
            self._set_load(self._load)

    def _tell_kv_cache(self, news: KVEventBatch | KVSnapshot) -> None:
        """After the tokens: nobody waits for this."""
        updates = kv_cache_updates(news)
        for port in list(self._ports.values()):
            port.knows_kv_cache |= port.watches_kv_cache and isinstance(news, KVSnapshot)
            if port.knows_kv_cache:
                for update in updates:
                    port.push(StepReport((), self._load, update))

    def _delta(self, port: Port, output: EngineCoreOutput) -> RequestDelta:
        request_id, sequence_index = split_sequence_id(output.request_id)
        attempt = AttemptKey.parse(request_id)
        clock = port.live.get(attempt)
        outcome = _OUTCOMES[output.finish_reason] if output.finish_reason else None
        if outcome is Outcome.ERROR and output.kv_lost:
            outcome = Outcome.KV_LOST
        timings = None
        if clock is not None and sequence_index == 0 and (outcome is not None or output.first_index <= 1):
            moved = self._role.transfer_figures(attempt)
            timings = clock.timings(output.num_cached_tokens, output.num_external_tokens, moved)
        if outcome is not None and (clock is None or clock.ended(outcome)):
            port.live.pop(attempt, None)
        return RequestDelta(
            attempt,
            output.first_index,
            output.new_token_ids,
            output.new_logprobs,
            outcome,
            output.stop_reason,
            output.error or "",
            timings,
            sequence_index,
        )


def _notice(handoff: HandoffReport) -> str:
    """The latest link that was refused of late."""
    return next((link.story for link in handoff.refused_links if link.age_s < _REFUSAL_SHOWN_S), "")


def _step_figures(step: ComputedStep) -> StepFigures:
    return StepFigures(
        step_ms=step.seconds * 1e3,
        prefill_tokens=step.num_prefill_tokens,
        decode_sequences=step.num_decodes,
        decode_context_tokens=step.num_decode_context_tokens,
    )


def _load_report(stats: SchedulerStats, draining: bool) -> LoadReport:
    return LoadReport(
        running=stats.num_running,
        waiting=stats.num_waiting - stats.num_waiting_for_remote_kvs,
        waiting_for_remote_kvs=stats.num_waiting_for_remote_kvs,
        total_blocks=stats.total_blocks,
        free_blocks=stats.free_blocks,
        leased_blocks=stats.leased_blocks,
        quarantined_blocks=stats.quarantined_blocks,
        draining=draining,
        uncomputed_tokens=stats.num_uncomputed_tokens,
        context_tokens=stats.num_context_tokens,
    )
