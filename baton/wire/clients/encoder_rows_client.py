"""Reads rows that the encoder of another node has made."""

from __future__ import annotations

import grpc
import xxhash

from baton.errors import BatonError
from baton.messages.spans import RowsRequest
from baton.v1 import encoder_rows_pb2_grpc
from baton.wire import status
from baton.wire.codec.encoder_rows import READ_ROWS
from baton.wire.credentials import Dialer


async def read_rows(address: str, asked: RowsRequest, num_bytes: int, timeout_s: float, dialer: Dialer) -> bytes | None:
    """The `num_bytes` bytes of an input's rows (float32, row by row, little-endian); None if the node has none.

    Raises BatonError if they do not come within `timeout_s`, are more or fewer, or are damaged.
    """
    channel = dialer.channel(address)
    parts: list[bytes] = []
    checksum, num_read, expected = xxhash.xxh3_128(), 0, b""
    try:
        call = encoder_rows_pb2_grpc.EncoderRowsStub(channel).ReadRows(READ_ROWS.to_pb(asked), timeout=timeout_s)
        async for message in call:
            if message is None or not (message.rows or message.checksum):
                # gRPC gives None for bytes that are no message.
                raise BatonError(f"{address} sent a message that can't be decoded, or is empty")
            num_read += len(message.rows)
            if num_read > num_bytes:
                raise BatonError(f"{address} sent more than the {num_bytes} bytes of the rows")
            checksum.update(message.rows)
            parts.append(message.rows)
            expected = message.checksum
    except grpc.RpcError as error:
        raise status.from_rpc_error(error, address) from error
    finally:
        await channel.close(None)
    if not parts:
        return None
    if num_read < num_bytes or checksum.digest() != expected:
        raise BatonError(f"the rows that {address} sent are damaged: {num_read} bytes of {num_bytes}")
    return b"".join(parts)
