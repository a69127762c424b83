"""The gRPC status and the trailer of each error, as the documented table lists them."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton import errors
from baton.errors import (
    AttemptsExhausted,
    BatonError,
    EngineFault,
    InvalidRequest,
    Overloaded,
    QueueFull,
    TransferCause,
    TransferFailed,
)
from baton.messages.generation import Accepted, Chunk
from baton.v1 import generation_pb2, generation_pb2_grpc
from baton.wire import status
from baton.wire.server.server import RpcServer
from baton.wire.services import generation_service
from baton.wire.services.generation_service import GenerationServicer
from tests.doubles.fake_generation_handler import FakeGenerationHandler

CODES = {
    "BatonError": "INTERNAL",
    "InvalidRequest": "INVALID_ARGUMENT",
    "UnsupportedRequest": "INVALID_ARGUMENT",
    "AdapterRefused": "INVALID_ARGUMENT",
    "UnknownModel": "INVALID_ARGUMENT",
    "ContextLengthExceeded": "INVALID_ARGUMENT",
    "UsageError": "INVALID_ARGUMENT",
    "DuplicateRequest": "ALREADY_EXISTS",
    "RequestNotFound": "NOT_FOUND",
    "NodeNotFound": "NOT_FOUND",
    "CacheInUse": "FAILED_PRECONDITION",
    "Overloaded": "UNAVAILABLE",
    "NoCapacity": "UNAVAILABLE",
    "QueueFull": "UNAVAILABLE",
    "LogprobsFull": "UNAVAILABLE",
    "WouldBeLate": "UNAVAILABLE",
    "Draining": "UNAVAILABLE",
    "ContinuedElsewhere": "UNAVAILABLE",
    "NodeLost": "UNAVAILABLE",
    "Unreachable": "UNAVAILABLE",
    "NobodyListens": "UNAVAILABLE",
    "DeadlineExceeded": "DEADLINE_EXCEEDED",
    "Cancelled": "CANCELLED",
    "RepetitiveOutput": "INTERNAL",
    "AttemptsExhausted": "ABORTED",
    "StreamDiverged": "ABORTED",
    "TransferFailed": "ABORTED",
    "VersionGone": "ABORTED",
    "SlowReader": "RESOURCE_EXHAUSTED",
    "QuotaExceeded": "RESOURCE_EXHAUSTED",
    "QuotaTooSmall": "RESOURCE_EXHAUSTED",
    "QuotaUnknown": "UNAVAILABLE",
    "Unauthenticated": "UNAUTHENTICATED",
    "PermissionDenied": "PERMISSION_DENIED",
    "EngineFault": "INTERNAL",
    "TemplateFault": "INTERNAL",
    "BackgroundFault": "INTERNAL",
    "NotLeader": "INTERNAL",
    "ConfigError": "FAILED_PRECONDITION",
}
"""The column gRPC of the table, for every error class."""


def make(kind: type[BatonError]) -> BatonError:
    if issubclass(kind, InvalidRequest):
        return kind("top_p", "is wrong")
    if issubclass(kind, TransferFailed):
        return kind(TransferCause.LEASE_LOST)
    return kind("it is so")


ERRORS = [make(k) for k in vars(errors).values() if inspect.isclass(k) and issubclass(k, BatonError)]


@asynccontextmanager
async def served(handler: FakeGenerationHandler) -> AsyncIterator[grpc.aio.Channel]:
    server = RpcServer((generation_service.SERVICE_NAME,))
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    GenerationServicer(handler).add_to_server(server.server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield channel
    finally:
        await server.stop(0)


async def end_of(channel: grpc.aio.Channel, num_events: int = 0) -> grpc.aio.AioRpcError:
    call = generation_pb2_grpc.GenerationStub(channel).Generate(generation_pb2.GenerateRequest(text="x"))
    for _ in range(num_events):
        await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


def trailer_of(error: grpc.aio.AioRpcError) -> dict[str, str | bytes]:
    metadata: Any = error.trailing_metadata()
    return dict(metadata)


def test_the_table_has_every_error() -> None:
    assert {type(error).__name__ for error in ERRORS} == set(CODES)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_each_error_has_its_status_and_its_details(error: BatonError) -> None:
    async with served(FakeGenerationHandler(error)) as channel:
        told = await end_of(channel)
        assert told.code().name == CODES[type(error).__name__]
        assert ("grpc-retry-pushback-ms" in trailer_of(told)) == (isinstance(error, Overloaded) and error.retryable)
        fields = [
            violation.field
            for detail in rpc_status.from_call(told).details  # type: ignore[arg-type]
            if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR)
            for violation in _unpacked(detail).field_violations
        ]
        assert fields == (["top_p"] if isinstance(error, InvalidRequest) else [])


def _unpacked(detail: object) -> error_details_pb2.BadRequest:
    bad = error_details_pb2.BadRequest()
    detail.Unpack(bad)  # type: ignore[attr-defined]
    return bad


async def test_a_refused_client_is_told_when_to_retry() -> None:
    async with served(FakeGenerationHandler(QueueFull("1024 wait", retry_after_s=2.5))) as channel:
        told = await end_of(channel)
        assert trailer_of(told)["grpc-retry-pushback-ms"] == "2500"
        meant = status.from_rpc_error(told, "router")
        assert isinstance(meant, QueueFull)
        assert meant.retry_after_s == 2.5
        assert meant.tokens_sent is None


@pytest.mark.parametrize("cause", TransferCause)
async def test_a_client_receives_the_cause_of_a_failed_kv_transfer(cause: TransferCause) -> None:
    async with served(
        FakeGenerationHandler(TransferFailed(cause, "3 attempts failed"), Accepted("r", 5, 3), Chunk(0, (7,), "a"))
    ) as channel:
        told = await end_of(channel, 2)
        meant = status.from_rpc_error(told, "router")
        assert isinstance(meant, TransferFailed)
        assert (meant.cause, meant.detail, meant.tokens_sent) == (cause, "3 attempts failed", 1)
        assert str(meant) == told.details()


def test_an_unknown_cause_of_a_newer_version_is_kept_in_the_message() -> None:
    lost = status._transfer_failed({"cause": "moon_phase"}, "KV transfer failed: moon_phase")
    assert (type(lost), str(lost)) == (AttemptsExhausted, "KV transfer failed: moon_phase")


async def test_an_error_in_mid_stream_says_how_many_tokens_were_sent() -> None:
    events = (Accepted("r", 5, 3), Chunk(0, (7, 8), "ab"), Chunk(2, (9,), "c"), Chunk(3, (), "tail"))
    async with served(FakeGenerationHandler(EngineFault("logits are not finite"), *events)) as channel:
        told = await end_of(channel, len(events))
        assert told.code() is grpc.StatusCode.INTERNAL
        assert status.from_rpc_error(told, "router").tokens_sent == 3
    async with served(FakeGenerationHandler(EngineFault("logits are not finite"), events[0])) as channel:
        assert status.from_rpc_error(await end_of(channel, 1), "router").tokens_sent is None


@pytest.mark.parametrize(
    ("method", "where", "field"),
    [
        ("Generate", generation_pb2.GenerateRequest(text="x"), "77"),
        ("Generate", generation_pb2.SamplingParams(top_k=3), "sampling_params.77"),
        ("Generate", generation_pb2.ServiceLevel(ttft_ms=3), "service_level.77"),
        ("Generate", generation_pb2.TokenIds(ids=[3]), "token_ids.77"),
        ("Cancel", generation_pb2.CancelRequest(request_id="x"), "77"),
        ("Tokenize", generation_pb2.TokenizeRequest(text="x"), "77"),
        ("Detokenize", generation_pb2.DetokenizeRequest(token_ids=[1]), "77"),
        ("ListModels", generation_pb2.ListModelsRequest(), "77"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_field_of_a_newer_version_is_refused_by_its_number(method: str, where: object, field: str) -> None:
    newer = where.SerializeToString() + bytes([0xE8, 0x04, 0x01])  # type: ignore[attr-defined]
    places = {"SamplingParams": 5, "ServiceLevel": 8, "TokenIds": 4}
    if (place := places.get(type(where).__name__)) is not None:
        newer = bytes([place << 3 | 2, len(newer)]) + newer
    path = f"/{generation_service.SERVICE_NAME}/{method}"
    async with served(FakeGenerationHandler(EngineFault("it was not refused"))) as channel:
        call: Awaitable[object]
        if method == "Generate":
            call = channel.unary_stream(path, None, None)(newer).read()
        else:
            call = channel.unary_unary(path, None, None)(newer)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        meant = status.from_rpc_error(caught.value, "router")
        assert isinstance(meant, InvalidRequest)
        assert meant.field == field
