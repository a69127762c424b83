"""Streams the answers of a chat over HTTP with server-sent events.

A stream that breaks is continued at another router after the last event that arrived (`Last-Event-ID`), by the rules of
`baton.client.continuation`.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx2

from baton.client.continuation import CallKind, Continuation, EndpointRotation
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    RequestNotFound,
    Unauthenticated,
    UnknownModel,
    Unreachable,
    UsageError,
)
from baton.messages.generation import Accepted, Chunk, Finished, GenerateEvent, Path
from baton.messages.ids import new_request_id
from baton.security.access import Access

_RETRY_BUDGET_S = 20.0
"""How long to try without a new token. A router that died is back sooner, and a person does not wait longer."""
_SILENCE_S = 45.0
"""How long to wait for data. A router sends keep-alives at least twice in this time."""
_REPORTED_FAILURE = 2
"""The user is told at this many failures in a row, since a stream usually continues at the next router."""
_MAX_ERROR_BYTES = 1 << 16
_SEED_BITS = 53
_BY_TYPE: dict[str, type[BatonError]] = {
    "authentication_error": Unauthenticated,
    "permission_error": PermissionDenied,
    "conflict_error": DuplicateRequest,
    "rate_limit_error": QuotaExceeded,
    "cancelled_error": Cancelled,
    "overloaded_error": Overloaded,
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The HTTP address of a router."""

    host: str
    port: int
    is_tls: bool
    path: str = ""
    """The path before `/v1`."""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """The endpoint of an HTTP URL. Raises UsageError for other text."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"--url {url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url {url}: use http://HOST:PORT or https://HOST:PORT")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.path}"


class EventReader:
    """Turns the data of server-sent events into the events of an answer. Does no I/O."""

    def __init__(self, position: int) -> None:
        """`position` is the token index at which the stream begins (`router.http.endpoint.event_id`)."""
        self._position = position
        self._reason = ""
        self._usage: Mapping[str, Any] = {}

    def read_data(self, data: str) -> Chunk | Finished | None:
        """The event that this data means, if it means one.

        Raises the error that ended the stream, and Unreachable for data that no router sends.
        """
        if data == "[DONE]":
            return self._finished()
        try:
            event = json.loads(data)
            if "error" in event:
                raise error_from_object(event["error"])
            self._usage = event.get("usage") or self._usage
            return self._chunk(event["choices"][0]) if event["choices"] else None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise Unreachable(f"this is not an answer to a chat: {data[:80]!r}") from None

    def _chunk(self, choice: Mapping[str, Any]) -> Chunk | None:
        text, ids = choice["delta"].get("content") or "", choice.get("token_ids") or ()
        self._reason = choice.get("finish_reason") or self._reason
        if not (text or ids):
            return None
        chunk = Chunk(self._position, [int(token) for token in ids], str(text))
        self._position = chunk.next_position
        return chunk

    def _finished(self) -> Finished:
        prompt, output = (int(self._usage.get(name, 0)) for name in ("prompt_tokens", "completion_tokens"))
        # HTTP does not send timings and path.
        return Finished(self._reason, None, prompt, output, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, Path("", "", 1, ""))


class ChatClient:
    """A client of the routers of one cluster."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        access: Access,
        rng: Random,
        has_cluster_ended: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        """`has_cluster_ended` is called after each failed call: if it returns True, no further router is tried.
        `note` is called with a text for the user when an answer waits for a router."""
        self._routers = endpoints
        self._access = access
        self._rng = rng
        self._has_cluster_ended = has_cluster_ended
        self._note = note
        self._rotation = EndpointRotation([str(endpoint) for endpoint in endpoints], rng)

    def answer(
        self, question: Mapping[str, Any], timeout_s: float | None = None
    ) -> Generator[GenerateEvent, None, None]:
        """Stream the answer to a body of `/v1/chat/completions`: Accepted, Chunks, Finished. Raises BatonErrors.

        Closing the generator early cancels the request. If the body has no seed, one is drawn, so that a repeated
        request generates the same answer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        request_id = new_request_id(self._rng)
        body = {"seed": self._rng.getrandbits(_SEED_BITS), **question}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        continuation = Continuation(self._rotation, self._rng, time.monotonic(), _RETRY_BUDGET_S)
        has_begun, failures = False, 0
        while True:
            call = continuation.next_call()
            headers = {"x-request-id": request_id, **_timeout_header(deadline)}
            position = 0
            if call.kind is CallKind.RESUME:
                headers["last-event-id"], position = ".".join(map(str, call.positions)), call.positions[0]
            try:
                with closing(self._open(self._routers[call.endpoint], body, headers, position)) as events:
                    for event in events:
                        new_part = continuation.receive(event, time.monotonic())
                        if new_part is not None:
                            has_begun, failures = True, 0
                            yield new_part
                        if isinstance(event, Finished):
                            return
            except BatonError as error:
                failures += 1
                wait_s = self._failed(continuation, error, has_begun=has_begun)
                if has_begun and failures == _REPORTED_FAILURE:
                    self._note(f"{error}; the answer continues as soon as a router answers")
            time.sleep(wait_s)

    def _failed(self, continuation: Continuation, error: BatonError, *, has_begun: bool) -> float:
        """Seconds to wait before the next call. Raises the error if there is to be none."""
        try:
            wait_s = continuation.call_failed(error, time.monotonic())
            if self._has_cluster_ended():
                raise error
        except Unreachable:
            if has_begun:
                raise Unreachable(f"the answer broke off and could not be continued: {error}") from None
            raise
        return wait_s

    def _open(
        self, endpoint: Endpoint, body: Mapping[str, Any], headers: Mapping[str, str], position: int
    ) -> Generator[GenerateEvent, None, None]:
        key_header = {"authorization": f"Bearer {self._access.api_key}"} if self._access.api_key else {}
        sent = {"content-type": "application/json", "accept-encoding": "identity", **key_header, **headers}
        # Proxies of the environment and .netrc are ignored, because flags decide on address and key.
        client = httpx2.Client(verify=self._tls_context(endpoint), timeout=_SILENCE_S, trust_env=False)
        has_begun = False
        try:
            with (
                client,
                client.sse(
                    f"{endpoint}/v1/chat/completions",
                    method="POST",
                    content=json.dumps(body),
                    headers=httpx2.Headers(sent, encoding="utf-8"),
                ) as source,
            ):
                answer = source.response
                if answer.status_code != 200:
                    raise error_from_response(
                        answer.status_code, next(answer.iter_bytes(_MAX_ERROR_BYTES), b""), endpoint
                    )
                has_begun = True
                yield Accepted(headers["x-request-id"], 0, 0)
                reader = EventReader(position)
                for message in source:
                    event = reader.read_data(message.data) if message.data else None
                    if event is not None:
                        yield event
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            what = f"the connection to {endpoint} broke" if has_begun else f"{endpoint} does not answer"
            raise Unreachable(f"{what}: {_reason(error)}") from None
        # The caller stops reading at the end of an answer, so the stream has ended before it.
        raise Unreachable(f"{endpoint} ended the stream before the end of the answer")

    def _tls_context(self, endpoint: Endpoint) -> ssl.SSLContext:
        if not endpoint.is_tls:
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # unused; loading the system's authorities takes 35 ms
        tls = self._access.tls()
        return ssl.create_default_context(cadata=None if tls is None else tls.ca.decode())


def error_from_response(status: int, body: bytes, endpoint: Endpoint) -> BatonError:
    """The error that a response with another status than 200 means."""
    try:
        return error_from_object(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return Unreachable(f"{endpoint} answers with status {status}, but not as a router does")


def error_from_object(error: Mapping[str, Any]) -> BatonError:
    """The error that an OpenAI error object of a router means."""
    message, kind, code, param = (str(error.get(name) or "") for name in ("message", "type", "code", "param"))
    if code == "not_found":
        return RequestNotFound(message)
    if code == "deadline_exceeded":
        return DeadlineExceeded(message)
    if kind == "invalid_request_error":
        refusal = UnknownModel if code == "model_not_found" else InvalidRequest
        return refusal(param or "request", message.removeprefix(f"{param}: "))
    return _BY_TYPE.get(kind, BatonError)(message)


def _timeout_header(deadline: float | None) -> dict[str, str]:
    if deadline is None:
        return {}
    left_ms = round((deadline - time.monotonic()) * 1e3)
    if left_ms <= 0:
        raise DeadlineExceeded("the deadline passed before the end of the answer")
    return {"x-request-timeout-ms": str(left_ms)}


def _reason(error: BaseException) -> str:
    """Why a call failed: the reason of the operating system or of TLS, if there is one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({cause.verify_message})"
    return (cause.strerror if cause is not None else None) or str(error) or type(error).__name__
