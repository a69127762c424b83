"""The synchronous client of the public service."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random, SystemRandom
from types import TracebackType
from typing import TypeVar

from baton.client.continuation import Call, CallKind, Continuation, with_id_and_seed
from baton.client.endpoint_rotation import EndpointRotation
from baton.errors import BatonError, DeadlineExceeded, RequestNotFound, Unreachable
from baton.messages.generation import Finished, GenerateEvent, GenerateRequest, ModelCard
from baton.messages.pooling import EmbedRequest, EmbedResponse
from baton.security.access import Access, default_access
from baton.wire.clients.generation_client import GenerationStub
from baton.wire.credentials import Dialer

T = TypeVar("T")

RETRY_BUDGET_S = 60.0
"""Seconds without a router that has the request after which an accepted request fails."""
SILENCE_S = 1.0
"""Seconds without a message after which a router is probed, if there are several routers."""


class GenerationClient:
    """The blocking client of one cluster. Its addresses are the HOST:PORT of the cluster's routers.

    Calls raise BatonErrors: Unreachable, InvalidRequest, and so on. When a router is lost, or hangs without closing its
    connections, the stream continues at another one (see `baton.client.continuation`).
    """

    def __init__(
        self,
        *addresses: str,
        rng: Random | None = None,
        retry_budget_s: float = RETRY_BUDGET_S,
        silence_s: float = SILENCE_S,
        access: Access | None = None,
        has_cluster_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """`retry_budget_s`: seconds without a router that has the request after which an accepted request fails.

        `silence_s`: seconds without a message after which a router is probed, if there are several routers.
        `has_cluster_ended` is called after the loss of a router: if it returns True, no further router is tried.
        """
        self._has_cluster_ended = has_cluster_ended
        self._rng = rng or SystemRandom()
        self._endpoints = EndpointRotation(addresses, self._rng)
        self._retry_budget_s = retry_budget_s
        # A single router is not probed: there is no other one at which a stream could continue.
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
        request = with_id_and_seed(request, self._rng)
        continuation = Continuation(self._endpoints, self._rng, time.monotonic(), self._retry_budget_s, owns_id=owns_id)
        while True:
            try:
                with closing(
                    self._start_call(continuation.next_call(), request, remaining_s(deadline, time.monotonic()))
                ) as events:
                    for event in events:
                        new_part = continuation.receive(event, time.monotonic())
                        if new_part is not None:
                            yield new_part
                        if isinstance(event, Finished):
                            return
                raise Unreachable("the stream ended before the request did")
            except BatonError as error:
                wait_s = continuation.call_failed(error, time.monotonic())
                if self._has_cluster_ended():
                    raise
            time.sleep(wait_s)

    def _start_call(
        self, call: Call, request: GenerateRequest, timeout_s: float | None
    ) -> Generator[GenerateEvent, None, None]:
        stub = self._stubs[call.endpoint]
        if call.kind is CallKind.GENERATE:
            return stub.generate(replace(request, call=call.number), timeout_s)
        return stub.resume(request.request_id, call.positions, timeout_s, call.number)

    def cancel(self, request_id: str) -> None:
        """Cancel a running request at the router that serves it. Raises RequestNotFound or Unreachable."""
        errors = []
        for stub in self._stubs:
            try:
                return stub.cancel(request_id)
            except (RequestNotFound, Unreachable) as error:
                errors.append(error)
        raise error_to_report(errors)

    def tokenize(self, text: str, model: str = "") -> Sequence[int]:
        """The token ids that `generate` would see."""
        return self._call_any_router(lambda stub: stub.tokenize(model, text))

    def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """The text of token ids."""
        return self._call_any_router(lambda stub: stub.detokenize(model, token_ids))

    def embed(self, request: EmbedRequest, timeout_s: float | None = None) -> EmbedResponse:
        """The vectors, labels or scores of up to 2,048 inputs; raises BatonErrors.

        They are functions of the inputs alone, so the call may go to another router if one is lost.
        """
        return self._call_any_router(lambda stub: stub.embed(request, timeout_s))

    def list_models(self) -> Sequence[ModelCard]:
        """The models that the cluster serves."""
        return self._call_any_router(GenerationStub.list_models)

    def _call_any_router(self, call: Callable[[GenerationStub], T]) -> T:
        """Call the routers in turn until one answers, and return its answer. Raises Unreachable if none does."""
        endpoint = self._endpoints.pick_first(time.monotonic())
        for _ in self._stubs[1:]:
            try:
                return call(self._stubs[endpoint])
            except Unreachable:
                self._endpoints.note_failure(endpoint, time.monotonic())
                endpoint = self._endpoints.pick_next(endpoint, time.monotonic())
        return call(self._stubs[endpoint])

    def close(self) -> None:
        for stub in self._stubs:
            stub.close()

    def __enter__(self) -> GenerationClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remaining_s(deadline: float | None, now: float) -> float | None:
    """Seconds until the deadline; None without one. Raises DeadlineExceeded when it has passed."""
    if deadline is not None and now >= deadline:
        raise DeadlineExceeded("the deadline passed while the request was moved to another router")
    return None if deadline is None else deadline - now


def error_to_report(errors: Sequence[BatonError]) -> BatonError:
    """The error to report when all routers have failed: Unreachable if there is one, since that router may have the
    request."""
    return next((error for error in errors if isinstance(error, Unreachable)), errors[0])
