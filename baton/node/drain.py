"""Draining: refusing new work, and waiting until what runs has ended or can be given back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from baton.clock import Clock
from baton.messages.node import HEARTBEAT_S
from baton.messages.node_report import OpenHandoff
from baton.node.attempts.attempts import AttemptBook
from baton.node.driver import EngineDriver
from baton.node.leftovers import GIVE_UP_AFTER_S, describe_left, only_reads_left
from baton.node.reports.logs import EventLog
from baton.node.role import NodeRole
from baton.node.router_streams import RouterStreams

GIVEN_BACK = "it changes its role, and what it ran had its time to end"
_log = logging.getLogger(__name__)


class Drain:
    """Knows whether a node has work, and lets it end. Belongs to the event loop."""

    def __init__(
        self,
        book: AttemptBook,
        streams: RouterStreams,
        role: NodeRole,
        driver: EngineDriver,
        log: EventLog,
        clock: Clock,
        gave_up: str = "",
    ) -> None:
        """`gave_up`: what the drain of the incarnation before left behind, for operators."""
        self._book = book
        self._streams = streams
        self._role = role
        self._driver = driver
        self._log = log
        self._clock = clock
        self.gave_up = gave_up
        """What a drain has left behind, here or before; empty: nothing."""
        self.refuses_new_work = False
        self.gives_back = False
        """Whether what ran was given back, so that an attempt which ends as aborted is not the router's doing."""
        self._idle = asyncio.Event()
        self._idle.set()

    def note_change(self) -> None:
        """The load or the attempts have changed."""
        load = self._streams.load
        if self._has_requests or load.leased_blocks or load.quarantined_blocks:
            self._idle.clear()
        else:
            self._idle.set()

    def refuse_new_work(self) -> None:
        """Answer every submit with REFUSED from now on."""
        self.refuses_new_work = True
        self._streams.load = replace(self._streams.load, draining=True)
        self.note_change()
        self._streams.tell_step({})

    async def wait_idle(self) -> Sequence[OpenHandoff]:
        """Return when no request runs or waits, no block is leased or quarantined, and nothing waits for adoption.

        Returns also when nothing but reads was left for GIVE_UP_AFTER_S, since those may never end. The result is the
        hand-offs that those reads belong to; operators are told of them.
        """
        since: float | None = None
        while not self._idle.is_set():
            left, now = self._role.handoff.report().open, self._clock.monotonic()
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
        self.gives_back = True
        given_back = self._book.all_running()
        self._driver.abort([str(attempt.key) for attempt in given_back])
        for attempt in given_back:
            self._log.record("abort", attempt.key, 0, GIVEN_BACK)
            self._role.attempt_aborted(attempt.key)
        return len(given_back)

    def work_left(self) -> str:
        """What keeps the node from being idle, for a log line."""
        load, waiting = self._streams.load, self._streams.load.waiting + self._streams.load.waiting_for_remote_kvs
        blocks = f"{load.leased_blocks} blocks leased, {load.quarantined_blocks} quarantined"
        return f"{load.running} requests running, {waiting} waiting, {self._book.num_awaited} to adopt, {blocks}"

    @property
    def _has_requests(self) -> bool:
        load = self._streams.load
        return bool(load.running or load.waiting or load.waiting_for_remote_kvs or self._book.num_awaited)

    def _give_up_on(self, left: Sequence[OpenHandoff]) -> None:
        self.gave_up = describe_left(left)
        _log.warning("%s", self.gave_up)
        for handoff in left:
            self._log.record("drain_gave_up", handoff.attempt, handoff.num_blocks, f"{handoff.state} {handoff.peer}")
        self._streams.tell_notice(self.gave_up)
