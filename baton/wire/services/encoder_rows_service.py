"""The gRPC service with which nodes give each other rows that their encoders have made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import grpc
import xxhash

from baton.errors import ConfigError, DeadlineExceeded, Overloaded
from baton.messages.node import NodeDescription
from baton.messages.spans import RowsRequest
from baton.v1 import encoder_rows_pb2 as pb
from baton.v1 import encoder_rows_pb2_grpc
from baton.wire.codec.node import READ_ROWS

PART_BYTES = 1 << 18
"""Bytes of a message: the event loop does something else between two."""
MOST_READERS = 8
"""The most calls at a time; each holds the rows of one input."""
CALL_S = 10.0
"""The most seconds of a call: a reader that hangs must not hold rows for ever."""

_Context = grpc.aio.ServicerContext[Any, Any]


class RowMaker(Protocol):
    """Makes rows for other nodes."""

    def made(self, asked: RowsRequest) -> AbstractAsyncContextManager[None]:
        """Have the rows of `asked.content` made, which are there while the context is open. Raises BatonError."""
        ...


class EncoderRowsServicer(encoder_rows_pb2_grpc.EncoderRowsServicer):
    """Serves the rows that one node has."""

    def __init__(
        self,
        description: NodeDescription,
        rows: Callable[[str], memoryview | None],
        call_s: float = CALL_S,
        maker: RowMaker | None = None,
    ) -> None:
        """`rows` returns the bytes of an input's rows by its digest; None: it has none. `maker`: of an encode node; it
        bounds its calls itself.
        """
        self._description = description
        self._rows = rows
        self._call_s = call_s
        self._maker = maker
        self._num_readers = 0

    def add_to_server(self, server: grpc.aio.Server) -> None:
        encoder_rows_pb2_grpc.add_EncoderRowsServicer_to_server(self, server)

    async def ReadRows(self, request: pb.ReadRowsRequest, context: _Context) -> None:
        asked = READ_ROWS.from_pb(request)
        self._require_same(asked)
        if self._maker is not None and asked.content is not None:
            async with self._maker.made(asked):
                await self._send(asked.digest, context)
            return
        if self._num_readers >= MOST_READERS:
            raise Overloaded(f"{self._num_readers} others read rows of {self._description.node_id}")
        self._num_readers += 1
        try:
            await self._send(asked.digest, context)
        finally:
            self._num_readers -= 1

    async def _send(self, digest: str, context: _Context) -> None:
        rows = self._rows(digest)
        if rows is None:
            return
        deadline = asyncio.get_running_loop().time() + self._call_s
        checksum = xxhash.xxh3_128()
        for start in range(0, len(rows), PART_BYTES):
            part = bytes(rows[start : start + PART_BYTES])
            checksum.update(part)
            await self._write(context, pb.ReadRowsResponse(rows=part), deadline)
        await self._write(context, pb.ReadRowsResponse(checksum=checksum.digest()), deadline)

    async def _write(self, context: _Context, message: pb.ReadRowsResponse, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await context.write(message)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the rows were not read within {self._call_s:g} s") from error
        except grpc.aio.InternalError as error:
            # The caller has left, or its deadline has passed.
            raise asyncio.CancelledError from error

    def _require_same(self, asked: RowsRequest) -> None:
        ours = self._description
        if asked.incarnation != ours.incarnation:
            raise ConfigError(f"this is {ours.incarnation}, not {asked.incarnation}")
        theirs = asked.rows_decided_by
        for field, value in ours.rows_decided_by.items():
            if theirs[field] != value:
                raise ConfigError(f"the {field} of {ours.node_id} is {value}, not {theirs[field][:200]}")
