"""The asyncio client side of the public gRPC service. Detects a router that hangs: see `liveness`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import Unreachable
from baton.messages.generation import GenerateEvent, GenerateRequest, ModelCard
from baton.messages.pooling import EmbedRequest, EmbedResponse
from baton.v1 import generation_pb2 as generation
from baton.v1 import generation_pb2_grpc
from baton.wire import status
from baton.wire.clients.liveness import PROBE_TIMEOUT_S, LivenessTimer, is_answer
from baton.wire.codec.embedding import EMBED_RESPONSE, embed_request_to_pb
from baton.wire.codec.generation import (
    call_number_to_metadata,
    event_from_pb,
    finished_from_pb,
    model_from_pb,
    request_to_pb,
)
from baton.wire.credentials import PLAINTEXT_DIALER, Dialer

_CALL_TIMEOUT_S = 30.0

_Stream = (
    grpc.aio.UnaryStreamCall[generation.GenerateRequest, generation.GenerateResponse]
    | (grpc.aio.UnaryStreamCall[generation.ResumeRequest, generation.GenerateResponse])
)


class AsyncGenerationStub:
    """Calls the public service with plain values, and raises BatonErrors. All calls come from one event loop."""

    def __init__(self, address: str, silence_s: float | None = None, dialer: Dialer = PLAINTEXT_DIALER) -> None:
        """`silence_s`: seconds without a message after which the router is probed. None: it is never probed."""
        self._address = address
        self._liveness = None if silence_s is None else LivenessTimer(silence_s)
        self._channel = dialer.channel(address)
        self._metadata = dialer.metadata
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._streams: set[_Stream] = set()
        self._lost: set[_Stream] = set()
        """Streams that were cancelled here because the router stopped answering."""
        self._watcher: asyncio.Task[None] | None = None

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncGenerator[GenerateEvent, None]:
        metadata = (*(self._metadata or ()), *call_number_to_metadata(request.call))
        return self._events(self._stub.Generate(request_to_pb(request), timeout=timeout_s, metadata=metadata))

    def resume(
        self, request_id: str, positions: Sequence[int], timeout_s: float | None, call: int = 0
    ) -> AsyncGenerator[GenerateEvent, None]:
        pb = generation.ResumeRequest(request_id=request_id, next_token_index=positions)
        metadata = (*(self._metadata or ()), *call_number_to_metadata(call))
        return self._events(self._stub.Resume(pb, timeout=timeout_s, metadata=metadata))

    async def cancel(self, request_id: str) -> None:
        with status.translated(self._address):
            await self._stub.Cancel(
                generation.CancelRequest(request_id=request_id), timeout=_CALL_TIMEOUT_S, metadata=self._metadata
            )

    async def tokenize(self, model: str, text: str) -> list[int]:
        with status.translated(self._address):
            request = generation.TokenizeRequest(model=model, text=text)
            return list(
                (await self._stub.Tokenize(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)).token_ids
            )

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        with status.translated(self._address):
            request = generation.DetokenizeRequest(model=model, token_ids=token_ids)
            return str((await self._stub.Detokenize(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)).text)

    async def embed(self, request: EmbedRequest, timeout_s: float | None) -> EmbedResponse:
        with status.translated(self._address):
            found = await self._stub.Embed(embed_request_to_pb(request), timeout=timeout_s, metadata=self._metadata)
            return EMBED_RESPONSE.from_pb(found)

    async def list_models(self) -> list[ModelCard]:
        with status.translated(self._address):
            response = await self._stub.ListModels(
                generation.ListModelsRequest(), timeout=_CALL_TIMEOUT_S, metadata=self._metadata
            )
            return [model_from_pb(model) for model in response.models]

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._channel.close(None)

    async def _events(self, call: _Stream) -> AsyncGenerator[GenerateEvent, None]:
        self._watch_stream(call)
        try:
            with status.translated(self._address):
                async for response in call:
                    if self._liveness is not None:
                        self._liveness.restart(asyncio.get_running_loop().time())
                    event = event_from_pb(response)
                    if isinstance(event, generation.Finished):
                        metadata = [(key, value) for key, value in await call.trailing_metadata() or ()]
                        yield finished_from_pb(event, metadata)
                    else:
                        yield event
        except asyncio.CancelledError:
            if call not in self._lost or _is_being_cancelled():
                raise
            raise Unreachable(f"{self._address} has stopped answering") from None
        finally:
            call.cancel()
            self._streams.discard(call)
            self._lost.discard(call)

    def _watch_stream(self, call: _Stream) -> None:
        if self._liveness is None:
            return
        self._streams.add(call)
        self._liveness.restart(asyncio.get_running_loop().time())
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch_liveness(self._liveness), name=f"liveness-{self._address}")

    async def _watch_liveness(self, liveness: LivenessTimer) -> None:
        now = asyncio.get_running_loop().time
        while self._streams:
            if (until_probe_s := liveness.until_probe_s(now())) > 0:
                await asyncio.sleep(until_probe_s)
            elif await self._answers_probe():
                liveness.restart(now())
            elif liveness.is_lost(now()):
                self._lost |= self._streams
                for call in list(self._streams):
                    call.cancel()
                return
            else:
                await asyncio.sleep(liveness.silence_s)

    async def _answers_probe(self) -> bool:
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return is_answer(error.code())
        return True


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
