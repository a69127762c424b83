"""One router's stream at a node: what the router asks for comes in, and reports to it go out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable

from baton.messages.ids import AttemptKey
from baton.messages.node import RouterMessage, StepReport

MAX_QUEUED_REPORTS = 10_000
"""A router that has not taken so many reports is taken for dead, and its stream is ended."""


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
