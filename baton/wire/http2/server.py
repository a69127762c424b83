"""The sockets of a gRPC server of our own: connections on this process's event loop, each call a task.

It takes the place of `grpc.aio.Server` for what many clients stream from. There each message that is written costs a
wake-up of gRPC's own thread, one of ours, and the way back: five to ten times what is done here, where all that a turn
of the loop brings for a connection leaves it with one system call.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Iterable, Sequence
from functools import partial, reduce
from typing import Any

import grpc

from baton.observe.listener import Listener, listening_socket
from baton.observe.log_limit import LimitedLog
from baton.security.connection_limit import ConnectionLimit
from baton.wire.authenticator import Authenticator
from baton.wire.http2.call import STALL_S, Call, CallDetails, HeldBytes
from baton.wire.http2.call_queue import CallQueue
from baton.wire.http2.server_link import ServerLink, too_many_keyless
from baton.wire.turn_budget import TurnBudget

_log = logging.getLogger(__name__)

_READ_BYTES = 32 << 10
_MESSAGES_UNREAD = 4
"""Of the largest size, what one connection may have sent and nobody has read."""
_MESSAGES_UNREAD_OF_ALL = 16
_KEYLESS_PER_CONNECTION = 100
MAX_KEYLESS_CALLS = 1_000
"""Open calls of methods that need no key, in the whole process."""
REQUEST_S = 30.0
"""How long a request of one message may take to come."""


class Http2Server(grpc.aio.Server):
    """Serves the handlers of `grpc.aio` servicers behind the same interceptors: coroutines and generators, no threads.

    It takes compressed requests (gzip) and compresses no answers.
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

        A peer that says nothing for `quiet_s` is asked whether it is there; who does not answer within `answer_s` is
        gone, as is who has not greeted within `quiet_s`. Who takes longer than `request_s` for a request of one message
        hears so, and so does who takes nothing of an answer for `stall_s`.
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
        """Of all connections: what is read is looked at before anything else is."""
        self.held = HeldBytes()
        """Of all connections."""
        self.max_held_bytes = _MESSAGES_UNREAD_OF_ALL * max_message_bytes
        self.num_keyless = 0
        """Calls that are open of methods that are open to anyone."""
        self.broken = LimitedLog(_log, logging.INFO)
        """Connections that ended for a fault of their peers'."""
        self.queue = CallQueue(self._begin)
        self._calls: set[asyncio.Task[None]] = set()
        self.is_stopping = False
        self._stopped = asyncio.Event()
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        # The first one stands before the others.
        self.find = reduce(lambda inner, one: partial(one.intercept_service, inner), reversed(interceptors), self._look)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler[Any, Any]]) -> None:
        self._generic += generic_rpc_handlers

    def add_insecure_port(self, address: str) -> int:
        """HOST:PORT; port 0 is picked. With TLS if the server was given any. Raises RuntimeError."""
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
        """Calls that have begun and not ended."""
        return len(self._calls)

    @property
    def port(self) -> int:
        """Of its first address."""
        port: int = self._sockets[0].getsockname()[1]
        return port

    @property
    def num_open(self) -> int:
        """Calls that have come and are not answered, of all connections; also those that have not begun."""
        return sum(link.num_calls for link in self.connections)

    @property
    def budget(self) -> TurnBudget:
        """The budget for what connections send."""
        if self._budget is None:
            self._budget = TurnBudget(asyncio.get_running_loop())
        return self._budget

    async def start(self) -> None:
        for one in self._sockets:
            name = f"grpc {one.getsockname()[1]}"
            listener = Listener(
                name,
                one,
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
            listener.close()
        for one in self._sockets:
            one.close()
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
                await asyncio.sleep(0)  # those that come begin in the next turn

    def _begin(self, call: Call) -> None:
        task = call.task = asyncio.get_running_loop().create_task(call.serve(self.find))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def admit_keyless(self, link: ServerLink) -> None:
        """Of a method that is open to anyone, one more call; raises BadCall. Where there are too many, it is who has
        the most of them that has one less.
        """
        if link.num_keyless >= _KEYLESS_PER_CONNECTION:
            raise too_many_keyless()
        if self.num_keyless >= MAX_KEYLESS_CALLS:
            greediest = max(self.connections, key=lambda one: one.num_keyless)
            if greediest.num_keyless <= link.num_keyless + 1:
                raise too_many_keyless()
            greediest.end_keyless()

    def handler(self, details: CallDetails) -> Any:
        """The handler as it was added, before any interceptor; None: nobody serves this method."""
        for generic in self._generic:
            handler = generic.service(details)  # type: ignore[arg-type]
            if handler is not None:
                return handler
        return None

    async def _look(self, details: CallDetails) -> Any:
        return self.handler(details)
