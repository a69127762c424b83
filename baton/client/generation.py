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
from baton.client.rota import Rota
from baton.errors import BatonError, DeadlineExceeded, RequestNotFound, Unreachable
from baton.messages.generation import Finished, GenerateEvent, GenerateRequest, ModelCard
from baton.security.access import Access, default_access
from baton.wire.clients.generation_client import GenerationStub
from baton.wire.credentials import Dialer

T = TypeVar("T")

PROGRESS_S = 60.0
"""How long an accepted request goes on to be tried without anything new coming of it."""
SILENCE_S = 1.0
"""With several routers: how long one may say nothing before it is asked whether it is there."""


class GenerationClient:
    """Speaks to the routers at HOST:PORT, of one cluster. Calls raise BatonErrors: Unreachable, InvalidRequest, ...

    An answer outlives the router that brings it (see `baton.client.continuation`), also one that is stopped rather than
    dead and says nothing any more.
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
        """`is_hopeless` is asked whenever a router was lost: whether the cluster is known to be gone."""
        self._is_hopeless = is_hopeless
        self._rng = rng or Random()
        self._rota = Rota(addresses, self._rng)
        self._progress_s = progress_s
        # One that has nowhere else to go gains nothing from knowing.
        silence = silence_s if len(addresses) > 1 else None
        dialer = Dialer.to_public(access or default_access.get())
        self._stubs = [GenerationStub(address, silence, dialer) for address in addresses]

    def generate(
        self, request: GenerateRequest, timeout_s: float | None = None
    ) -> Generator[GenerateEvent, None, None]:
        """Stream one request: Accepted, Chunks, Finished; with several sequences a SequenceFinished for each, too.

        Closing the generator early cancels the request. Without a request id or seed, the client draws them.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        owns_id = not request.request_id
        request = repeatable(request, self._rng)
        continuation = Continuation(self._rota, self._rng, time.monotonic(), self._progress_s, owns_id=owns_id)
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
        """End a live request, whichever router has it; raises RequestNotFound."""
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
        """Text of token ids."""
        return self._anywhere(lambda stub: stub.detokenize(model, token_ids))

    def list_models(self) -> Sequence[ModelCard]:
        """What can be asked for."""
        return self._anywhere(GenerationStub.list_models)

    def _anywhere(self, ask: Callable[[GenerationStub], T]) -> T:
        """The answer of the first router that gives one."""
        place = self._rota.first(time.monotonic())
        for _ in self._stubs[1:]:
            try:
                return ask(self._stubs[place])
            except Unreachable:
                self._rota.doubt(place, time.monotonic())
                place = self._rota.after(place, time.monotonic())
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
    """Seconds until the deadline; raises DeadlineExceeded when it has passed."""
    if deadline is not None and now >= deadline:
        raise DeadlineExceeded("the deadline passed while the request was taken to another router")
    return None if deadline is None else deadline - now


def worst(errors: Sequence[BatonError]) -> BatonError:
    """Of what the routers said, what matters: one that could not be asked may be the one that knew."""
    return next((error for error in errors if isinstance(error, Unreachable)), errors[0])
