"""How long a client may take to say what it wants: else who never ends a request's head holds a connection for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0


class PatientProtocol(H11Protocol):
    """uvicorn's, which bounds only how long a connection is idle between two requests."""

    def __init__(self, head_s: float, **parts: Any) -> None:
        """`head_s`: for a request's head, from the connection or from its first byte on."""
        super().__init__(**parts)
        self._head_s = head_s
        self._head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_due = self.loop.call_later(self._head_s, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_is_there()
        elif self._head_due is None:
            self._head_due = self.loop.call_later(self._head_s, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def _head_is_there(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None
