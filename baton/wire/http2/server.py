"""A gRPC server on this process's event loop, in which each call is a task.

It takes the place of `grpc.aio.Server` where many clients stream. With grpc.aio each message that is written wakes
gRPC's own thread, then ours, and goes back: five to ten times the work done here, where all that one turn of the event
loop writes to a connection leaves with one system call."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

import grpc

from baton.observe.listener import Listener, listening_socket
from baton.observe.log_limit import LimitedLog
from baton.security.connection_limit import ConnectionLimit
from baton.wire.authenticator import Authenticator
from baton.wire.http2.call import STALL_S, Call, UnreadBytes
from baton.wire.http2.call_headers import CallDetails
from baton.wire.http2.server_link import ServerLink, too_many_keyless
from baton.wire.turn_budget import TurnBudget

BEGIN_AT_ONCE = 4
"""Limit of the calls that begin in one turn of the event loop, so that running calls have precedence under overload."""
BEGIN_BYTES = 256 << 10
"""Limit of the bytes of the requests that begin in one turn; further ones wait for the next turn. Parsing 1 MiB of
small fields takes 10 ms or more."""
END_AT_ONCE = 32
"""Limit of the calls of lost connections that are cancelled in one turn. Each runs its clean-up in the next turn."""
_log = logging.getLogger(__name__)
_READ_BYTES = 32 << 10
_MESSAGES_UNREAD = 4
"""Messages of the largest size that one connection may have sent and no handler has read."""
_MESSAGES_UNREAD_OF_ALL = 16
"""Likewise, of all connections."""
_KEYLESS_PER_CONNECTION = 100
MAX_KEYLESS_CALLS = 1_000
"""Open calls of methods that need no key, of all connections."""
REQUEST_S = 30.0
"""Seconds within which a request that is a single message must have come."""


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
    """The calls of one server that wait to begin or to be cancelled: a few do in each turn of the event loop."""

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

    def end_calls(self, connection: Hashable, calls: Iterable[Call]) -> None:
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


class Http2Server(grpc.aio.Server):
    """Serves `grpc.aio` servicers, coroutines and asynchronous generators, behind the same interceptors.

    It takes requests compressed with gzip, and compresses no answers.
    """

    def __init__(
        self,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        tls: ssl.SSLContext | None = None,
        *,
        max_message_bytes: int,
        max_metadata_bytes: int,
        authenticator: Authenticator | None = None,
        budget: TurnBudget | None = None,
        quiet_s: float = 10.0,
        answer_s: float = 5.0,
        limit: ConnectionLimit | None = None,
        request_s: float = REQUEST_S,
        stall_s: float = STALL_S,
    ) -> None:
        """`authenticator`: checks each call when its headers arrive, before anything is stored. `limit`
        and `budget`: of all connections of the process; without them the server has its own.

        A peer that sends nothing for `quiet_s` is pinged, and its connection is cut if it does not answer within
        `answer_s`; so is one that does not send the HTTP/2 preface within `quiet_s`. A call ends with
        DEADLINE_EXCEEDED if its one message takes longer than `request_s`, and with RESOURCE_EXHAUSTED if its client
        reads nothing of the answer for `stall_s`.
        """
        self.authenticator = authenticator or Authenticator()
        self._limit = limit or ConnectionLimit()
        self._budget = budget
        self.request_s = request_s
        self.stall_s = stall_s
        self.max_message_bytes = max_message_bytes
        self.max_metadata_bytes = max_metadata_bytes
        self.max_unread_bytes = _MESSAGES_UNREAD * max_message_bytes
        self.quiet_s = quiet_s
        self.answer_s = answer_s
        self._tls = tls
        self._generic: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._sockets: list[socket.socket] = []
        self._listeners: list[Listener] = []
        self.connections: set[ServerLink] = set()
        self.read_buffer = memoryview(bytearray(_READ_BYTES))
        """The read buffer that all connections share: the bytes in it are copied before the next read."""
        self.unread_requests = UnreadBytes()
        """Bytes of requests that no handler has read yet, of all connections together."""
        self.max_unread_bytes_of_all = _MESSAGES_UNREAD_OF_ALL * max_message_bytes
        self.num_keyless = 0
        """Number of open calls of methods that need no key."""
        self.broken = LimitedLog(_log, logging.INFO)
        """Logs connections that ended because their peer broke a rule."""
        self.queue = CallQueue(self._begin)
        self._calls: set[asyncio.Task[None]] = set()
        self.is_stopping = False
        self._stopped = asyncio.Event()
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        # The first interceptor is the outermost.
        self.find_handler = reduce(
            lambda inner, interceptor: partial(interceptor.intercept_service, inner),
            reversed(interceptors),
            self._find_handler,
        )

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler[Any, Any]]) -> None:
        self._generic += generic_rpc_handlers

    def add_insecure_port(self, address: str) -> int:
        """Listen on HOST:PORT, with TLS if the server has a context; port 0 takes a free one. Returns the port; raises
        RuntimeError.
        """
        host, _, port = address.rpartition(":")
        try:
            listener = listening_socket(host.strip("[]"), int(port))
        except OSError as error:
            raise RuntimeError(f"can't listen on {address}: {error}") from error
        self._sockets.append(listener)
        bound: int = listener.getsockname()[1]
        return bound

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        raise NotImplementedError("give the server its TLS context")

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun and not ended."""
        return len(self._calls)

    @property
    def port(self) -> int:
        """The port of the first address."""
        port: int = self._sockets[0].getsockname()[1]
        return port

    @property
    def num_open(self) -> int:
        """The number of calls that came and are not answered, including those that have not begun."""
        return sum(link.num_calls for link in self.connections)

    @property
    def budget(self) -> TurnBudget:
        """The time that all connections together may use for their input in one turn of the event loop."""
        if self._budget is None:
            self._budget = TurnBudget(asyncio.get_running_loop())
        return self._budget

    async def start(self) -> None:
        for listening in self._sockets:
            name = f"grpc {listening.getsockname()[1]}"
            listener = Listener(
                name,
                listening,
                lambda place: ServerLink(self, place),
                self._limit,
                self._tls,
                lambda: self.budget.num_waiting,
            )
            self._listeners.append(listener)
            listener.start()

    async def stop(self, grace: float | None = None) -> None:
        """Take no new calls, let running ones end within the grace, then cancel them. Idempotent."""
        self.is_stopping = True
        for listener in self._listeners:
            listener.stop()
        for listening in self._sockets:
            listening.close()
        for link in self.connections:
            link.leave()
        await self._calls_end(grace or 0.0)
        for link in list(self.connections):
            link.close()
        if self._calls:
            await asyncio.wait(self._calls)
        self._stopped.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109
        try:
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    async def _calls_end(self, grace_s: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + grace_s
        while (self._calls or self.queue) and (left_s := due - loop.time()) > 0:
            if self._calls:
                await asyncio.wait(self._calls, timeout=left_s)
            else:
                await asyncio.sleep(0)  # queued calls begin in the next turn

    def _begin(self, call: Call) -> None:
        task = call.task = asyncio.get_running_loop().create_task(call.serve(self.find_handler))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def admit_keyless(self, link: ServerLink) -> None:
        """Admit one more call that needs no key; raises CallRefused. If the process has too many, the connection with
        the most of them loses one.
        """
        if link.num_keyless >= _KEYLESS_PER_CONNECTION:
            raise too_many_keyless()
        if self.num_keyless >= MAX_KEYLESS_CALLS:
            greediest = max(self.connections, key=lambda connection: connection.num_keyless)
            if greediest.num_keyless <= link.num_keyless + 1:
                raise too_many_keyless()
            greediest.end_keyless()

    def handler(self, details: CallDetails) -> Any:
        """Return the handler of a method without interceptors; None: no service has it."""
        for generic in self._generic:
            handler = generic.service(details)  # type: ignore[arg-type]
            if handler is not None:
                return handler
        return None

    async def _find_handler(self, details: CallDetails) -> Any:
        return self.handler(details)
