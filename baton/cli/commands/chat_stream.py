"""A chat's answer over HTTP, as it comes. It outlives the router that brings it, by the rules of `client.continuation`:
a stream that breaks goes on at the next router, behind the last event that came (`Last-Event-ID`).
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

from baton.cli.usage import ClientUsageError
from baton.client.continuation import CallKind, Continuation
from baton.client.endpoint_rotation import EndpointRotation
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
)
from baton.messages.generation import Accepted, Chunk, Finished, GenerateEvent, Path
from baton.messages.ids import new_request_id
from baton.security.access import Access

_PROGRESS_S = 20.0
"""A router that died is back sooner; a person waits no longer."""
_SILENCE_S = 45.0
"""A router that has nothing to say says so twice in this time."""
_TELL_AFTER = 2
"""A stream that goes on at the next router is no story; one that doesn't, is."""
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
    """Where a router speaks HTTP."""

    host: str
    port: int
    is_tls: bool
    path: str = ""
    """Before `/v1`."""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Raises ClientUsageError for what is no URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ClientUsageError(f"--url {url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientUsageError(f"--url {url}: use http://HOST:PORT or https://HOST:PORT")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.path}"


class EventReader:
    """Turns the data of server-sent events into the events of an answer. Pure."""

    def __init__(self, position: int) -> None:
        """`position`: where the stream begins (`router.http.position`)."""
        self._position = position
        self._reason = ""
        self._usage: Mapping[str, Any] = {}

    def read_data(self, data: str) -> Chunk | Finished | None:
        """The event that this data means; raises the error that ended the stream, and Unreachable for what no router
        says.
        """
        if data == "[DONE]":
            return self._finished()
        try:
            found = json.loads(data)
            if "error" in found:
                raise error_from_object(found["error"])
            self._usage = found.get("usage") or self._usage
            return self._chunk(found["choices"][0]) if found["choices"] else None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise Unreachable(f"this is no answer to a chat: {data[:80]!r}") from None

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
        # What only gRPC tells is left empty.
        return Finished(self._reason, None, prompt, output, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, Path("", "", 1, ""))


class ChatClient:
    """Speaks to the routers of one cluster."""

    def __init__(
        self,
        places: Sequence[Endpoint],
        access: Access,
        rng: Random,
        is_hopeless: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        """`is_hopeless`: whether the cluster is known to be gone; `note` hears when an answer waits for a router."""
        self._places = places
        self._access = access
        self._rng = rng
        self._is_hopeless = is_hopeless
        self._note = note
        self._endpoints = EndpointRotation([str(place) for place in places], rng)

    def answer(
        self, question: Mapping[str, Any], timeout_s: float | None = None
    ) -> Generator[GenerateEvent, None, None]:
        """Stream the answer to a body of `/v1/chat/completions`: Accepted, Chunks, Finished; raises BatonErrors.

        Closing the generator early ends the request. A seed is drawn if there is none: repeated, it is the same answer.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        request_id = new_request_id(self._rng)
        body = {"seed": self._rng.getrandbits(_SEED_BITS), **question}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        continuation = Continuation(self._endpoints, self._rng, time.monotonic(), _PROGRESS_S)
        has_begun, failures = False, 0
        while True:
            call = continuation.next_call()
            headers = {"x-request-id": request_id, **_timeout_header(deadline)}
            position = 0
            if call.kind is CallKind.RESUME:
                headers["last-event-id"], position = ".".join(map(str, call.positions)), call.positions[0]
            try:
                with closing(self._open(self._places[call.place], body, headers, position)) as events:
                    for event in events:
                        fresh = continuation.take(event, time.monotonic())
                        if fresh is not None:
                            has_begun, failures = True, 0
                            yield fresh
                        if isinstance(event, Finished):
                            return
            except BatonError as error:
                failures += 1
                wait_s = self._failed(continuation, error, has_begun=has_begun)
                if has_begun and failures == _TELL_AFTER:
                    self._note(f"{error}; the answer goes on as soon as a router answers")
            time.sleep(wait_s)

    def _failed(self, continuation: Continuation, error: BatonError, *, has_begun: bool) -> float:
        """Seconds until the next call; raises the error when there is none."""
        try:
            wait_s = continuation.failed(error, time.monotonic())
            if self._is_hopeless():
                raise error
        except Unreachable:
            if has_begun:
                raise Unreachable(f"the answer broke off and could not go on: {error}") from None
            raise
        return wait_s

    def _open(
        self, place: Endpoint, body: Mapping[str, Any], headers: Mapping[str, str], position: int
    ) -> Generator[GenerateEvent, None, None]:
        shown = {"authorization": f"Bearer {self._access.api_key}"} if self._access.api_key else {}
        sent = {"content-type": "application/json", "accept-encoding": "identity", **shown, **headers}
        # Without the environment's proxies and .netrc: flags alone say where to, and with which key.
        client = httpx2.Client(verify=self._trusted(place), timeout=_SILENCE_S, trust_env=False)
        try:
            with (
                client,
                client.sse(
                    f"{place}/v1/chat/completions",
                    method="POST",
                    content=json.dumps(body),
                    headers=httpx2.Headers(sent, encoding="utf-8"),
                ) as source,
            ):
                answer = source.response
                if answer.status_code != 200:
                    raise error_from_response(answer.status_code, next(answer.iter_bytes(_MAX_ERROR_BYTES), b""), place)
                yield Accepted(headers["x-request-id"], 0, 0)
                reader = EventReader(position)
                for message in source:
                    event = reader.read_data(message.data) if message.data else None
                    if event is not None:
                        yield event
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Unreachable(f"{place} does not answer: {_words(error)}") from None
        # Whoever reads this has left at the end of the answer.
        raise Unreachable(f"{place} ended the stream before the answer was over")

    def _trusted(self, place: Endpoint) -> ssl.SSLContext:
        if not place.is_tls:
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody; loading the system's takes 35 ms
        tls = self._access.tls()
        return ssl.create_default_context(cadata=None if tls is None else tls.ca.decode())


def error_from_response(status: int, body: bytes, place: Endpoint) -> BatonError:
    """What an answer means that is no stream."""
    try:
        return error_from_object(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return Unreachable(f"{place} answers with {status} and no error of a router's")


def error_from_object(found: Mapping[str, Any]) -> BatonError:
    """The error that the router meant, from OpenAI's object."""
    message, kind, code, param = (str(found.get(name) or "") for name in ("message", "type", "code", "param"))
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
        raise DeadlineExceeded("the deadline passed before the answer was over")
    return {"x-request-timeout-ms": str(left_ms)}


def _words(error: BaseException) -> str:
    """What the operating system or TLS said about it, if that is the reason."""
    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, OSError):
        reason = reason.__cause__ or reason.__context__
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"its certificate is not believed ({reason.verify_message})"
    return (reason.strerror if reason is not None else None) or str(error) or type(error).__name__
