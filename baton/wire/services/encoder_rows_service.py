"""The gRPC service with which nodes give each other rows that their encoders have made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import xxhash

from baton.errors import ConfigError, DeadlineExceeded, Overloaded
from baton.messages.node import NodeDescription
from baton.messages.spans import DECIDE_ROWS, RowsRequest
from baton.v1 import encoder_rows_pb2 as pb
from baton.v1 import encoder_rows_pb2_grpc
from baton.wire.codec.encoder_rows import READ_ROWS

PART_BYTES = 1 << 18
"""Bytes of a message: the event loop does something else between two."""
MOST_READERS = 8
"""The most calls at a time; each holds the rows of one input."""
CALL_S = 10.0
"""The most seconds of a call: a reader that hangs must not hold rows for ever."""

_Context = grpc.aio.ServicerContext[Any, Any]


class EncoderRowsServicer(encoder_rows_pb2_grpc.EncoderRowsServicer):
    """Serves the rows that one node has."""

    def __init__(
        self, description: NodeDescription, rows: Callable[[str], memoryview | None], call_s: float = CALL_S
    ) -> None:
        """`rows` returns the bytes of an input's rows by its digest; None: it has none."""
        self._description = description
        self._rows = rows
        self._call_s = call_s
        self._num_readers = 0

    def add_to_server(self, server: grpc.aio.Server) -> None:
        encoder_rows_pb2_grpc.add_EncoderRowsServicer_to_server(self, server)

    async def ReadRows(self, request: pb.ReadRowsRequest, context: _Context) -> None:
        self._require_same(READ_ROWS.from_pb(request))
        if self._num_readers >= MOST_READERS:
            raise Overloaded(f"{self._num_readers} others read rows of {self._description.node_id}")
        rows = self._rows(request.digest)
        if rows is None:
            return
        deadline = asyncio.get_running_loop().time() + self._call_s
        self._num_readers += 1
        try:
            checksum = xxhash.xxh3_128()
            for start in range(0, len(rows), PART_BYTES):
                part = bytes(rows[start : start + PART_BYTES])
                checksum.update(part)
                await self._write(context, pb.ReadRowsResponse(rows=part), deadline)
            await self._write(context, pb.ReadRowsResponse(checksum=checksum.digest()), deadline)
        finally:
            self._num_readers -= 1

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
        for field in DECIDE_ROWS:
            if (theirs := getattr(asked, field)) != getattr(ours, field):
                raise ConfigError(f"the {field} of {ours.node_id} is {getattr(ours, field)}, not {theirs[:200]}")
