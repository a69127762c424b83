"""The asyncio client of the public service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from random import Random
from types import TracebackType
from typing import TypeVar

from baton.client.continuation import Call, CallKind, Continuation, repeatable
from baton.client.endpoint_rotation import EndpointRotation
from baton.client.generation import PROGRESS_S, SILENCE_S, left, worst
from baton.errors import BatonError, RequestNotFound, Unreachable
from baton.messages.generation import Finished, GenerateEvent, GenerateRequest, ModelCard
from baton.security.access import Access, default_access
from baton.wire.clients.async_generation_client import AsyncGenerationStub
from baton.wire.credentials import Dialer

T = TypeVar("T")


class AsyncGenerationClient:
    """The counterpart of `GenerationClient` for one event loop."""

    def __init__(
        self,
        *addresses: str,
        rng: Random | None = None,
        progress_s: float = PROGRESS_S,
        silence_s: float = SILENCE_S,
        access: Access | None = None,
    ) -> None:
        self._rng = rng or Random()
        self._endpoints = EndpointRotation(addresses, self._rng)
        self._progress_s = progress_s
        # With a single router there is no other to continue at, so that its silence is not watched.
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
        request = repeatable(request, self._rng)
        continuation = Continuation(self._endpoints, self._rng, now(), self._progress_s, owns_id=owns_id)
        while True:
            try:
                async with aclosing(self._open(continuation.next_call(), request, left(deadline, now()))) as events:
                    async for event in events:
                        fresh = continuation.take(event, now())
                        if fresh is not None:
                            yield fresh
                        if isinstance(event, Finished):
                            return
                raise Unreachable("the stream ended before the request did")
            except BatonError as error:
                wait_s = continuation.failed(error, now())
            await asyncio.sleep(wait_s)

    def _open(
        self, call: Call, request: GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[GenerateEvent, None]:
        stub = self._stubs[call.place]
        if call.kind is CallKind.GENERATE:
            return stub.generate(replace(request, call=call.number), timeout_s)
        return stub.resume(request.request_id, call.positions, timeout_s, call.number)

    async def cancel(self, request_id: str) -> None:
        """End a running request at whichever router serves it. Raises RequestNotFound."""
        errors = []
        for stub in self._stubs:
            try:
                return await stub.cancel(request_id)
            except (RequestNotFound, Unreachable) as error:
                errors.append(error)
        raise worst(errors)

    async def tokenize(self, text: str, model: str = "") -> Sequence[int]:
        """The token ids that `generate` would see."""
        return await self._anywhere(lambda stub: stub.tokenize(model, text))

    async def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """The text of token ids."""
        return await self._anywhere(lambda stub: stub.detokenize(model, token_ids))

    async def list_models(self) -> Sequence[ModelCard]:
        """The models that are served."""
        return await self._anywhere(AsyncGenerationStub.list_models)

    async def _anywhere(self, ask: Callable[[AsyncGenerationStub], Awaitable[T]]) -> T:
        """The answer of the first router that answers."""
        now = asyncio.get_running_loop().time
        place = self._endpoints.first(now())
        for _ in self._stubs[1:]:
            try:
                return await ask(self._stubs[place])
            except Unreachable:
                self._endpoints.doubt(place, now())
                place = self._endpoints.after(place, now())
        return await ask(self._stubs[place])

    async def close(self) -> None:
        for stub in self._stubs:
            await stub.close()

    async def __aenter__(self) -> AsyncGenerationClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
