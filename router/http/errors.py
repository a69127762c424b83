"""Maps Baton's errors to HTTP: statuses, error objects and headers, in OpenAI's and in Anthropic's API."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from baton.errors import (
    BatonError,
    ContextLengthExceeded,
    ContinuedElsewhere,
    EngineFault,
    InvalidRequest,
    Overloaded,
    SlowReader,
    Status,
    TemplateFault,
    TransferFailed,
    UnknownModel,
    VersionGone,
)

_RETRY_AFTER_S = 1.0
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Kind:
    """The status, type and code of one kind of error, as a client gets them."""

    status: int
    type: str
    code: str | None = None


_BY_STATUS = {
    Status.UNAUTHENTICATED: Kind(401, "authentication_error", "invalid_api_key"),
    Status.PERMISSION_DENIED: Kind(403, "permission_error", "permission_denied"),
    Status.INVALID_ARGUMENT: Kind(400, "invalid_request_error"),
    Status.NOT_FOUND: Kind(404, "invalid_request_error", "not_found"),
    Status.ALREADY_EXISTS: Kind(409, "conflict_error", "request_id_in_use"),
    Status.RESOURCE_EXHAUSTED: Kind(429, "rate_limit_error", "rate_limit_exceeded"),
    Status.CANCELLED: Kind(499, "cancelled_error", "cancelled"),
    Status.FAILED_PRECONDITION: Kind(500, "server_error"),
    Status.INTERNAL: Kind(500, "server_error"),
    Status.UNIMPLEMENTED: Kind(501, "not_implemented_error", "not_implemented"),
    Status.ABORTED: Kind(503, "server_error", "aborted"),
    Status.UNAVAILABLE: Kind(503, "overloaded_error", "overloaded"),
    Status.DEADLINE_EXCEEDED: Kind(504, "timeout_error", "deadline_exceeded"),
}
_BY_TYPE: dict[type[BatonError], Kind] = {
    UnknownModel: Kind(404, "invalid_request_error", "model_not_found"),
    ContextLengthExceeded: Kind(400, "invalid_request_error", "context_length_exceeded"),
    # Not 429: the client read too slowly, it did not ask too often.
    SlowReader: Kind(408, "timeout_error", "slow_reader"),
    EngineFault: Kind(500, "server_error", "engine_fault"),
    TemplateFault: Kind(500, "server_error", "chat_template_fault"),
    ContinuedElsewhere: Kind(503, "server_error", "continued_elsewhere"),
    VersionGone: Kind(503, "server_error", "version_gone"),
}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's types of errors, by its statuses; all other errors are invalid_request_error."""
_OVERLOADED = 529
"""Anthropic's status for an overloaded service; the same error is 503 in OpenAI's API."""


class HttpError(BatonError):
    """An error that exists only in HTTP: a wrong path or method, a body that is too long."""

    def __init__(
        self, kind: Kind, message: str, headers: Iterable[tuple[bytes, bytes]] = (), param: str | None = None
    ) -> None:
        """`param`: the field of the request that is wrong, if it is one."""
        super().__init__(message)
        self.kind = kind
        self.headers = tuple(headers)
        self.param = param


def kind_of(error: BatonError) -> Kind:
    """The kind of an error: that of its class, of a parent class, or else of its gRPC status."""
    if isinstance(error, HttpError):
        return error.kind
    if isinstance(error, TransferFailed):
        return Kind(503, "server_error", f"kv_transfer_{error.cause.value}")
    for parent in type(error).__mro__:
        if parent in _BY_TYPE:
            return _BY_TYPE[parent]
    return _BY_STATUS[error.status]


def error_of(error: BatonError) -> dict[str, str | None]:
    """OpenAI's error object: its message, type, param and code."""
    kind, message = kind_of(error), str(error)
    if isinstance(error, ContextLengthExceeded):
        # The text of an error of OpenAI's client is this message alone, and LangChain looks for the code there.
        message = f"{message} ({kind.code})"
    param = error.field if isinstance(error, InvalidRequest) else None
    if isinstance(error, HttpError):
        param = error.param
    return {"message": message, "type": kind.type, "param": param, "code": kind.code}


def error_body(error: BatonError) -> bytes:
    """OpenAI's error object as JSON."""
    # ASCII, since a message may quote text that is not valid Unicode.
    return json.dumps({"error": error_of(error)}).encode()


def error_event(error: BatonError) -> bytes:
    """The same as a server-sent event, the last one of a stream."""
    return b"data: " + error_body(error) + b"\n\n"


def error_headers(error: BatonError) -> Headers:
    """Headers that say whether and when to try again, as OpenAI's clients read them."""
    status = kind_of(error).status
    headers: Headers = list(error.headers) if isinstance(error, HttpError) else []
    if status == 401:
        # A browser asks for a user name, which may be anything, and for a password, which is the key.
        headers.append((b"www-authenticate", b'Bearer, Basic realm="baton"'))
    if status in (429, 503):
        seconds = _retry_after_s(error)
        headers.append((b"retry-after", b"%d" % math.ceil(seconds)))
        headers.append((b"retry-after-ms", b"%d" % math.ceil(seconds * 1e3)))
    if status in (408, 409, 429) or status >= 500:
        # Clients try again after these statuses unless this header says not to.
        headers.append((b"x-should-retry", b"true" if error.retryable else b"false"))
    return headers


def _retry_after_s(error: BatonError) -> float:
    return error.retry_after_s if isinstance(error, Overloaded) else _RETRY_AFTER_S


def error_object(error: BatonError, request_id: str) -> bytes:
    """Anthropic's error object as JSON. A refused field is named at the beginning of the message."""
    message = str(error)
    if isinstance(error, ContextLengthExceeded):
        # There is no code: clients know the error by these words, and shorten the prompt only where it is at fault.
        words = f"prompt is too long: {error.num_tokens} tokens > {error.longest} maximum"
        if output := error.num_output_tokens:
            asked = f"{error.num_tokens - output} + {output} > {error.longest}"
            words = (
                f"input length and `max_tokens` exceed context limit: {asked}, "
                "decrease input length or `max_tokens` and try again"
            )
        message = f"{words} ({message})"
    kind = _ANTHROPIC_TYPES.get(_anthropic_status(error), "invalid_request_error")
    fields: dict[str, Any] = {"type": kind, "message": message}
    if isinstance(error, InvalidRequest) and error.field == "thread":
        # With this Anthropic's client, whose tool_runner tries threads first, goes on without them.
        fields["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    # ASCII, since a message may quote text that is not valid Unicode.
    return json.dumps({"type": "error", "error": fields, "request_id": request_id}).encode()


def _anthropic_status(error: BatonError) -> int:
    kind = kind_of(error)
    if kind.type == "overloaded_error":
        return _OVERLOADED
    return kind.status if kind.status < 500 or kind.status in _ANTHROPIC_TYPES else 500


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How one API tells its clients of an error, and of which request."""

    status: Callable[[BatonError], int]
    body: Callable[[BatonError, str], bytes]
    """Makes the error object as JSON, of the error and the request's id."""
    id_names: tuple[bytes, ...]
    """The headers that have the request's id."""

    def id_headers(self, request_id: str) -> Headers:
        """The headers of an answer that name its request."""
        return [(name, request_id.encode()) for name in self.id_names]


OPENAI = ErrorForm(lambda error: kind_of(error).status, lambda error, _: error_body(error), (b"x-request-id",))
ANTHROPIC = ErrorForm(_anthropic_status, error_object, (b"request-id", b"x-request-id"))


def form_of(path: str) -> ErrorForm:
    """The form of errors below a path."""
    return ANTHROPIC if f"{path}/".startswith("/v1/messages/") else OPENAI
