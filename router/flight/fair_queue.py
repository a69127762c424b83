"""Limits how many clients are written to in one turn of the event loop, and serves them in order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

PER_TURN = 64

_log = logging.getLogger(__name__)


class FairQueue:
    """Lets the readers of client queues continue, first come, first served, and a limited number in each turn.

    Between two turns the loop reads the nodes' sockets. Under overload, tokens therefore gather in their clients'
    queues and leave as one message, instead of waiting one by one in the sockets; and a message costs the same however
    many tokens it carries. All clients of a router share one instance. All calls come from one event loop.
    """

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._per_turn = per_turn
        self._left = per_turn
        """Readers that may still continue in this turn of the loop."""
        self._waiting: deque[Callable[[], bool]] = deque()
        self._ends: asyncio.Handle | None = None

    def future(self) -> asyncio.Future[None]:
        """A future on which a reader waits for its turn."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # kept: asking for it is a system call
        return self._loop.create_future()

    def may_go(self) -> bool:
        """Whether a reader with something to read may continue now. Otherwise it calls `serve`."""
        if not self._left or self._waiting:
            return False
        self._take_one()
        return True

    def serve(self, go: Callable[[], bool]) -> None:
        """Call `go` when it is the reader's turn, perhaps at once. `go` returns whether the reader used its turn."""
        if not self._left or self._waiting:
            self._waiting.append(go)
        elif self._goes(go):
            self._take_one()

    async def wait(self) -> None:
        """Return when it is the caller's turn; what it does before it waits for anything else belongs to that turn."""
        if self.may_go():
            return
        waiter = self.future()

        def go() -> bool:
            if waiter.done():
                return False
            waiter.set_result(None)
            return True

        self.serve(go)
        await waiter

    def charge(self, count: int) -> None:
        """Count work for a reader whose turn it is as that of so many more readers."""
        self._left = max(0, self._left - count)
        self._end_later()

    def _take_one(self) -> None:
        self._left -= 1
        self._end_later()

    def _end_later(self) -> None:
        if self._ends is None:
            loop = self._loop or asyncio.get_running_loop()
            self._ends = loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._ends = None
        self._left = self._per_turn
        while self._waiting and self._left:
            if self._goes(self._waiting.popleft()):
                self._take_one()

    def _goes(self, go: Callable[[], bool]) -> bool:
        """Whether the reader used its turn. If it raises, that is logged, and the next reader has its turn."""
        try:
            return go()
        except Exception:
            _log.exception("a client's reader raised in its turn")
            return True
