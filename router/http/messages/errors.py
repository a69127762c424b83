"""Errors in the format of Anthropic's API: its types, its statuses, and the object around them."""

from __future__ import annotations

import json
from typing import Any

from baton.errors import BatonError, ContextLengthExceeded, InvalidRequest
from router.http.errors import kind_of

_TYPES = {
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
_OVERLOADED = 529
"""Anthropic's status for an overloaded service; the same error is 503 in OpenAI's API."""


def status_of(error: BatonError) -> int:
    """The HTTP status of an error."""
    kind = kind_of(error)
    if kind.type == "overloaded_error":
        return _OVERLOADED
    return kind.status if kind.status < 500 or kind.status in _TYPES else 500


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
    found: dict[str, Any] = {"type": _TYPES.get(status_of(error), "invalid_request_error"), "message": message}
    if isinstance(error, InvalidRequest) and error.field == "thread":
        # With this Anthropic's client, whose tool_runner tries threads first, goes on without them.
        found["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    # ASCII, since a message may quote text that is not valid Unicode.
    return json.dumps({"type": "error", "error": found, "request_id": request_id}).encode()
