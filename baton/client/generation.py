"""The asyncio client of the public service, and the blocking one, which calls it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from random import Random, SystemRandom
from types import TracebackType
from typing import Any, TypeVar

from baton.client.continuation import Call, CallKind, Continuation, EndpointRotation, with_id_and_seed
from baton.errors import BatonError, Cancelled, DeadlineExceeded, RequestNotFound, Unreachable
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


class AsyncGenerationClient:
    """The asyncio client of one cluster. Its addresses are the HOST:PORT of the cluster's routers.

    Calls raise BatonErrors: Unreachable, InvalidRequest, and so on. When a router is lost, or hangs without closing its
    connections, the stream continues at another one (see `baton.client.continuation`). All calls come from one event
    loop, in which the client is made.
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
                    self._start_call(continuation.next_call(), request, _remaining_s(deadline, now()))
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
                if self._has_cluster_ended():
                    raise
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
        errors: list[BatonError] = []
        for stub in self._stubs:
            try:
                return await stub.cancel(request_id)
            except (RequestNotFound, Unreachable) as error:
                errors.append(error)
        # A router that is unreachable may have the request.
        raise next((error for error in errors if isinstance(error, Unreachable)), errors[0])

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
        return await self._call_any_router(GenerationStub.list_models)

    async def _call_any_router(self, call: Callable[[GenerationStub], Awaitable[T]]) -> T:
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


class GenerationClient:
    """The blocking counterpart of `AsyncGenerationClient`, whose calls run in a thread of this client.

    Several threads may use it at once. Calls that run when it is closed, and later ones, raise Cancelled.
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
        """See `AsyncGenerationClient`; `has_cluster_ended` is called in the client's thread."""
        make = partial(
            AsyncGenerationClient,
            *addresses,
            rng=rng,
            retry_budget_s=retry_budget_s,
            silence_s=silence_s,
            access=access or default_access.get(),  # of this thread's context
            has_cluster_ended=has_cluster_ended,
        )
        self._closes = asyncio.Event()
        # What is submitted under the lock comes before the end of the loop, which ends it. The garbage collector may
        # close a stream, and so submit, while this thread submits something else.
        self._lock = threading.RLock()
        self._is_closed = False
        self._ends: set[asyncio.Task[None]] = set()
        made: concurrent.futures.Future[tuple[AsyncGenerationClient, asyncio.AbstractEventLoop]]
        made = concurrent.futures.Future()
        serving = self._serve(make, made)
        self._thread = threading.Thread(target=asyncio.run, args=(serving,), name="generation-client", daemon=True)
        self._thread.start()
        self._client, self._loop = made.result()

    async def _serve(
        self,
        make: Callable[[], AsyncGenerationClient],
        made: concurrent.futures.Future[tuple[AsyncGenerationClient, asyncio.AbstractEventLoop]],
    ) -> None:
        """Run the calls of other threads until `close`."""
        try:
            client = make()
        except Exception as error:
            made.set_exception(error)
            return
        async with client:
            made.set_result((client, asyncio.get_running_loop()))
            await self._closes.wait()
            calls = asyncio.all_tasks() - {asyncio.current_task()}
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call in the client's thread, and cancel it there if this thread is interrupted meanwhile."""
        with self._lock:
            if self._is_closed:
                call.close()
                raise Cancelled("the client is closed")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the client was closed") from None
        except BaseException:
            future.cancel()
            raise

    def _leave(self, end: Coroutine[Any, Any, None]) -> None:
        """End a stream that its reader leaves. Closing the client does so, too."""
        if threading.current_thread() is not self._thread:
            with suppress(Cancelled):
                self._run(end)
        elif self._loop.is_running():
            # The garbage collector has found the stream here, where nobody may wait for the loop.
            task = self._loop.create_task(end)
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)
        else:
            end.close()

    def generate(
        self, request: GenerateRequest, timeout_s: float | None = None
    ) -> Generator[GenerateEvent, None, None]:
        """Stream one request as `AsyncGenerationClient.generate` does."""
        events = self._client.generate(request, timeout_s)
        # A stream may be closed only once its interrupted step has ended.
        turn = asyncio.Lock()

        async def step() -> GenerateEvent | None:
            async with turn:
                return await anext(events, None)

        async def end() -> None:
            async with turn:
                await events.aclose()

        try:
            while (event := self._run(step())) is not None:
                yield event
        finally:
            self._leave(end())

    def cancel(self, request_id: str) -> None:
        """Cancel a running request at the router that serves it. Raises RequestNotFound or Unreachable."""
        self._run(self._client.cancel(request_id))

    def tokenize(self, text: str, model: str = "") -> Sequence[int]:
        """The token ids that `generate` would see."""
        return self._run(self._client.tokenize(text, model))

    def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """The text of token ids."""
        return self._run(self._client.detokenize(token_ids, model))

    def embed(self, request: EmbedRequest, timeout_s: float | None = None) -> EmbedResponse:
        """The vectors, labels or scores of up to 2,048 inputs, see `AsyncGenerationClient.embed`."""
        return self._run(self._client.embed(request, timeout_s))

    def list_models(self) -> Sequence[ModelCard]:
        """The models that the cluster serves."""
        return self._run(self._client.list_models())

    def close(self) -> None:
        """End all calls, and the client's thread. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._closes.set)
        self._thread.join()

    def __enter__(self) -> GenerationClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _remaining_s(deadline: float | None, now: float) -> float | None:
    """Seconds until the deadline; None without one. Raises DeadlineExceeded when it has passed."""
    if deadline is not None and now >= deadline:
        raise DeadlineExceeded("the deadline passed while the request was moved to another router")
    return None if deadline is None else deadline - now
