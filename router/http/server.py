"""The HTTP server: uvicorn inside this process, with our own socket, signal handlers and event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from baton.background import OnFault, start_background
from baton.errors import ConfigError
from baton.observe.listener import Listener, listening_socket
from baton.security.connection_limit import ConnectionLimit, Place
from baton.security.tls_files import TlsFiles
from baton.wire.turn_budget import TurnBudget
from router.http.connection import HEAD_S, MAX_WIRE_BYTES, READ_BYTES, Connection

_log = logging.getLogger(__name__)

_SEND_BUFFER_BYTES = 64 << 10
_IDLE_CONNECTION_S = 75
_DATE_S = 1.0
"""How often the date of answers is renewed."""
_LOOK_S = 0.01
"""The pause between two looks at the connections of a server that ends."""


class HttpServer:
    """Serves an ASGI application: bind, start, stop."""

    def __init__(
        self,
        app: ASGIApp,
        stall_s: float = 30.0,
        tls: TlsFiles | None = None,
        head_s: float = HEAD_S,
        limit: ConnectionLimit | None = None,
        budget: TurnBudget | None = None,
        more_body_bytes: int = 0,
    ) -> None:
        """`stall_s`: a connection that reads nothing of what waits for it for so long is cut; `head_s`: how long a
        request's head may take. `limit` and `budget`: those of all connections of the process; without them the server
        has its own. `more_body_bytes`: how much larger than others the largest body may be.
        """
        self._max_wire_bytes = MAX_WIRE_BYTES + 2 * more_body_bytes
        self._stall_s = stall_s
        self._head_s = head_s
        self._read_buffer = memoryview(bytearray(READ_BYTES))
        self._budget = budget
        self._socket: socket.socket | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=self._connection,  # type: ignore[arg-type]  # it is called like the class
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_IDLE_CONNECTION_S,
                ssl_certfile=tls.cert if tls is not None else None,
                ssl_keyfile=tls.key if tls is not None else None,
            ),
            limit or ConnectionLimit(),
            lambda: self._budget.num_waiting if self._budget is not None else 0,
        )
        self._serving: asyncio.Task[None] | None = None

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._server.server_state.connections)

    def bind(self, host: str, port: int) -> int:
        """Bind a port (0: any free one) and return it; raises ConfigError if it can't be bound."""
        try:
            listener = listening_socket(host, port)
        except OSError as error:
            raise ConfigError(
                f"can't listen on {host}:{port} for HTTP: the port is in use, or the address is not one of this "
                "machine; choose another one with --http-port, 0 takes a free one"
            ) from error
        # The kernel applies these options to every connection.
        _set_connection_options(listener, self._stall_s)
        self._socket = listener
        bound: int = listener.getsockname()[1]
        return bound

    async def start(self) -> None:
        """Begin to serve; returns once connections are accepted."""
        assert self._socket is not None, "bind first"
        self._budget = self._budget or TurnBudget(asyncio.get_running_loop())
        serve = partial(self._server.serve, [self._socket])
        self._serving = start_background(serve, "http-server", on_fault=OnFault.END_PROCESS, may_end=True)
        up = asyncio.create_task(self._server.is_up.wait())
        await asyncio.wait((self._serving, up), return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await self._serving

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, let running exchanges end within the grace, then cut them. Idempotent."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]  # any number will do
            self._server.ends.set()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
        self._close_socket()

    def _connection(self, place: Place, **parts: Any) -> Connection:
        assert self._budget is not None
        return Connection(self._head_s, self._budget, self._read_buffer, place, self._max_wire_bytes, **parts)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with events for its start and its end.

    It ends at once where nothing is open. uvicorn's looks ten times a second whether it is to end, and waits for as
    long again.
    """

    def __init__(self, config: uvicorn.Config, limit: ConnectionLimit, num_unheard: Callable[[], int]) -> None:
        super().__init__(config)
        self._limit = limit
        self._num_unheard = num_unheard
        self.is_up = asyncio.Event()
        self.ends = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await self.lifespan.startup()
        self.servers = []
        for listening in sockets:
            name = f"http {listening.getsockname()[1]}"
            listener = Listener(name, listening, self._protocol, self._limit, self.config.ssl, self._num_unheard)
            self.servers.append(listener)  # type: ignore[arg-type]  # it is closed like asyncio's
            listener.start()
        self.started = True
        self.is_up.set()

    async def main_loop(self) -> None:
        while not self.ends.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self.ends.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.servers:
            listener.close()
        for listening in sockets or ():
            listening.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        if state.connections:
            # Idle connections close in the next turns of the loop, also where there is no grace.
            await asyncio.sleep(_LOOK_S)
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110  # uvicorn's protocols announce no end
                    await asyncio.sleep(_LOOK_S)
                for listener in self.servers:
                    await listener.wait_closed()
        except TimeoutError:
            for task in state.tasks:
                task.cancel()

    def _protocol(self, place: Place) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            place=place, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _set_connection_options(listener: socket.socket, stall_s: float) -> None:
    """Set options that the kernel applies to every connection of the listener.

    A client whose machine is gone, or that reads nothing any more, does not close its connection: its request would run
    on. And bytes that it does not read should wait here, where they are counted, and not in the kernel.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 10),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", int(stall_s * 1e3)),
        ("TCP_NODELAY", 1),
    ):
        # Not every system has all of them.
        if (option := getattr(socket, name, None)) is not None:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)


def raise_file_limit() -> None:
    """Raise the limit of open files as far as this process may: every connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:
        _log.warning("the limit of open files stays as it is: %s", error)
