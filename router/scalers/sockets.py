"""Asks over a Unix socket: how a router of `baton up` asks its supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path

from router.scalers.programs import MAX_OUTPUT_BYTES
from router.scalers.scaler import CALL_S, ScalerFailed, ScalerFault

SOCKET_NAME = "control.sock"


class SocketAsk:
    """Sends each request over a connection of its own, whose end is the end of the answer."""

    def __init__(self, socket: Path, limit_s: float = CALL_S) -> None:
        self._socket = socket
        self._limit_s = limit_s

    async def __call__(self, request: bytes, subject: str) -> bytes:
        """The answer. Raises ScalerFailed about `subject`."""
        try:
            async with asyncio.timeout(self._limit_s):
                reader, writer = await asyncio.open_unix_connection(str(self._socket))
                try:
                    writer.write(request + b"\n")
                    await writer.drain()
                    return await self._read(reader, subject)
                finally:
                    writer.close()
        except TimeoutError:
            raise ScalerFailed(ScalerFault.TIMEOUT, subject, f"no answer within {self._limit_s:g} s") from None
        except OSError as error:
            detail = f"{self._socket} does not answer: {error.strerror or error}"
            raise ScalerFailed(ScalerFault.UNREACHABLE, subject, detail) from None

    async def _read(self, reader: asyncio.StreamReader, subject: str) -> bytes:
        answer = bytearray()
        while piece := await reader.read(65_536):
            answer += piece
            if len(answer) > MAX_OUTPUT_BYTES:
                detail = f"the answer has more than {MAX_OUTPUT_BYTES} bytes"
                raise ScalerFailed(ScalerFault.INVALID_ANSWER, subject, detail)
        return bytes(answer)
