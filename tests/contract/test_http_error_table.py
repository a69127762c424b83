"""Every class of errors has an HTTP status and an error object."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from baton import errors
from baton.errors import BatonError, InvalidRequest, Overloaded, Status, TransferCause, TransferFailed
from router.http.errors import error_body, error_headers, kind_of

EXPECTED = {
    errors.UnknownModel: 404,
    errors.InvalidRequest: 400,
    errors.UsageError: 400,
    errors.AdapterRefused: 400,
    errors.RequestNotFound: 404,
    errors.NodeNotFound: 404,
    errors.DuplicateRequest: 409,
    errors.SlowReader: 408,
    errors.Overloaded: 503,
    errors.ContinuedElsewhere: 503,
    errors.NodeLost: 503,
    errors.Unreachable: 503,
    errors.AttemptsExhausted: 503,
    errors.StreamDiverged: 503,
    errors.VersionGone: 503,
    errors.TransferFailed: 503,
    errors.DeadlineExceeded: 504,
    errors.Cancelled: 499,
    errors.QuotaExceeded: 429,
    errors.Unauthenticated: 401,
    errors.PermissionDenied: 403,
    errors.EngineFault: 500,
    errors.TemplateFault: 500,
    errors.ConfigError: 500,
    errors.BatonError: 500,
}
"""A class that is not listed has the status of its parent."""


def error_classes(kind: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from error_classes(child)


def example(kind: type[BatonError]) -> BatonError:
    if issubclass(kind, InvalidRequest):
        return kind("field", "reason")
    if issubclass(kind, TransferFailed):
        return kind(TransferCause.PEER_GONE)
    return kind("story")


@pytest.mark.parametrize("kind", list(error_classes()))
def test_every_error_has_an_http_status_and_an_error_object(kind: type[BatonError]) -> None:
    error = example(kind)
    status = next(EXPECTED[parent] for parent in kind.__mro__ if parent in EXPECTED)
    assert kind_of(error).status == status
    found = json.loads(error_body(error))["error"]
    # LangChain looks for this code in the message alone.
    code = " (context_length_exceeded)" if kind is errors.ContextLengthExceeded else ""
    assert found["message"] == f"{error}{code}"
    assert found["type"].endswith("_error")
    assert found["param"] == ("field" if issubclass(kind, InvalidRequest) else None)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    assert ("retry-after" in headers) == ("retry-after-ms" in headers) == (status in (429, 503))
    # Clients try these again by themselves, unless they are told not to.
    if status in (408, 409, 429) or status >= 500:
        assert headers["x-should-retry"] == str(kind.retryable).lower()


@pytest.mark.parametrize("cause", TransferCause)
def test_a_failed_kv_transfer_has_its_cause_as_error_code(cause: TransferCause) -> None:
    found = json.loads(error_body(TransferFailed(cause, "3 attempts failed")))["error"]
    assert (found["type"], found["code"]) == ("server_error", f"kv_transfer_{cause.value}")


def test_every_status_maps_to_an_http_status() -> None:
    for status in Status:
        error = BatonError("story")
        error.status = status
        assert 400 <= kind_of(error).status < 600


def test_retry_after_is_in_whole_seconds_and_in_milliseconds() -> None:
    headers = dict(error_headers(Overloaded("full", 0.25)))
    assert (headers[b"retry-after"], headers[b"retry-after-ms"]) == (b"1", b"250")
