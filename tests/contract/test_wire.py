"""Servers and clients of `baton.wire` over loopback, with scripted handlers: which values survive, and what a bad
message costs.
"""

from __future__ import annotations

import asyncio
import datetime
import inspect
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from baton import errors
from baton.errors import (
    AdapterRefused,
    BatonError,
    CacheInUse,
    ConfigError,
    EngineFault,
    InvalidRequest,
    NodeLost,
    SlowReader,
    TransferFailed,
    Unreachable,
)
from baton.messages.generation import (
    Accepted,
    Chunk,
    Finished,
    GenerateEvent,
    GenerateRequest,
    ModelCard,
)
from baton.messages.generation import Path as NodePath
from baton.messages.ids import AttemptKey, Peer
from baton.messages.kv_cache import BlockStored, KVCacheUpdate
from baton.messages.node import (
    Abort,
    Leg,
    LoadReport,
    RequestDelta,
    Role,
    StepFigures,
    StepReport,
    Submit,
    WatchKVCache,
)
from baton.messages.node_report import HandoffReport, NodeReport, TraceEvent, TraceStep
from baton.messages.pooling import EmbedInput, EmbedRequest, EmbedResponse, EmbedResult, EmbedTask
from baton.messages.request_spec import RequestSpec
from baton.messages.sampling import SamplingParams, TokenLogprobs
from baton.model_formats.adapters import AdapterInfo
from baton.security.authority import make_certificates
from baton.security.matrix import CallerRole
from baton.security.tls_files import TlsBytes, TlsFiles, certificate_files
from baton.v1 import generation_pb2, generation_pb2_grpc, node_pb2, node_pb2_grpc
from baton.wire import status
from baton.wire.clients.generation_client import GenerationStub
from baton.wire.clients.node_client import NodeClient
from baton.wire.clients.operator_client import OperatorClient
from baton.wire.credentials import Dialer
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.server import _OPTIONS, RpcServer, streaming_server
from baton.wire.services import generation_service, node_service, operator_service
from baton.wire.services.generation_service import GenerationServicer
from baton.wire.services.node_service import NodeServicer
from baton.wire.services.operator_service import OperatorServicer
from tests.doubles.fake_generation_handler import FINISHED, FakeGenerationHandler
from tests.doubles.fake_node_handler import FakeNodeHandler
from tests.support.reports import QueuedReports
from tests.support.requests import changed
from tests.support.router_parts import decode

SECRET = "/home/somebody/secret.py"
KEY = AttemptKey("r", 1, 2**63)
SUBMIT = Submit(
    KEY,
    Leg.DECODE,
    RequestSpec((1, 2, 3), SamplingParams(), priority=0, cache_salt=""),
    kv_source=Peer("p", "p.1", "host:1"),
)


SERVERS: dict[str, Callable[[tuple[str, ...], FaultBarrier], RpcServer]] = {
    "grpcio": RpcServer,
    "own": lambda names, barrier: streaming_server(names, barrier, None),
}
SERVING = {"kind": "grpcio"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of client services on both servers, tests of nodes only on grpcio's."""
    kinds = ["grpcio"] if "node" in metafunc.fixturenames else [*SERVERS]
    metafunc.parametrize("server_kind", kinds, indirect=True)


@pytest.fixture(autouse=True)
def server_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVING, "kind", request.param)


@asynccontextmanager
async def served(handler: FakeGenerationHandler, stall_s: float = 30.0) -> AsyncIterator[tuple[str, GenerationStub]]:
    names = (generation_service.SERVICE_NAME, operator_service.SERVICE_NAME)
    server = SERVERS[SERVING["kind"]](names, FaultBarrier(stall_s))
    address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    GenerationServicer(handler).add_to_server(server.server)
    OperatorServicer(handler, handler, handler, handler).add_to_server(server.server)  # type: ignore[arg-type]  # status alone is asked
    await server.start()
    stub = GenerationStub(address)
    try:
        yield address, stub
    finally:
        await stub.close()
        await server.stop(0)


@asynccontextmanager
async def generating(address: str) -> AsyncIterator[grpc.aio.UnaryStreamCall[Any, Any]]:
    """A call of a client that is not ours."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield generation_pb2_grpc.GenerationStub(channel).Generate(generation_pb2.GenerateRequest(text="x"))


async def ask(stub: GenerationStub, request: GenerateRequest | None = None) -> list[GenerateEvent]:
    return [event async for event in stub.generate(request or GenerateRequest([1, 2, 3]), 30.0)]


async def test_a_stream_arrives_as_it_was_sent() -> None:
    handler = FakeGenerationHandler()
    async with served(handler) as (_, stub):
        assert await ask(stub) == handler.events
        await stub.cancel("r")
        assert handler.requests == [GenerateRequest([1, 2, 3]), "r"]
        assert await stub.tokenize("", "four") == [4]
        assert await stub.detokenize("", [4, 5]) == "[4, 5]"
        call = EmbedRequest([EmbedInput("four"), EmbedInput([1])], EmbedTask.SCORE, request_id="e")
        embedded = await stub.embed(call, 5.0)
        assert embedded == EmbedResponse("e", (EmbedResult((4.0,), "score"), EmbedResult((1.0,), "score")), 2)
        assert await stub.list_models() == [ModelCard("m", 64, 300)]


def every_error() -> list[BatonError]:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, BatonError)]
    made: list[BatonError] = []
    for kind in kinds:
        if issubclass(kind, InvalidRequest):
            made.append(kind("prompt", "is ünfit, 100 %"))
        elif kind is not TransferFailed:
            made.append(kind("it did not work: 100 %\nsecond line"))
    return made


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
async def test_an_error_keeps_its_class_message_and_field(error: BatonError) -> None:
    async with served(FakeGenerationHandler(error)) as (_, stub):
        for call in (ask(stub), stub.cancel("r")):
            with pytest.raises(BatonError) as caught:
                await call
            assert type(caught.value) is type(error)
            assert str(caught.value) == str(error)
            assert caught.value.retryable is error.retryable
            if isinstance(error, InvalidRequest):
                assert isinstance(caught.value, InvalidRequest)
                assert (caught.value.field, caught.value.reason) == (error.field, error.reason)


@pytest.mark.parametrize("letter", ["x", "ü", "漢"])
async def test_an_error_with_a_long_message_keeps_its_class(letter: str) -> None:
    """Errors are sent as metadata, whose size HTTP/2 peers limit."""
    async with served(FakeGenerationHandler(EngineFault("first words " + letter * 50_000))) as (_, stub):
        with pytest.raises(EngineFault, match="first words"):
            await ask(stub)


async def test_a_failing_handler_gives_internal_without_revealing_its_message() -> None:
    handler = FakeGenerationHandler(RuntimeError(f"no such thing in {SECRET}"))
    async with served(handler) as (address, stub):
        async with grpc.aio.insecure_channel(address) as channel:
            public = generation_pb2_grpc.GenerationStub(channel)
            calls = [
                public.Generate(generation_pb2.GenerateRequest(text="x")).read(),
                public.Cancel(generation_pb2.CancelRequest(request_id="r")),
                public.Tokenize(generation_pb2.TokenizeRequest(text="x")),
                public.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[1])),
                public.ListModels(generation_pb2.ListModelsRequest()),
            ]
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.INTERNAL
                assert SECRET not in repr(caught.value)
                assert "Traceback" not in repr(caught.value)
        with pytest.raises(BatonError):
            await asyncio.to_thread(OperatorClient(address).status, 10.0)
        handler.error = None
        assert await ask(stub) == handler.events


async def test_undecodable_messages_are_invalid_arguments() -> None:
    handler = FakeGenerationHandler()
    async with served(handler) as (address, stub):
        async with grpc.aio.insecure_channel(address) as channel:
            service = f"/{generation_service.SERVICE_NAME}"
            not_utf8, cut_off = b"\x0a\x02\xff\xfe", b"\x0a\xff"
            calls = [channel.unary_stream(f"{service}/Generate", None, None)(bad) for bad in (not_utf8, cut_off)]
            answers: list[Awaitable[object]] = [call.read() for call in calls]
            for method in ("Cancel", "Tokenize", "Detokenize"):
                answers += [channel.unary_unary(f"{service}/{method}", None, None)(bad) for bad in (not_utf8, cut_off)]
            answers.append(channel.unary_unary(f"{service}/ListModels", None, None)(cut_off))
            for answer in answers:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await answer
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, answer
        assert handler.requests == []
        assert await ask(stub) == handler.events


async def test_fields_beyond_their_bounds_are_refused_by_name_before_the_handler_is_called() -> None:
    pb, handler = generation_pb2, FakeGenerationHandler()
    unknown_field = b"\xf8\x7f\x01"
    params: dict[str, Any] = {
        "stop": [""] * 17,
        "stop_token_ids": [1] * 257,
        "logit_bias": dict.fromkeys(range(301), 1.0),
        "allowed_token_ids": [1] * 4097,
        "bad_words": ["a"] * 257,
        "bad_words_token_ids": [pb.TokenIds(ids=[1])],
    }
    too_long = pb.TokenIds(ids=[1] * 262_145)
    cases: list[tuple[str, bytes, str]] = [
        ("Generate", pb.GenerateRequest(token_ids=too_long).SerializeToString(), "prompt"),
        *(
            ("Generate", pb.GenerateRequest(sampling_params={name: value}).SerializeToString(), name)
            for name, value in params.items()
        ),
        ("Generate", pb.GenerateRequest(text="x").SerializeToString() + unknown_field * 100_000, "request"),
        ("Generate", pb.GenerateRequest(text="x" * 100_000).SerializeToString() + unknown_field, "2047"),
        ("Resume", pb.ResumeRequest(next_token_index=[0] * 129).SerializeToString(), "next_token_index"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1] * 262_145).SerializeToString(), "token_ids"),
        ("Embed", pb.EmbedRequest(inputs=[pb.EmbedInput()] * 2049).SerializeToString(), "inputs"),
        ("Embed", pb.EmbedRequest(inputs=[pb.EmbedInput(token_ids=too_long)]).SerializeToString(), "inputs[0]"),
        ("Embed", b"\x1a\x04\x0a\x00\x78\x01", "inputs[0].15"),
    ]
    async with served(handler) as (address, _), grpc.aio.insecure_channel(address) as channel:
        for method, message, field in cases:
            path = f"/{generation_service.SERVICE_NAME}/{method}"
            is_unary = method in ("Detokenize", "Embed")
            call: Any = (channel.unary_unary if is_unary else channel.unary_stream)(path, None, None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call(message) if is_unary else call(message).read())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert (caught.value.details() or "").startswith(f"{field}: "), caught.value.details()
    assert handler.requests == []


async def test_a_client_that_leaves_closes_the_handlers_generator() -> None:
    handler = FakeGenerationHandler()
    handler.endless = True
    async with served(handler) as (_, stub):
        stream = stub.generate(GenerateRequest([1]), None)
        assert isinstance(await anext(stream), Accepted)
        await stream.aclose()
        await handler.closed.wait()


async def test_a_client_that_leaves_with_unread_messages_closes_the_handlers_generator() -> None:
    """The server is then in a write that waits for HTTP/2's flow control."""
    handler = FakeGenerationHandler()
    handler.endless = True
    async with served(handler) as (address, _), generating(address) as call:
        await call.read()
        assert not handler.closed.is_set()
        call.cancel()
        await handler.closed.wait()


async def count_remaining(call: grpc.aio.UnaryStreamCall[object, object]) -> int:
    count = 0
    while await call.read():
        count += 1
    return count


async def test_a_client_that_stays_but_reads_nothing_is_given_up() -> None:
    handler = FakeGenerationHandler()
    handler.endless = True
    async with served(handler, stall_s=0.1) as (address, _), generating(address) as call:
        await call.read()
        await handler.closed.wait()
        handler.endless = False
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await count_remaining(call)
        assert isinstance(status.from_rpc_error(caught.value, "server"), SlowReader)
    async with served(handler) as (_, stub):
        assert await ask(stub) == handler.events


async def test_a_stream_without_new_messages_is_not_taken_for_stalled() -> None:
    handler = FakeGenerationHandler()
    handler.may_end.clear()
    async with served(handler, stall_s=0.5) as (address, _), generating(address) as call:
        for _ in handler.events:
            await call.read()
        asyncio.get_running_loop().call_later(1.5, handler.may_end.set)
        assert await call.code() is grpc.StatusCode.OK


async def test_chunks_taken_at_once_keep_their_order_and_a_full_stream_takes_none() -> None:
    handler = FakeGenerationHandler()
    count, size = 400, 1000
    handler.offered = [Chunk(2 + size * number, [7] * size, "x" * size, []) for number in range(count)]
    async with served(handler) as (address, _), generating(address) as call:
        indices = [answer.chunk.first_index async for answer in call if answer.WhichOneof("event") == "chunk"]
        assert indices == [0, *(chunk.first_index for chunk in handler.offered)]
        refused = handler.num_refused
        assert refused == count if SERVING["kind"] == "grpcio" else 0 < refused < count


async def test_a_node_name_that_is_not_ascii_does_not_fail_the_answer() -> None:
    handler = FakeGenerationHandler()
    handler.events = [Accepted("r", 5, 3), replace(FINISHED, path=NodePath("prefill-ü", "d", 1, "zwei\nZeilen"))]
    async with served(handler) as (_, stub):
        *_, end = await ask(stub)
        assert isinstance(end, Finished)
        assert (end.finish_reason, end.path.decode_node) == ("length", "d")


async def test_an_address_where_nobody_listens_is_unreachable() -> None:
    async with served(FakeGenerationHandler()) as (address, _):
        pass
    stub = GenerationStub(address)
    with pytest.raises(Unreachable, match="does not answer"):
        await ask(stub)
    await stub.close()


# Nodes.


class Node:
    """A served node handler with one client."""

    def __init__(self) -> None:
        self.handler = FakeNodeHandler(decode())
        self.server = RpcServer((node_service.SERVICE_NAME,))
        self.address = f"127.0.0.1:{self.server.bind('127.0.0.1', 0)}"
        NodeServicer(self.handler).add_to_server(self.server.server)
        self.client = NodeClient(self.address)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    await node.server.start()
    yield node
    await node.client.close()
    await node.server.stop(0)


@asynccontextmanager
async def raw_router(node: Node) -> AsyncIterator[tuple[Any, Any]]:
    """The call of a router that is not ours, and its port."""
    async with grpc.aio.insecure_channel(node.address) as channel:
        call = node_pb2_grpc.NodeStub(channel).Attach()
        await call.write(node_pb2.AttachRequest(hello=node_pb2.AttachHello(router_id="router-1")))
        await call.read()
        yield call, await node.handler.ports.get()


async def test_a_router_sends_work_and_receives_reports(node: Node) -> None:
    stream = await node.client.attach("router-1", node.handler.description.incarnation, "router-1.x", [KEY])
    assert stream.welcome == node.handler.description
    port = await node.handler.ports.get()
    assert (port.router_id, port.router_incarnation, port.keeps) == ("router-1", "router-1.x", [KEY])
    stream.send(SUBMIT)
    stream.send(Abort(KEY, "enough"))
    assert [await port.received.get() for _ in range(2)] == [
        changed(SUBMIT, prompt_token_ids=[1, 2, 3]),
        Abort(KEY, "enough"),
    ]
    report = StepReport([RequestDelta(KEY, 3, [9], [TokenLogprobs(9, -0.5, 1, [(9, -0.5)])])], LoadReport(running=1))
    port.queue.put_nowait(report)
    reports = aiter(QueuedReports(stream))
    assert await anext(reports) == report
    stream.send(WatchKVCache())
    assert await port.received.get() == WatchKVCache()
    report = StepReport([], LoadReport(), KVCacheUpdate(3, 4, [BlockStored((b"k" * 32,), b"p" * 32)], restart=True))
    port.queue.put_nowait(report)
    assert await anext(reports) == report
    port.close()
    with pytest.raises(NodeLost, match="ended the stream"):
        await anext(reports)


async def test_another_incarnation_is_refused_and_opens_no_port(node: Node) -> None:
    with pytest.raises(ConfigError, match=r"not d1\.999"):
        await node.client.attach("router-1", "d1.999")
    assert node.handler.ports.empty()


async def test_a_stream_that_does_not_begin_with_hello_is_refused(node: Node) -> None:
    async with grpc.aio.insecure_channel(node.address) as channel:
        for first in (node_pb2.AttachRequest(), node_pb2.AttachRequest(abort=node_pb2.Abort())):
            call = node_pb2_grpc.NodeStub(channel).Attach(iter([first]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = node_pb2_grpc.NodeStub(channel).Attach(iter([]))
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    assert node.handler.ports.empty()


async def test_a_node_that_refuses_routers_says_why(node: Node) -> None:
    node.handler.open_error = errors.Draining("the node has stopped")
    with pytest.raises(errors.Draining, match="has stopped"):
        await node.client.attach("router-1")


async def test_a_node_that_dies_is_lost_to_reader_and_writer(node: Node) -> None:
    stream = await node.client.attach("router-1")
    await node.server.stop(0)
    with pytest.raises(NodeLost, match="is gone"):
        await anext(aiter(QueuedReports(stream)))
    with pytest.raises(NodeLost, match="is gone"):
        stream.send(SUBMIT)
    with pytest.raises(BatonError) as caught:
        await node.client.attach("router-1")
    assert caught.value.retryable


async def node_server(files: TlsFiles) -> RpcServer:
    """Return a node that presents this certificate and requires one."""
    server = RpcServer((node_service.SERVICE_NAME,), FaultBarrier(), files.live(), asks_certificates=True)
    NodeServicer(FakeNodeHandler(decode())).add_to_server(server.server)
    return server


def make_intermediate(directory: Path, now: datetime.datetime) -> None:
    """Replace the authority in a directory by one that an unknown root has signed."""
    ca = x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes())
    root = ec.generate_private_key(ec.SECP256R1())
    signed = (
        x509.CertificateBuilder()
        .subject_name(ca.subject)
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")]))
        .public_key(ca.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(root, hashes.SHA256())
    )
    (directory / "ca.crt").write_bytes("# für uns\n".encode() + signed.public_bytes(serialization.Encoding.PEM))


async def test_a_node_is_authenticated_by_its_certificate(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    ours, others, signed = tmp_path / "ours", tmp_path / "others", tmp_path / "signed"
    for directory in (ours, others, signed):
        make_certificates(directory, "default", ["127.0.0.1"], 1, now)
    make_intermediate(signed, now)
    router = certificate_files(ours, "router").read()
    cases = [
        (certificate_files(ours, "node"), router, None),
        (certificate_files(signed, "node"), certificate_files(signed, "router").read(), None),
        (certificate_files(ours, "router"), router, "hostname mismatch"),
        (certificate_files(others, "node"), router, "certificate verify failed"),
        (certificate_files(ours, "node"), TlsBytes(router.ca, None, None), ""),
        (certificate_files(ours, "node"), None, ""),
    ]
    for shown, ours_is, message in cases:
        server = await node_server(shown)
        address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
        await server.start()
        client = NodeClient(address, Dialer.to_role(CallerRole.NODE, "default", ours_is))
        try:
            if message is None:
                stream = await client.attach("router-1")
                assert stream.welcome == FakeNodeHandler(decode()).description
                await stream.close()
            else:
                with pytest.raises(Unreachable, match=f"{address} does not answer.*(?i:{message})"):
                    await client.attach("router-1")
        finally:
            await client.close()
            await server.stop(0)


async def test_a_router_that_leaves_closes_its_port(node: Node) -> None:
    stream = await node.client.attach("router-1")
    port = await node.handler.ports.get()
    await stream.close()
    await port.closed.wait()


@pytest.fixture
def early_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers miss a client after a tenth of the product's 15 seconds."""
    options = [(name, value // 10 if name.endswith(("time_ms", "timeout_ms")) else value) for name, value in _OPTIONS]
    monkeypatch.setattr("baton.wire.server.server._OPTIONS", tuple(options))


@pytest.mark.usefixtures("early_pings")
async def test_the_port_of_a_stopped_router_is_closed(node: Node) -> None:
    """A stopped router closes no connection and its kernel still acknowledges, so its requests would run for nobody."""
    script = f"""
import asyncio
from baton.wire.clients.node_client import NodeClient
async def main():
    stream = await NodeClient("{node.address}").attach("router-1")
    await asyncio.get_running_loop().create_future()
asyncio.run(main())
"""
    router = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    port = await node.handler.ports.get()
    router.send_signal(signal.SIGSTOP)
    try:
        await port.closed.wait()
    finally:
        router.kill()
        await router.wait()


async def test_a_router_that_leaves_with_unread_reports_closes_its_port(node: Node) -> None:
    """The node is then in a write that waits for HTTP/2's flow control."""
    async with raw_router(node) as (call, port):
        for _ in range(300):
            port.queue.put_nowait(StepReport([RequestDelta(KEY, 0, [9], error="x" * 100_000)], LoadReport()))
        await call.read()
        # It takes one more each time that one is read.
        assert port.queue.qsize() > 100
        assert not port.closed.is_set()
        call.cancel()
        await port.closed.wait()


async def test_an_unreadable_submit_fails_its_own_attempt_alone(node: Node) -> None:
    async with raw_router(node) as (call, port):
        attempt = node_pb2.Attempt(request_id="r", attempt=1, flight=2**63)
        await call.write(node_pb2.AttachRequest(submit=node_pb2.Submit(attempt=attempt)))
        assert await port.refused.get() == (KEY, "Submit.leg: this version knows no Leg 0")
        await call.write(node_pb2.AttachRequest())
        await call.write(node_pb2.AttachRequest(abort=node_pb2.Abort(attempt=attempt, reason="x")))
        assert await port.received.get() == Abort(KEY, "x")
        assert not port.closed.is_set()


async def test_reports_are_abbreviated_only_for_routers_that_can_read_it(node: Node) -> None:
    reports = [StepReport([RequestDelta(KEY, index, [index])], LoadReport()) for index in range(3)]
    newest = QueuedReports(await node.client.attach("router-1"))
    port = await node.handler.ports.get()
    for report in reports:
        port.queue.put_nowait(report)
    told = aiter(newest)
    for index in range(3):
        assert [list(delta.token_ids) for delta in (await anext(told)).deltas] == [[index]]
    async with raw_router(node) as (older, port):
        for report in reports:
            port.queue.put_nowait(report)
        for index in range(3):
            answer = await older.read()
            assert isinstance(answer, node_pb2.AttachResponse)
            assert [list(delta.token_ids) for delta in answer.report.deltas] == [[index]]


async def test_a_node_that_fails_on_a_message_fails_that_attempt_alone(node: Node) -> None:
    stream = await node.client.attach("router-1")
    port = await node.handler.ports.get()
    node.handler.receive_error = RuntimeError(f"no such thing in {SECRET}")
    stream.send(SUBMIT)
    attempt, error = await port.refused.get()
    assert attempt == KEY
    assert SECRET not in error
    node.handler.receive_error = None
    stream.send(Abort(KEY, "x"))
    assert await port.received.get() == Abort(KEY, "x")


async def test_descriptions_traces_and_commands_are_answered(node: Node) -> None:
    load, handoff = LoadReport(running=3, total_blocks=8), HandoffReport()
    assert await node.client.describe() == NodeReport(node.handler.description, load, {"capacity": 2}, handoff)
    assert await node.client.trace(4) == [TraceEvent(5, 10, "queued", KEY, 3, "x")]
    traced = await node.client.trace_steps(4, 6)
    assert traced.events == [TraceEvent(5, 10, "queued", KEY, 3, "x")]
    assert traced.steps == [TraceStep(7, 20, StepFigures(1.5, 2, 3, 4), True)]
    assert traced.monotonic_ns > 0
    await node.client.drain()
    await node.client.set_role(Role.DECODE, "p1.a")
    assert node.handler.roles == [("p1.a", Role.DECODE)]
    assert await node.client.reset_prefix_cache("p1.a") == 7
    with pytest.raises(CacheInUse, match="3 offered to decode nodes"):
        await node.client.reset_prefix_cache("busy")
    node.handler.adapters["/one"] = AdapterInfo("a" * 64, 8, 1 << 40, 3, "base")
    assert await node.client.inspect_adapter("/one", "p1.a") == node.handler.adapters["/one"]
    with pytest.raises(AdapterRefused, match="there is no directory /two"):
        await node.client.inspect_adapter("/two")
    async with grpc.aio.insecure_channel(node.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node_pb2_grpc.NodeStub(channel).SetRole(node_pb2.SetRoleRequest())
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert node.handler.drains == 1
