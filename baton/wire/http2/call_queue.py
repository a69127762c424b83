"""Decides when calls begin and when those of a lost connection end: a few in each turn of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterable

from baton.wire.http2.call import Call

BEGIN_AT_ONCE = 4
"""Limit of the calls that begin in one turn of the event loop, so that running calls have precedence under overload."""
BEGIN_BYTES = 256 << 10
"""Limit of the bytes of the requests that begin in one turn; further ones wait for the next turn. Parsing 1 MiB of
small fields takes 10 ms or more."""
END_AT_ONCE = 32
"""Limit of the calls of lost connections that are cancelled in one turn. Each runs its clean-up in the next turn."""


class _RoundRobin:
    """A queue of calls that takes one from each connection in turn, so that no connection delays another one."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Call]] = {}
        """The calls of each connection. The next call is taken from the first connection."""

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
    """The calls of one server that wait to begin or to be cancelled."""

    def __init__(self, begin: Callable[[Call], None]) -> None:
        self._begin = begin
        self._authenticated = _RoundRobin()
        self._keyless_queue = _RoundRobin()
        self._ending: deque[Call] = deque()
        self._is_due = False
        self._bytes_left = 0
        """Bytes of requests that may still begin in this turn."""

    def __bool__(self) -> bool:
        return bool(self._authenticated or self._keyless_queue or self._ending)

    def add(self, connection: Hashable, call: Call, *, is_keyless: bool) -> None:
        """Let the call begin when it is its turn. `is_keyless`: its method needs no key, so it waits for the calls
        whose callers are authenticated, but for one call in each turn.
        """
        (self._keyless_queue if is_keyless else self._authenticated).add(connection, call)
        self._schedule()

    def lose(self, connection: Hashable, calls: Iterable[Call]) -> None:
        """Remove the waiting calls of a connection that was lost, and cancel these running ones."""
        self._authenticated.forget(connection)
        self._keyless_queue.forget(connection)
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
        num_begun = self._begin_from(self._keyless_queue, 1)
        num_begun += self._begin_from(self._authenticated, BEGIN_AT_ONCE - num_begun)
        self._begin_from(self._keyless_queue, BEGIN_AT_ONCE - num_begun)
        self._is_due = False
        self._schedule()

    def _begin_from(self, queue: _RoundRobin, most: int) -> int:
        num_begun = 0
        while queue and num_begun < most and self._bytes_left > 0:
            call = queue.pop()
            if not call.is_over:
                num_begun += 1
                self._bytes_left -= call.num_unread
                self._begin(call)
        return num_begun
