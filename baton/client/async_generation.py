"""The asyncio client of the public service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from random import Random, SystemRandom
from types import TracebackType
from typing import TypeVar

from baton.client.continuation import Call, CallKind, Continuation, with_id_and_seed
from baton.client.endpoint_rotation import EndpointRotation
from baton.client.generation import RETRY_BUDGET_S, SILENCE_S, error_to_report, remaining_s
from baton.errors import BatonError, RequestNotFound, Unreachable
from baton.messages.generation import Finished, GenerateEvent, GenerateRequest, ModelCard
from baton.messages.pooling import EmbedRequest, EmbedResponse
from baton.security.access import Access, default_access
from baton.wire.clients.async_generation_client import AsyncGenerationStub
from baton.wire.credentials import Dialer

T = TypeVar("T")


class AsyncGenerationClient:
    """The asyncio client of one cluster: the counterpart of `GenerationClient`. All calls come from one event loop."""

    def __init__(
        self,
        *addresses: str,
        rng: Random | None = None,
        retry_budget_s: float = RETRY_BUDGET_S,
        silence_s: float = SILENCE_S,
        access: Access | None = None,
    ) -> None:
        self._rng = rng or SystemRandom()
        self._endpoints = EndpointRotation(addresses, self._rng)
        self._retry_budget_s = retry_budget_s
        # A single router is not probed: there is no other one at which a stream could continue.
        silence = silence_s if len(addresses) > 1 else None
        dialer = Dialer.to_public(access or default_access.get())
        self._stubs = [AsyncGenerationStub(address, silence, dialer) for address in addresses]

    async def generate(
        self, request: GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Stream one request: Accepted, Chunks, Finished; with several sequences also a SequenceFinished for each.

        Closing the generator early cancels the request. Without a request id or seed, the client draws them.
        """
        now = asyncio.get_running_loop().time
        deadline = None if timeout_s is None else now() + timeout_s
        owns_id = not request.request_id
        request = with_id_and_seed(request, self._rng)
        continuation = Continuation(self._endpoints, self._rng, now(), self._retry_budget_s, owns_id=owns_id)
        while True:
            try:
                async with aclosing(
                    self._start_call(continuation.next_call(), request, remaining_s(deadline, now()))
                ) as events:
                    async for event in events:
                        new_part = continuation.receive(event, now())
                        if new_part is not None:
                            yield new_part
                        if isinstance(event, Finished):
                            return
                raise Unreachable("the stream ended before the request did")
            except BatonError as error:
                wait_s = continuation.call_failed(error, now())
            await asyncio.sleep(wait_s)

    def _start_call(
        self, call: Call, request: GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerateEvent, None]:
        stub = self._stubs[call.endpoint]
        if call.kind is CallKind.GENERATE:
            return stub.generate(replace(request, call=call.number), timeout_s)
        return stub.resume(request.request_id, call.positions, timeout_s, call.number)

    async def cancel(self, request_id: str) -> None:
        """Cancel a running request at the router that serves it. Raises RequestNotFound or Unreachable."""
        errors = []
        for stub in self._stubs:
            try:
                return await stub.cancel(request_id)
            except (RequestNotFound, Unreachable) as error:
                errors.append(error)
        raise error_to_report(errors)

    async def tokenize(self, text: str, model: str = "") -> Sequence[int]:
        """The token ids that `generate` would see."""
        return await self._call_any_router(lambda stub: stub.tokenize(model, text))

    async def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """The text of token ids."""
        return await self._call_any_router(lambda stub: stub.detokenize(model, token_ids))

    async def embed(self, request: EmbedRequest, timeout_s: float | None = None) -> EmbedResponse:
        """The vectors, labels or scores of up to 2,048 inputs; raises BatonErrors.

        They are functions of the inputs alone, so the call may go to another router if one is lost.
        """
        return await self._call_any_router(lambda stub: stub.embed(request, timeout_s))

    async def list_models(self) -> Sequence[ModelCard]:
        """The models that the cluster serves."""
        return await self._call_any_router(AsyncGenerationStub.list_models)

    async def _call_any_router(self, call: Callable[[AsyncGenerationStub], Awaitable[T]]) -> T:
        """Call the routers in turn until one answers, and return its answer. Raises Unreachable if none does."""
        now = asyncio.get_running_loop().time
        endpoint = self._endpoints.pick_first(now())
        for _ in self._stubs[1:]:
            try:
                return await call(self._stubs[endpoint])
            except Unreachable:
                self._endpoints.note_failure(endpoint, now())
                endpoint = self._endpoints.pick_next(endpoint, now())
        return await call(self._stubs[endpoint])

    async def close(self) -> None:
        for stub in self._stubs:
            await stub.close()

    async def __aenter__(self) -> AsyncGenerationClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
