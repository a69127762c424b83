"""A node's service for its routers and operators: it describes the node, and reports each step of its engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from baton.clock import Clock
from baton.errors import CacheInUse, ConfigError, DeadlineExceeded, Draining, InvalidRequest
from baton.messages.ids import AttemptKey
from baton.messages.node import HEARTBEAT_S, LoadReport, NodeDescription, Role
from baton.messages.node_report import ComputePath, NodeReport, RankReport, TraceEvent, TraceStep
from baton.model_formats.adapters import AdapterInfo
from baton.node.adapters.adapter_threads import AdapterThreads
from baton.node.adapters.node_adapters import NodeAdapters
from baton.node.attempts.attempt_times import AttemptSpans
from baton.node.attempts.attempts import AttemptBook
from baton.node.drain import Drain
from baton.node.driver import EngineDriver, StepNews
from baton.node.reports.logs import EventLog, StepLog
from baton.node.reports.reports import handoff_notice, load_report
from baton.node.role import NodeRole
from baton.node.router_attempts import RouterAttempts
from baton.node.router_streams import Port, RouterStreams
from baton.observe.metrics import Figure

_RESET_S = 4.0
"""How long the step that is being computed may delay a reset of the prefix cache; routers wait longer than that."""
_log = logging.getLogger(__name__)


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
        self._role = role
        self._driver = driver
        self._log = log
        self._steps = StepLog()
        self._on_drain = on_drain
        self._on_set_role = on_set_role
        load = LoadReport(total_blocks=description.num_blocks, free_blocks=description.num_blocks)
        self._streams = streams = RouterStreams(load, clock, gave_up)
        self._adapters = NodeAdapters(adapters, streams.tell_adapters, driver.keep_adapters)
        book = AttemptBook(orphan_grace_s)
        self.draining = Drain(book, streams, role, driver, log, clock, gave_up)
        self._attempts = RouterAttempts(
            description, role, driver, book, streams, self.draining, self._adapters, log, clock, spans
        )
        self._waiting_by_reason: Mapping[str, int] = {}
        self._closed = False

    # --- called by gRPC (`NodeHandler`) ---

    def describe(self) -> NodeDescription:
        return self._description

    def report(self) -> NodeReport:
        return NodeReport(
            self._description,
            self._streams.load,
            self._waiting_by_reason,
            self._role.handoff.report(),
            self._compute_paths,
            self._ranks(),
            self._adapters.rows(),
        )

    def open_port(self, router_id: str, router_incarnation: str = "", keeps: Sequence[AttemptKey] = ()) -> Port:
        """Open the stream of a router, see `RouterAttempts.open_port`; raises Draining once the node has closed."""
        if self._closed:
            raise Draining(f"node {self._description.node_id} has stopped")
        return self._attempts.open_port(router_id, router_incarnation, keeps)

    def drain(self) -> None:
        """Ask the process to refuse new work, and to end when the running work is done."""
        self._on_drain()

    def set_role(self, incarnation: str, role: Role) -> None:
        """Ask the process to start again in this role when the running work is done.

        Raises ConfigError if this is not the incarnation that is meant, InvalidRequest for a role that no node has.
        """
        self._require_incarnation(incarnation)
        if role in (Role.ROUTER, Role.ENCODE):
            raise InvalidRequest("role", "a node can be prefill or decode")
        if self._description.role is Role.ENCODE:
            raise InvalidRequest("role", "an encode node has its model's encoder alone: it stays one")
        if role is not self._description.role or self.draining.refuses_new_work:
            self._on_set_role(role)

    async def reset_prefix_cache(self, incarnation: str) -> int:
        """Forget all cached KV; returns how many blocks that were.

        Raises ConfigError if this is not the incarnation that is meant, CacheInUse while blocks are in use, and
        DeadlineExceeded when a step takes too long.
        """
        self._require_incarnation(incarnation)
        num_blocks = await self._forget_cached_blocks()
        _log.info("the prefix cache was reset, as an operator asked", extra={"blocks": num_blocks})
        return num_blocks

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

    # --- called by the process ---

    async def heartbeat(self) -> None:
        """Send a report to every router that got none for a while, as a sign of life. Runs until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            end = self._role.handoff
            notice = handoff_notice(end.refused_links(), end.failed_probes(), end.slow_pairs())
            self._streams.tell_notice(self.draining.gave_up or notice)
            self._streams.beat()

    def on_step(self, news: StepNews) -> None:
        """Report what a step of the engine brought."""
        for event in news.events:
            self._attempts.record_event(event)
        if news.adapters is not None:
            self._adapters.on_news(news.adapters)
        self._waiting_by_reason = dict(news.stats.num_requests_waiting_by_reason.items())
        self._streams.load = load_report(news.stats, draining=self.draining.refuses_new_work)
        self.draining.note_change()
        step = news.step
        goes_on = step is not None and step.goes_on
        if step is not None:
            self._steps.record(step.ended_at, step.figures, goes_on)
        results = self._attempts.results(news.outputs)
        # Where another step follows, a router that is not told of this one is told of a later one.
        owners = self._attempts.book.owners() if goes_on and len(self._streams.ports) > 1 else None
        self._streams.tell_step(results, step.figures if step is not None else None, owners)
        if news.kv_cache is not None:
            # After the tokens, because nobody waits for it.
            self._streams.tell_kv_cache(news.kv_cache)

    def close(self) -> None:
        """End all streams of routers, abort what runs, and accept no more streams."""
        self._closed = True
        self._attempts.close()
        self._adapters.close()

    def running_for(self, port: Port) -> list[AttemptKey]:
        """The attempts that this router submitted or adopted and that have not ended."""
        return [attempt.key for attempt in self._attempts.book.running_for(port.client_index)]

    # --- operators' requests ---

    def _require_incarnation(self, incarnation: str) -> None:
        ours = self._description.incarnation
        if incarnation not in ("", ours):
            raise ConfigError(f"this is {ours}, not {incarnation}")

    async def _forget_cached_blocks(self) -> int:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[int | CacheInUse] = loop.create_future()

        def answer(outcome: int | CacheInUse) -> None:
            # This runs on the engine's thread, which may outlive the event loop by its last step.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, answered, outcome)

        self._driver.reset_prefix_cache(answer)
        try:
            outcome = await asyncio.wait_for(answered, _RESET_S)
        except TimeoutError:
            raise DeadlineExceeded(f"the engine was busy for {_RESET_S:g} s: try again") from None
        if isinstance(outcome, CacheInUse):
            raise outcome
        return outcome


def _resolve(answered: asyncio.Future[int | CacheInUse], outcome: int | CacheInUse) -> None:
    # The caller may have given up.
    if not answered.done():
        answered.set_result(outcome)
