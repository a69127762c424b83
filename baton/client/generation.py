"""The synchronous client of the public service."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random
from types import TracebackType
from typing import TypeVar

from baton.client.continuation import Call, CallKind, Continuation, repeatable
from baton.client.endpoint_rotation import EndpointRotation
from baton.errors import BatonError, DeadlineExceeded, RequestNotFound, Unreachable
from baton.messages.generation import Finished, GenerateEvent, GenerateRequest, ModelCard
from baton.security.access import Access, default_access
from baton.wire.clients.generation_client import GenerationStub
from baton.wire.credentials import Dialer

T = TypeVar("T")

PROGRESS_S = 60.0
"""Seconds during which an accepted request is tried again while no router brings anything new of it."""
SILENCE_S = 1.0
"""Seconds without a message after which a router is probed, where there are several routers."""


class GenerationClient:
    """The blocking client of one cluster. Its addresses are the HOST:PORT of the cluster's routers.

    Calls raise BatonErrors: Unreachable, InvalidRequest, and so on. When a router is lost, or hangs without closing its
    connections, the stream continues at another one (see `baton.client.continuation`).
    """

    def __init__(
        self,
        *addresses: str,
        rng: Random | None = None,
        progress_s: float = PROGRESS_S,
        silence_s: float = SILENCE_S,
        access: Access | None = None,
        is_hopeless: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_hopeless` is called after the loss of a router; True means that the cluster is known to have ended."""
        self._is_hopeless = is_hopeless
        self._rng = rng or Random()
        self._endpoints = EndpointRotation(addresses, self._rng)
        self._progress_s = progress_s
        # With a single router there is no other to continue at, so that its silence is not watched.
        silence = silence_s if len(addresses) > 1 else None
        dialer = Dialer.to_public(access or default_access.get())
        self._stubs = [GenerationStub(address, silence, dialer) for address in addresses]

    def generate(
        self, request: GenerateRequest, timeout_s: float | None = None
    ) -> Generator[GenerateEvent, None, None]:
        """Stream one request: Accepted, Chunks, Finished; with several sequences also a SequenceFinished for each.

        Closing the generator early cancels the request. Without a request id or seed, the client draws them.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        owns_id = not request.request_id
        request = repeatable(request, self._rng)
        continuation = Continuation(self._endpoints, self._rng, time.monotonic(), self._progress_s, owns_id=owns_id)
        while True:
            try:
                with closing(self._open(continuation.next_call(), request, left(deadline, time.monotonic()))) as events:
                    for event in events:
                        fresh = continuation.take(event, time.monotonic())
                        if fresh is not None:
                            yield fresh
                        if isinstance(event, Finished):
                            return
                raise Unreachable("the stream ended before the request did")
            except BatonError as error:
                wait_s = continuation.failed(error, time.monotonic())
                if self._is_hopeless():
                    raise
            time.sleep(wait_s)

    def _open(
        self, call: Call, request: GenerateRequest, timeout_s: float | None
    ) -> Generator[GenerateEvent, None, None]:
        stub = self._stubs[call.place]
        if call.kind is CallKind.GENERATE:
            return stub.generate(replace(request, call=call.number), timeout_s)
        return stub.resume(request.request_id, call.positions, timeout_s, call.number)

    def cancel(self, request_id: str) -> None:
        """End a running request at whichever router serves it. Raises RequestNotFound."""
        errors = []
        for stub in self._stubs:
            try:
                return stub.cancel(request_id)
            except (RequestNotFound, Unreachable) as error:
                errors.append(error)
        raise worst(errors)

    def tokenize(self, text: str, model: str = "") -> Sequence[int]:
        """The token ids that `generate` would see."""
        return self._anywhere(lambda stub: stub.tokenize(model, text))

    def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """The text of token ids."""
        return self._anywhere(lambda stub: stub.detokenize(model, token_ids))

    def list_models(self) -> Sequence[ModelCard]:
        """The models that are served."""
        return self._anywhere(GenerationStub.list_models)

    def _anywhere(self, ask: Callable[[GenerationStub], T]) -> T:
        """The answer of the first router that answers."""
        place = self._endpoints.first(time.monotonic())
        for _ in self._stubs[1:]:
            try:
                return ask(self._stubs[place])
            except Unreachable:
                self._endpoints.doubt(place, time.monotonic())
                place = self._endpoints.after(place, time.monotonic())
        return ask(self._stubs[place])

    def close(self) -> None:
        for stub in self._stubs:
            stub.close()

    def __enter__(self) -> GenerationClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def left(deadline: float | None, now: float) -> float | None:
    """Seconds until the deadline. Raises DeadlineExceeded when it has passed."""
    if deadline is not None and now >= deadline:
        raise DeadlineExceeded("the deadline passed while the request was taken to another router")
    return None if deadline is None else deadline - now


def worst(errors: Sequence[BatonError]) -> BatonError:
    """The error to report when all routers have failed: Unreachable if there is one, since that router may have had the
    request."""
    return next((error for error in errors if isinstance(error, Unreachable)), errors[0])
