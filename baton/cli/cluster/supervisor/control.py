"""The socket in the run directory over which a router of the cluster asks for more nodes, or for fewer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog

from router.scalers.asking import MAX_REQUEST_BYTES, answered
from router.scalers.scaler import Scaler

_log = structlog.get_logger(__name__)
_EXCHANGE_S = 10.0
"""Seconds for a request and its answer."""


@asynccontextmanager
async def control_socket(path: Path, nodes: Scaler) -> AsyncIterator[None]:
    """Answer requests to `nodes` at a socket that this user's processes alone can connect to, until the block ends.

    Without the socket, because its path is too long for one, the cluster serves as well.
    """

    async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_EXCHANGE_S):
                writer.write(await answered(await reader.readuntil(b"\n"), nodes))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # whoever asked has gone, or asks nothing that is known
        finally:
            writer.close()

    try:
        server = await asyncio.start_unix_server(exchange, path, limit=MAX_REQUEST_BYTES)
        os.chmod(path, 0o600)
    except OSError as error:
        _log.warning("the number of nodes can't be changed", socket=str(path), reason=str(error))
        yield
        return
    try:
        yield
    finally:
        server.close()
        with suppress(FileNotFoundError):
            os.unlink(path)
