"""When calls begin, and when those of a lost connection end: a few in a turn of the loop, each connection in turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable

from baton.wire.http2.call import Call

BEGIN_AT_ONCE = 4
"""Calls that begin in one turn of the loop: when there is too much to do those that run come first."""
BEGIN_BYTES = 256 << 10
"""Bytes of requests: once calls that begin in a turn come to that many, the others wait for the next one. To parse
1 MiB of small fields is 10 ms's work or more."""
END_AT_ONCE = 32
"""Calls of lost connections that are cancelled in one turn: each has its own end to come to in the next one."""


class _Rounds:
    """Calls that wait, one of each connection in turn: a crowd of one connection makes no other one wait."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Call]] = {}
        """By connection; the first one is the next."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, connection: Hashable, call: Call) -> None:
        self._queues.setdefault(connection, deque()).append(call)

    def pop(self) -> Call:
        connection = next(iter(self._queues))
        queue = self._queues.pop(connection)
        call = queue.popleft()
        if queue:
            self._queues[connection] = queue
        return call

    def forget(self, connection: Hashable) -> None:
        self._queues.pop(connection, None)


class CallQueue:
    """The calls of one server that have not begun, and those that are to be cancelled."""

    def __init__(self, begin: Callable[[Call], None]) -> None:
        self._begin = begin
        self._known = _Rounds()
        self._anyones = _Rounds()
        self._ending: deque[Call] = deque()
        self._is_due = False
        self._bytes_left = 0
        """Bytes that calls may still bring in this turn."""

    def __bool__(self) -> bool:
        return bool(self._known or self._anyones or self._ending)

    def add(self, connection: Hashable, call: Call, *, is_anyones: bool) -> None:
        """Let the call begin when it is its turn. `is_anyones`: its method is open to whoever comes, so it waits for
        those whose callers have shown who they are, all but one of each turn.
        """
        (self._anyones if is_anyones else self._known).add(connection, call)
        self._schedule()

    def lose(self, connection: Hashable, calls: Iterable[Call]) -> None:
        """The connection is gone, and with it these calls of its."""
        self._known.forget(connection)
        self._anyones.forget(connection)
        self._ending += calls
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_due and self:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        for _ in range(min(END_AT_ONCE, len(self._ending))):
            self._ending.popleft().cancel()
        self._bytes_left = BEGIN_BYTES
        num_begun = self._begin_from(self._anyones, 1)
        num_begun += self._begin_from(self._known, BEGIN_AT_ONCE - num_begun)
        self._begin_from(self._anyones, BEGIN_AT_ONCE - num_begun)
        self._is_due = False
        self._schedule()

    def _begin_from(self, rounds: _Rounds, most: int) -> int:
        num_begun = 0
        while rounds and num_begun < most and self._bytes_left > 0:
            call = rounds.pop()
            if not call.is_over:
                num_begun += 1
                self._bytes_left -= call.num_held
                self._begin(call)
        return num_begun
