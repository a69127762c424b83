"""The client side of the public gRPC service, which detects a router that hangs without closing its connections.

A router that is killed resets its connections. A router that is stopped, or whose machine is down, sends nothing at
all. While calls are open and none of them receives anything, a client therefore probes its router with a health check.
If the health check is not answered either, the router counts as lost, and all calls to it are ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.errors import Unreachable
from baton.messages.generation import GenerateEvent, GenerateRequest, ModelCard
from baton.messages.pooling import EmbedRequest, EmbedResponse
from baton.v1 import generation_pb2 as generation
from baton.v1 import generation_pb2_grpc
from baton.wire import status
from baton.wire.codec.generation import (
    EMBED_RESPONSE,
    call_number_to_metadata,
    embed_request_to_pb,
    event_from_pb,
    finished_from_pb,
    model_from_pb,
    request_to_pb,
)
from baton.wire.credentials import PLAINTEXT_DIALER, Dialer

PROBE_TIMEOUT_S = 1.5
"""Seconds within which a probe must be answered."""
_CODES_WITHOUT_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
_CALL_TIMEOUT_S = 30.0
_Stream = (
    grpc.aio.UnaryStreamCall[generation.GenerateRequest, generation.GenerateResponse]
    | (grpc.aio.UnaryStreamCall[generation.ResumeRequest, generation.GenerateResponse])
)


class LivenessTimer:
    """Tracks for how long a peer that should send messages has sent none. All times are seconds on one clock."""

    def __init__(self, silence_s: float) -> None:
        """`silence_s`: seconds without a message after which the peer is to be probed."""
        self.silence_s = silence_s
        self._last_message_at = 0.0

    def restart(self, now: float) -> None:
        """Note that the peer has sent a message, or that no message was expected until now."""
        self._last_message_at = max(self._last_message_at, now)

    def until_probe_s(self, now: float) -> float:
        """Seconds until the peer is to be probed; 0 or less: it is to be probed now."""
        return self._last_message_at + self.silence_s - now

    def is_lost(self, now: float) -> bool:
        """Whether the peer is lost, after a probe without an answer.

        False if the peer has sent something meanwhile. False also if the probe failed at once because the peer can't be
        reached, since the calls to it fail by themselves then. The peer is then to be probed again after `silence_s`.
        """
        return now >= self._last_message_at + self.silence_s + PROBE_TIMEOUT_S


def is_answer(code: grpc.StatusCode) -> bool:
    """Whether a probe that failed with this code was answered by the peer itself."""
    return code not in _CODES_WITHOUT_ANSWER


class GenerationStub:
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
        await self._call(self._stub.Cancel, generation.CancelRequest(request_id=request_id))

    async def tokenize(self, model: str, text: str) -> list[int]:
        response = await self._call(self._stub.Tokenize, generation.TokenizeRequest(model=model, text=text))
        return list(response.token_ids)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        request = generation.DetokenizeRequest(model=model, token_ids=token_ids)
        return str((await self._call(self._stub.Detokenize, request)).text)

    async def embed(self, request: EmbedRequest, timeout_s: float | None) -> EmbedResponse:
        return EMBED_RESPONSE.from_pb(await self._call(self._stub.Embed, embed_request_to_pb(request), timeout_s))

    async def list_models(self) -> list[ModelCard]:
        response = await self._call(self._stub.ListModels, generation.ListModelsRequest())
        return [model_from_pb(model) for model in response.models]

    async def _call(self, rpc: Any, request: Message, timeout_s: float | None = _CALL_TIMEOUT_S) -> Any:
        """The response to a call without a stream. Raises BatonErrors."""
        with status.translated(self._address):
            return await rpc(request, timeout=timeout_s, metadata=self._metadata)

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
