"""One router's end of a node: what it asked for, and the reports on their way to it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable

from baton.messages.ids import AttemptKey
from baton.messages.node import RouterMessage, StepReport

MAX_QUEUED_REPORTS = 10_000
"""A router that is this far behind is taken for dead: its work would only pile up here."""


class Port:
    """Owned by the loop."""

    def __init__(
        self,
        client_index: int,
        router_id: str,
        router_incarnation: str,
        receive: Callable[[Port, RouterMessage], None],
        give_up: Callable[[Port, AttemptKey, str], None],
        on_close: Callable[[Port], None],
    ) -> None:
        self.client_index = client_index
        self.router_id = router_id
        self.router_incarnation = router_incarnation
        """Which run of the router; empty: it did not say."""
        self.moved: set[AttemptKey] = set()
        """Attempts of its that another router has adopted: it has nothing to say of them any more."""
        self.silent = False
        """No report since the last heartbeat."""
        self.load_told_at = -math.inf
        """When it was last told of a step, with or without tokens; monotonic seconds."""
        self.watches_kv_cache = False
        """It wants what the prefix cache takes in and loses..."""
        self.knows_kv_cache = False
        """... and was told what is in it."""
        self._receive = receive
        self._give_up = give_up
        self._on_close = on_close
        self._queue: asyncio.Queue[StepReport | None] = asyncio.Queue()
        self._closed = False

    @property
    def num_queued(self) -> int:
        """Reports that the router has not taken."""
        return self._queue.qsize()

    def receive(self, message: RouterMessage) -> None:
        """Take work; ignored once closed."""
        if not self._closed:
            self._receive(self, message)

    def refuse(self, attempt: AttemptKey, error: str) -> None:
        """Answer a message that could not be taken: its attempt ends here with an error, nothing else is touched."""
        if not self._closed:
            self._give_up(self, attempt, error)

    def push(self, report: StepReport) -> None:
        """Queue a report for the router."""
        if self._closed:
            return
        if self._queue.qsize() >= MAX_QUEUED_REPORTS:
            self.close()
            return
        self.silent = False
        self._queue.put_nowait(report)

    async def reports(self) -> AsyncIterator[StepReport]:
        """What was pushed, until closed."""
        while (report := await self._queue.get()) is not None:
            yield report

    def close(self) -> None:
        """End the stream; what the router asked for has the node's grace to find another one. Idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)
            self._on_close(self)

    def __repr__(self) -> str:
        return f"<Port {self.router_id} queued={self._queue.qsize()}>"
