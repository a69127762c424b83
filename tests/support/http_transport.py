"""A connection of the HTTP server over a fake transport instead of a socket."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from baton.security.connection_limit import ConnectionLimit
from baton.wire.turn_budget import TurnBudget
from router.http.connection import HEAD_S, READ_BYTES, Connection


class FakeTransport(asyncio.Transport):
    """Records what is written and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_paused = False
        self.has_ended = False
        """Whether the server has ended its side: nothing more will be written."""
        self.is_closed = False
        self.is_reset = False
        """Whether the client has reset the connection, which the server does not know yet."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        assert not self.has_ended
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self.is_reset:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        self.has_ended = True

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


class Client:
    """The client of one connection. As a kernel does, it delivers bytes only while reading is not paused."""

    def __init__(self, app: ASGIApp, budget: TurnBudget | None = None) -> None:
        loop = asyncio.get_running_loop()
        config = uvicorn.Config(app, ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False)
        config.load()
        self.transport = FakeTransport()
        self.unsent = b""
        """The bytes that wait in the kernel."""
        self.connection = Connection(
            HEAD_S,
            budget or TurnBudget(loop),
            memoryview(bytearray(READ_BYTES)),
            ConnectionLimit().take("http", ""),  # type: ignore[arg-type]
            config=config,
            server_state=ServerState(),
            app_state={},
            _loop=loop,
        )
        self.connection.connection_made(self.transport)

    def send(self, data: bytes) -> None:
        """Deliver as much as the connection reads now; the rest follows in later turns of the loop."""
        self.unsent += data
        self._arrive()

    def _arrive(self) -> None:
        if self.unsent and not self.transport.is_closed:
            if not self.transport.is_paused:
                buffer = self.connection.get_buffer(-1)
                piece, self.unsent = self.unsent[: len(buffer)], self.unsent[len(buffer) :]
                buffer[: len(piece)] = piece
                self.connection.buffer_updated(len(piece))
            if self.unsent:
                asyncio.get_running_loop().call_soon(self._arrive)

    async def run_loop(self, count: int = 20) -> None:
        """Let the loop run this number of turns."""
        for _ in range(count):
            await asyncio.sleep(0)
