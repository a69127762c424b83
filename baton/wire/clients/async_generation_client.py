"""The client's side of the public service on an event loop. Notices a router that says nothing: see `silence`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import Unreachable
from baton.messages.generation import GenerateEvent, GenerateRequest, ModelCard
from baton.v1 import generation_pb2 as generation
from baton.v1 import generation_pb2_grpc
from baton.wire import status
from baton.wire.clients.silence import PROBE_TIMEOUT_S, Silence, is_answer
from baton.wire.codec.generation import event_from_pb, finished_from_pb, number_to_metadata, request_to_pb
from baton.wire.credentials import PLAIN, Dialer

_CALL_TIMEOUT_S = 30.0

_Stream = (
    grpc.aio.UnaryStreamCall[generation.GenerateRequest, generation.GenerateResponse]
    | (grpc.aio.UnaryStreamCall[generation.ResumeRequest, generation.GenerateResponse])
)


class AsyncGenerationStub:
    """Messages in and out, BatonErrors raised. Belongs to one event loop."""

    def __init__(self, address: str, silence_s: float | None = None, dialer: Dialer = PLAIN) -> None:
        """`silence_s`: after so long without a word the router is asked whether it is there. None: never."""
        self._address = address
        self._silence = None if silence_s is None else Silence(silence_s)
        self._channel = dialer.channel(address)
        self._metadata = dialer.metadata
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._streams: set[_Stream] = set()
        self._lost: set[_Stream] = set()
        self._vigil: asyncio.Task[None] | None = None

    def generate(self, request: GenerateRequest, timeout_s: float | None) -> AsyncGenerator[GenerateEvent, None]:
        metadata = (*(self._metadata or ()), *number_to_metadata(request.call))
        return self._events(self._stub.Generate(request_to_pb(request), timeout=timeout_s, metadata=metadata))

    def resume(
        self, request_id: str, positions: Sequence[int], timeout_s: float | None, call: int = 0
    ) -> AsyncGenerator[GenerateEvent, None]:
        pb = generation.ResumeRequest(request_id=request_id, next_token_index=positions)
        metadata = (*(self._metadata or ()), *number_to_metadata(call))
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

    async def list_models(self) -> list[ModelCard]:
        with status.translated(self._address):
            response = await self._stub.ListModels(
                generation.ListModelsRequest(), timeout=_CALL_TIMEOUT_S, metadata=self._metadata
            )
            return [ModelCard(model.name, model.max_model_len, model.vocab_size) for model in response.models]

    async def close(self) -> None:
        if self._vigil is not None:
            self._vigil.cancel()
            await asyncio.gather(self._vigil, return_exceptions=True)
        await self._channel.close(None)

    async def _events(self, call: _Stream) -> AsyncGenerator[GenerateEvent, None]:
        self._watch(call)
        try:
            with status.translated(self._address):
                async for response in call:
                    if self._silence is not None:
                        self._silence.heard(asyncio.get_running_loop().time())
                    event = event_from_pb(response)
                    if isinstance(event, generation.Finished):
                        metadata = [(key, value) for key, value in await call.trailing_metadata() or ()]
                        yield finished_from_pb(event, metadata)
                    else:
                        yield event
        except asyncio.CancelledError:
            if call not in self._lost or _is_being_cancelled():
                raise
            raise Unreachable(f"{self._address} says nothing any more") from None
        finally:
            call.cancel()
            self._streams.discard(call)
            self._lost.discard(call)

    def _watch(self, call: _Stream) -> None:
        if self._silence is None:
            return
        self._streams.add(call)
        self._silence.heard(asyncio.get_running_loop().time())
        if self._vigil is None or self._vigil.done():
            self._vigil = asyncio.create_task(self._keep_vigil(self._silence), name=f"vigil-{self._address}")

    async def _keep_vigil(self, silence: Silence) -> None:
        now = asyncio.get_running_loop().time
        while self._streams:
            if (left_s := silence.left_s(now())) > 0:
                await asyncio.sleep(left_s)
            elif await self._is_there():
                silence.heard(now())
            elif silence.is_lost(now()):
                self._lost |= self._streams
                for call in list(self._streams):
                    call.cancel()
                return
            else:
                await asyncio.sleep(silence.patience_s)

    async def _is_there(self) -> bool:
        try:
            await self._health.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return is_answer(error.code())
        return True


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
