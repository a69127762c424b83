"""The streams of routers at a node: what a router asks for comes in, and reports to it go out."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set

from baton.clock import Clock
from baton.engine.kv_cache.events import KVEventBatch, KVSnapshot
from baton.messages.adapters import AdapterReport
from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport, RequestDelta, RouterMessage, StepFigures, StepReport
from baton.node.reports.reports import kv_cache_updates, split_by_size

MAX_QUEUED_REPORTS = 10_000
"""A router that has not taken so many reports is taken for dead, and its stream is ended."""


LOAD_EVERY_S = 0.1
"""A router without requests here is told of the load at most this often. Of ten routers of a busy node nine may have
none, and would otherwise get a report of each step for the load alone."""


class Port:
    """One router's stream. Belongs to the event loop."""

    def __init__(
        self,
        client_index: int,
        router_id: str,
        router_incarnation: str,
        receive: Callable[[Port, RouterMessage], None],
        refuse: Callable[[Port, AttemptKey, str], None],
        on_close: Callable[[Port], None],
    ) -> None:
        """`receive` takes each message; `refuse` ends the attempt of a message that could not be read."""
        self.client_index = client_index
        self.router_id = router_id
        self.router_incarnation = router_incarnation
        """The router's process; empty: the router did not say."""
        self.moved_away: set[AttemptKey] = set()
        """Attempts that another router has adopted from this one, which may not abort them any more."""
        self.is_silent = False
        """Whether no report was queued since the last heartbeat."""
        self.step_reported_at = -math.inf
        """When a step was last reported, with or without tokens; monotonic seconds."""
        self.watches_kv_cache = False
        """Whether the router wants to be told what the prefix cache takes in and loses."""
        self.knows_kv_cache = False
        """Whether the router was told what is in the prefix cache, so that changes can follow."""
        self._receive = receive
        self._refuse = refuse
        self._on_close = on_close
        self._queue: asyncio.Queue[StepReport | None] = asyncio.Queue()
        self._closed = False

    @property
    def num_queued(self) -> int:
        """Number of reports that the router has not taken."""
        return self._queue.qsize()

    def receive(self, message: RouterMessage) -> None:
        """Take a message of the router; it is ignored once the stream is closed."""
        if not self._closed:
            self._receive(self, message)

    def refuse(self, attempt: AttemptKey, error: str) -> None:
        """Answer a message that could not be read: its attempt ends with this error, and others go on."""
        if not self._closed:
            self._refuse(self, attempt, error)

    def push(self, report: StepReport) -> None:
        """Queue a report for the router; closes the stream if MAX_QUEUED_REPORTS are queued already."""
        if self._closed:
            return
        if self._queue.qsize() >= MAX_QUEUED_REPORTS:
            self.close()
            return
        self.is_silent = False
        self._queue.put_nowait(report)

    async def reports(self) -> AsyncIterator[StepReport]:
        """The reports that were pushed, until the stream is closed."""
        while (report := await self._queue.get()) is not None:
            yield report

    def close(self) -> None:
        """End the stream. For the node's grace, another router can adopt what this one asked for. Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)
            self._on_close(self)

    def __repr__(self) -> str:
        return f"<Port {self.router_id} queued={self._queue.qsize()}>"


class RouterStreams:
    """The streams of all routers, and the load that each report to one carries. Belongs to the event loop."""

    def __init__(self, load: LoadReport, clock: Clock, notice: str = "") -> None:
        """`notice`: what operators should know from the start; empty: nothing."""
        self.load = load
        self._notice = notice
        self._clock = clock
        self._ports: dict[int, Port] = {}
        self._indices = itertools.count(1)

    @property
    def ports(self) -> Sequence[Port]:
        """The open streams; a copy, since telling a router may close its stream."""
        return list(self._ports.values())

    def open(
        self,
        router_id: str,
        router_incarnation: str,
        receive: Callable[[Port, RouterMessage], None],
        refuse: Callable[[Port, AttemptKey, str], None],
        on_close: Callable[[Port], None],
    ) -> Port:
        """Open a stream; see `Port`. It is no longer among `ports` when `on_close` is called."""

        def closed(port: Port) -> None:
            del self._ports[port.client_index]
            on_close(port)

        port = Port(next(self._indices), router_id, router_incarnation, receive, refuse, closed)
        self._ports[port.client_index] = port
        self.tell(port, notice=self._notice or None)
        return port

    def get(self, client_index: int | None) -> Port | None:
        """The stream of a router, if it is open."""
        return self._ports.get(client_index) if client_index is not None else None

    def tell(self, port: Port, *deltas: RequestDelta, notice: str | None = None) -> None:
        """Tell one router what became of attempts, or what operators should know."""
        port.push(StepReport(deltas, self.load, notice=notice))

    def tell_notice(self, notice: str) -> None:
        """Tell all routers what operators should know, if that has changed."""
        if notice != self._notice:
            self._notice = notice
            for port in self.ports:
                self.tell(port, notice=notice)

    def tell_step(
        self,
        deltas: Mapping[int | None, Sequence[RequestDelta]],
        step: StepFigures | None = None,
        owners: Set[int | None] | None = None,
    ) -> None:
        """Tell routers of a step: the results by client index, and its figures.

        `owners`: the routers that are told also where they have no result; others are only told every LOAD_EVERY_S.
        None: all are.
        """
        now = self._clock.monotonic()
        for port in self.ports:
            own = deltas.get(port.client_index, ())
            is_due = owners is None or port.client_index in owners or now - port.step_reported_at >= LOAD_EVERY_S
            if not (own or is_due):
                continue
            port.step_reported_at = now
            *parts, last = split_by_size(own)
            for part in parts:
                port.push(StepReport(part, self.load))
            port.push(StepReport(last, self.load, step=step))

    def tell_adapters(self, client_index: int, report: AdapterReport) -> None:
        """Tell a router which of its adapters the node acknowledges."""
        if (port := self.get(client_index)) is not None:
            port.push(StepReport((), self.load, adapters=report))

    def tell_kv_cache(self, news: KVEventBatch | KVSnapshot) -> None:
        """Tell those that watch the prefix cache of its changes."""
        updates = kv_cache_updates(news)
        for port in self.ports:
            port.knows_kv_cache |= port.watches_kv_cache and isinstance(news, KVSnapshot)
            if port.knows_kv_cache:
                for update in updates:
                    port.push(StepReport((), self.load, update))

    def beat(self) -> None:
        """Send a report, as a sign of life, to every router that got none since the last call."""
        for port in self.ports:
            if port.is_silent:
                port.push(StepReport((), self.load))
            port.is_silent = True
