"""Each call belongs to its own caller, also when many share a connection; on both servers, unary and streaming."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc
import pytest

from baton.messages.generation import Accepted, GenerateEvent, GenerateRequest, ModelCard, TakeChunk
from baton.messages.pooling import EmbedRequest, EmbedResponse
from baton.security.callers import current_caller
from baton.security.keys import KeyRing, new_key, write_keys
from baton.security.matrix import CallerRole
from baton.v1 import generation_pb2, generation_pb2_grpc
from baton.wire.authenticator import Authenticator
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.server import RpcServer, streaming_server
from baton.wire.services import generation_service
from baton.wire.services.generation_service import GenerationServicer

TENANTS = tuple(f"t-{number}" for number in range(8))


class EchoCaller:
    """Answers each call with the name of its tenant, once all tenants have called."""

    def __init__(self) -> None:
        self._all = asyncio.Barrier(len(TENANTS))

    async def generate(
        self, request: GenerateRequest, timeout_s: float | None, take: TakeChunk | None
    ) -> AsyncGenerator[GenerateEvent, None]:
        yield Accepted(current_caller.get().tenant, 0, 0)
        await self._all.wait()
        yield Accepted(current_caller.get().tenant, 0, 0)

    def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None,
        take: TakeChunk | None,
        call: int,
    ) -> AsyncGenerator[GenerateEvent, None]:
        raise NotImplementedError

    async def cancel(self, request_id: str) -> None:
        raise NotImplementedError

    async def tokenize(self, model: str, text: str) -> Sequence[int]:
        await self._all.wait()
        return [TENANTS.index(current_caller.get().tenant)]

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        raise NotImplementedError

    async def embed(self, request: EmbedRequest, timeout_s: float | None) -> EmbedResponse:
        raise NotImplementedError

    def list_models(self) -> Sequence[ModelCard]:
        raise NotImplementedError


@pytest.fixture(params=[RpcServer, streaming_server], ids=["grpcio", "own"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[str, dict[str, str]]]:
    """Yield the address of the server and the key of each tenant."""
    made = {tenant: new_key(tenant, CallerRole.CLIENT, "") for tenant in TENANTS}
    write_keys(tmp_path / "keys", [entry for _, entry in made.values()])
    make: Callable[..., RpcServer] = request.param
    server = make(
        (generation_service.SERVICE_NAME,), FaultBarrier(authenticator=Authenticator(KeyRing(tmp_path / "keys"))), None
    )
    port = server.bind("127.0.0.1", 0)
    GenerationServicer(EchoCaller()).add_to_server(server.server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", {tenant: key for tenant, (key, _) in made.items()}
    finally:
        await server.stop(0.0)


async def test_each_call_on_a_shared_connection_belongs_to_its_own_caller(served: tuple[str, dict[str, str]]) -> None:
    address, keys = served
    async with grpc.aio.insecure_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)

        async def streamed(tenant: str) -> set[str]:
            shown = (("authorization", f"Bearer {keys[tenant]}"),)
            call = stub.Generate(generation_pb2.GenerateRequest(text="x"), metadata=shown, timeout=30)
            return {response.request_id async for response in call}

        async def tokenized(tenant: str) -> list[int]:
            shown = (("authorization", f"Bearer {keys[tenant]}"),)
            request = generation_pb2.TokenizeRequest(text="x")
            return list((await stub.Tokenize(request, metadata=shown, timeout=30)).token_ids)

        assert await asyncio.gather(*map(streamed, TENANTS)) == [{tenant} for tenant in TENANTS]
        assert await asyncio.gather(*map(tokenized, TENANTS)) == [[place] for place in range(len(TENANTS))]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(generation_pb2.TokenizeRequest(text="x"), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
