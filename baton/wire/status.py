"""Translates errors to gRPC statuses and back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from baton import errors
from baton.errors import (
    AttemptsExhausted,
    BatonError,
    InvalidRequest,
    Overloaded,
    Status,
    TransferCause,
    TransferFailed,
    Unreachable,
)

_DOMAIN = "baton"
_PUSHBACK = "grpc-retry-pushback-ms"
"""Defined by gRPC (proposal A6), so that any client with a retry policy obeys it."""
_TOKENS_SENT = "baton-tokens-sent"
_MAX_TEXT_BYTES = 512
"""Limit of an error's text, in bytes. The text is sent three times in metadata, percent-encoded, and peers accept 8 KiB
of metadata."""
_CODES = {status: grpc.StatusCode[status.name] for status in Status}
_BY_NAME: dict[str, type[BatonError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BatonError)
}
_BY_CODE: dict[grpc.StatusCode, type[BatonError]] = {
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unreachable,
}


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> None:
    """End the call with the error's status, see `to_rpc`. Always raises."""
    status = to_rpc(error)
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.InternalError as gone:
        # The caller has left, or its deadline has passed. That is no fault, while a second AbortError would be reported
        # as one.
        raise asyncio.CancelledError(str(error)) from gone


class RpcStatus(NamedTuple):
    """The status, details and trailing metadata with which a call ends."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: Sequence[tuple[str, str | bytes]]


def to_rpc(error: BatonError) -> RpcStatus:
    """The gRPC status of an error, with its details (field violation, error class, whether a retry can help).

    The trailing metadata contain when to retry after an `Overloaded`, and how many tokens a broken stream had sent.
    """
    rich_status = status_pb2.Status(code=_CODES[error.status].value[0], message=_shortened(str(error)))
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=_DOMAIN)
    info.metadata["retryable"] = str(error.retryable).lower()
    if isinstance(error, TransferFailed):
        info.metadata["cause"], info.metadata["story"] = error.cause.value, _shortened(error.detail)
    rich_status.details.add().Pack(info)
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_shortened(error.field), description=_shortened(error.reason)
        )
        rich_status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    status = rpc_status.to_status(rich_status)
    return RpcStatus(status.code, status.details or "", (*(status.trailing_metadata or ()), *_trailer(error)))


def _trailer(error: BatonError) -> list[tuple[str, str]]:
    trailer = []
    if isinstance(error, Overloaded) and error.retryable:
        trailer.append((_PUSHBACK, str(round(error.retry_after_s * 1e3))))
    if error.tokens_sent is not None:
        trailer.append((_TOKENS_SENT, str(error.tokens_sent)))
    return trailer


def _shortened(text: str) -> str:
    data = text.encode(errors="replace")
    if len(data) <= _MAX_TEXT_BYTES:
        return data.decode()
    return data[:_MAX_TEXT_BYTES].decode(errors="ignore") + "..."


def from_rpc_error(error: grpc.RpcError, peer: str) -> BatonError:
    """The error that the server raised. A broken connection becomes `Unreachable`, which names the peer."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return Unreachable(f"{peer}: {error}")
    translated_error = _translate(error, peer)
    metadata: Iterable[Any] = error.trailing_metadata() or ()
    trailer = {key: value for key, value in metadata if isinstance(value, str)}
    if isinstance(translated_error, Overloaded) and (pushback := trailer.get(_PUSHBACK, "")).isdecimal():
        translated_error.retry_after_s = int(pushback) / 1e3
    if (sent := trailer.get(_TOKENS_SENT, "")).isdecimal():
        translated_error.tokens_sent = int(sent)
    return translated_error


def _translate(error: grpc.Call | grpc.aio.AioRpcError, peer: str) -> BatonError:
    message = error.details() or error.code().name
    reason, field, metadata = "", "", {}
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:
        status = None
    for detail in status.details if status else ():
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info) and info.domain == _DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad) and bad.field_violations:
            field, message = bad.field_violations[0].field, bad.field_violations[0].description
    kind = _BY_NAME.get(reason)
    if kind is not None and issubclass(kind, InvalidRequest):
        return kind(field, message)
    if kind is not None and issubclass(kind, TransferFailed):
        return _transfer_failed(metadata, message)
    if kind is not None:
        return kind(message)
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Unreachable(f"{peer} is another service's address ({message.rstrip('!')})")
    kind = _BY_CODE.get(error.code(), BatonError)
    return kind(f"{peer} does not answer: {message}" if kind is Unreachable else message)


def _transfer_failed(metadata: Mapping[str, str], message: str) -> BatonError:
    known = [cause for cause in TransferCause if cause.value == metadata.get("cause")]
    # A cause that only a newer version knows is named in the message.
    return TransferFailed(known[0], metadata.get("story", "")) if known else AttemptsExhausted(message)


@contextmanager
def translated(peer: str) -> Iterator[None]:
    """Raise gRPC errors in this context as the errors that the server raised."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, peer) from error
