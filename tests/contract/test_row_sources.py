"""Sources of rows: each input is answered once, with the rows that another node made or with none, whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import pytest

from baton.background import BackgroundWatch, current_watch
from baton.clock import SystemClock
from baton.engine.encoder_cache import EncoderInput
from baton.engine.runner import ModelInfo
from baton.errors import (
    BackgroundFault,
    BatonError,
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    QueueFull,
)
from baton.messages.ids import Peer
from baton.messages.node import NodeDescription
from baton.messages.spans import EncoderContent, RowsRequest
from baton.node.encoding import FetchPolicy, RowFetcher, RowSource
from baton.runner import SimulatedSpec
from baton.runner.simulated import SimulatedRunner
from baton.v1 import encoder_rows_pb2 as pb
from baton.v1 import encoder_rows_pb2_grpc
from baton.wire.credentials import PLAINTEXT_DIALER
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.server import RpcServer
from baton.wire.services.encoder_rows_service import MOST_READERS, PART_BYTES, EncoderRowsServicer
from tests.doubles.fake_row_source import FakeRowSource
from tests.support.router_parts import prefill

NUM_ROWS = 500
ROW_WIDTH = 300
ROWS = random.Random(0).randbytes(NUM_ROWS * 4 * ROW_WIDTH)
assert len(ROWS) > 2 * PART_BYTES
IMAGE = EncoderContent.of(b"an image")
MODEL: ModelInfo = replace(SimulatedRunner(SimulatedSpec()).model, row_width=ROW_WIDTH)
HOLDER: NodeDescription = prefill(model_fingerprint=MODEL.fingerprint, dtype=MODEL.dtype, numerics=MODEL.numerics)


def input_of(content: EncoderContent, address: str, incarnation: str = HOLDER.incarnation) -> EncoderInput:
    peer = Peer(HOLDER.node_id, incarnation, address)
    return EncoderInput(EncoderContent(content.digest, held_by=peer), 0, NUM_ROWS, NUM_ROWS)


@dataclass
class Answers:
    """What a source answered, in order."""

    all: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)

    def done(self, rows: bytes) -> None:
        self.all.put_nowait(rows)

    def none(self) -> None:
        self.all.put_nowait(None)


class LongWait(FetchPolicy):
    """Gives each fetch all the time that it needs on a busy machine, and avoids nobody."""

    def seconds_for(
        self, incarnation: str, num_rows: int, now: float, *, makes: bool = False, tenant: str = ""
    ) -> float | None:
        return 60.0

    def failed(self, incarnation: str, now: float, tenant: str = "") -> None:
        return


def fetcher(policy: FetchPolicy | None = None) -> RowFetcher:
    loop = asyncio.get_running_loop()

    def post(action: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(action)

    return RowFetcher(MODEL, PLAINTEXT_DIALER, SystemClock(), post, policy or LongWait())


async def serve(add: Callable[[grpc.aio.Server], None]) -> tuple[RpcServer, str]:
    server = RpcServer(("baton.v1.EncoderRows",), FaultBarrier(), None)
    port = server.bind("127.0.0.1", 0)
    add(server.server)
    await server.start()
    return server, f"127.0.0.1:{port}"


class Holder(EncoderRowsServicer):
    """A node that has the rows of IMAGE."""

    def __init__(self, description: NodeDescription = HOLDER, rows: bytes = ROWS, call_s: float = 60.0) -> None:
        self.kept = {IMAGE.digest: rows}
        self.late: asyncio.Queue[str] = asyncio.Queue()
        """What was said of the calls that took too long."""
        super().__init__(
            description, lambda digest: memoryview(self.kept[digest]) if digest in self.kept else None, call_s
        )

    async def ReadRows(self, request: pb.ReadRowsRequest, context: Any) -> None:
        try:
            await super().ReadRows(request, context)
        except DeadlineExceeded as error:
            self.late.put_nowait(str(error))
            raise


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """The address of a node with the rows of IMAGE."""
    server, where = await serve(Holder().add_to_server)
    yield where
    await server.stop(0.0)


@pytest.fixture(params=["fake", "node"])
async def source(request: pytest.FixtureRequest) -> AsyncIterator[RowSource]:
    if request.param == "fake":
        fake = FakeRowSource()
        fake.rows[IMAGE.digest] = ROWS
        yield fake
        return
    made = fetcher()
    yield made
    await made.close()


async def test_rows_come_bit_by_bit_as_they_were_made(source: RowSource, address: str) -> None:
    answers = Answers()
    for _ in range(3):
        source.fetch(input_of(IMAGE, address), answers.done, answers.none)
    assert [await answers.all.get() for _ in range(3)] == [ROWS] * 3


async def test_an_input_that_nobody_has_made_rows_of_has_none(source: RowSource, address: str) -> None:
    answers = Answers()
    source.fetch(input_of(EncoderContent.of(b"another image"), address), answers.done, answers.none)
    assert await answers.all.get() is None


async def test_there_are_none_where_nobody_listens() -> None:
    made, answers = fetcher(), Answers()
    made.fetch(input_of(IMAGE, "127.0.0.1:1"), answers.done, answers.none)
    assert await answers.all.get() is None
    await made.close()


@pytest.mark.parametrize("field", ["model_fingerprint", "dtype", "numerics", "incarnation"])
async def test_a_node_that_would_make_other_numbers_gives_none(field: str) -> None:
    changed: dict[str, Any] = {
        name: getattr(HOLDER, name) for name in ("model_fingerprint", "dtype", "numerics", "incarnation")
    }
    server, where = await serve(Holder(prefill(**{**changed, field: "another"})).add_to_server)
    made, answers = fetcher(), Answers()
    made.fetch(input_of(IMAGE, where), answers.done, answers.none)
    assert await answers.all.get() is None
    await made.close()
    await server.stop(0.0)


class Other(encoder_rows_pb2_grpc.EncoderRowsServicer):
    """Sends what it is told to send; then ends or, if it hangs, does not."""

    def __init__(self, *messages: pb.ReadRowsResponse, hangs: bool = False) -> None:
        self.messages = messages
        self.hangs = hangs
        self.num_calls = 0

    def add_to_server(self, server: grpc.aio.Server) -> None:
        encoder_rows_pb2_grpc.add_EncoderRowsServicer_to_server(self, server)

    async def ReadRows(self, request: pb.ReadRowsRequest, context: Any) -> None:
        self.num_calls += 1
        for message in self.messages:
            await context.write(message)
        if self.hangs:
            await asyncio.Event().wait()


def checksum_of(rows: bytes) -> pb.ReadRowsResponse:
    import xxhash

    return pb.ReadRowsResponse(checksum=xxhash.xxh3_128(rows).digest())


@pytest.mark.parametrize(
    "other",
    [
        Other(pb.ReadRowsResponse(rows=ROWS[:-1] + b"x"), checksum_of(ROWS)),
        Other(pb.ReadRowsResponse(rows=ROWS)),
        Other(checksum_of(b"")),
        Other(pb.ReadRowsResponse(rows=b"1234567"), checksum_of(b"1234567")),
        Other(pb.ReadRowsResponse(rows=ROWS[: 4 * NUM_ROWS]), checksum_of(ROWS[: 4 * NUM_ROWS])),
        Other(pb.ReadRowsResponse(rows=ROWS + bytes(4 * NUM_ROWS)), checksum_of(ROWS + bytes(4 * NUM_ROWS))),
        Other(pb.ReadRowsResponse(rows=ROWS), pb.ReadRowsResponse(), checksum_of(ROWS)),
    ],
    ids=["damaged", "cut", "empty", "not whole rows", "narrow rows", "wide rows", "an empty message"],
)
async def test_bytes_that_are_not_the_rows_are_none(other: Other) -> None:
    server, where = await serve(other.add_to_server)
    made, answers = fetcher(), Answers()
    made.fetch(input_of(IMAGE, where), answers.done, answers.none)
    assert await answers.all.get() is None
    await made.close()
    await server.stop(0.0)


async def test_bytes_that_are_no_message_are_none() -> None:
    async def nonsense(_request: bytes, context: Any) -> None:
        await context.write(b"\xff")

    method = grpc.unary_stream_rpc_method_handler(nonsense)
    handler = grpc.method_handlers_generic_handler("baton.v1.EncoderRows", {"ReadRows": method})
    server, where = await serve(lambda server: server.add_generic_rpc_handlers((handler,)))
    made, answers = fetcher(), Answers()
    made.fetch(input_of(IMAGE, where), answers.done, answers.none)
    assert await answers.all.get() is None
    await made.close()
    await server.stop(0.0)


async def test_more_bytes_than_the_rows_have_are_not_awaited() -> None:
    many = pb.ReadRowsResponse(rows=bytes(1 << 20))
    server, where = await serve(Other(*[many] * 3, hangs=True).add_to_server)
    made, answers = fetcher(), Answers()
    content = EncoderContent(IMAGE.digest, held_by=Peer("n", "i", where))
    made.fetch(EncoderInput(content, 0, 4, 4), answers.done, answers.none)
    assert await answers.all.get() is None
    await made.close()
    await server.stop(0.0)


class Hurried(FetchPolicy):
    """Gives a fetch a moment."""

    def seconds_for(
        self, incarnation: str, num_rows: int, now: float, *, makes: bool = False, tenant: str = ""
    ) -> float | None:
        seconds = super().seconds_for(incarnation, num_rows, now, makes=makes, tenant=tenant)
        return None if seconds is None else 0.2


async def test_a_node_that_hangs_is_given_up_and_not_asked_again() -> None:
    other = Other(pb.ReadRowsResponse(rows=ROWS), hangs=True)
    server, where = await serve(other.add_to_server)
    made, answers = fetcher(Hurried()), Answers()
    for _ in range(2):
        made.fetch(input_of(IMAGE, where), answers.done, answers.none)
        assert await answers.all.get() is None
    assert other.num_calls == 1
    await made.close()
    await server.stop(0.0)


async def test_so_many_fetches_at_a_time_and_no_more() -> None:
    other = Other(hangs=True)
    server, where = await serve(other.add_to_server)
    made, answers = fetcher(), Answers()
    for _ in range(20):
        made.fetch(input_of(IMAGE, where), answers.done, answers.none)
    assert [await answers.all.get() for _ in range(12)] == [None] * 12
    await made.close()
    assert answers.all.empty()
    await server.stop(0.0)


class Maker:
    """A `RowMaker` that a test steers."""

    def __init__(self, kept: dict[str, bytes]) -> None:
        self.kept = kept
        self.error: BatonError | None = None
        """What it refuses every call with."""
        self.hangs_for = ""
        """The tenant for which it takes for ever."""
        self.asked: list[RowsRequest] = []
        self.num_open = 0

    @asynccontextmanager
    async def made(self, asked: RowsRequest) -> AsyncIterator[None]:
        self.asked.append(asked)
        self.num_open += 1
        try:
            if self.error is not None:
                raise self.error
            if asked.tenant == self.hangs_for != "":
                await asyncio.Event().wait()
            self.kept[asked.digest] = ROWS
            yield
        finally:
            self.num_open -= 1


def input_to_make(address: str, data: bytes = b"an image", tenant: str = "") -> EncoderInput:
    peer = Peer(HOLDER.node_id, HOLDER.incarnation, address)
    content = replace(EncoderContent.of(data), encoded_by=peer)
    return EncoderInput(content, 3, 3 + NUM_ROWS, NUM_ROWS, tenant)


@asynccontextmanager
async def encode_node() -> AsyncIterator[tuple[Maker, str]]:
    kept: dict[str, bytes] = {}
    maker = Maker(kept)
    rows = lambda digest: memoryview(kept[digest]) if digest in kept else None  # noqa: E731
    server, where = await serve(EncoderRowsServicer(HOLDER, rows, 60.0, maker).add_to_server)
    yield maker, where
    await server.stop(0.0)


async def test_an_encode_node_gets_the_input_and_gives_its_rows() -> None:
    async with encode_node() as (maker, where):
        made, answers = fetcher(), Answers()
        made.fetch(input_to_make(where, tenant="t"), answers.done, answers.none)
        assert await answers.all.get() == ROWS
        (asked,) = maker.asked
        assert (asked.content, asked.num_rows, asked.tenant) == (EncoderContent.of(b"an image"), NUM_ROWS, "t")
        assert maker.num_open == 0
        await made.close()


@pytest.mark.parametrize("error", [QueueFull("full"), InvalidRequest("images", "bad"), EngineFault("broken")])
async def test_an_encode_node_that_refuses_one_input_is_asked_for_others(error: BatonError) -> None:
    async with encode_node() as (maker, where):
        made, answers = fetcher(FetchPolicy()), Answers()
        maker.error = error
        made.fetch(input_to_make(where), answers.done, answers.none)
        assert await answers.all.get() is None
        maker.error = None
        made.fetch(input_to_make(where, b"another"), answers.done, answers.none)
        # What is wrong with the node itself is not tried again at once.
        assert await answers.all.get() == (None if isinstance(error, EngineFault) else ROWS)
        await made.close()


class HurriedForTheFlood(FetchPolicy):
    """Gives a fetch of one tenant a moment, and others all the time that they need on a busy machine."""

    def seconds_for(
        self, incarnation: str, num_rows: int, now: float, *, makes: bool = False, tenant: str = ""
    ) -> float | None:
        seconds = super().seconds_for(incarnation, num_rows, now, makes=makes, tenant=tenant)
        return None if seconds is None else 0.2 if tenant == "flood" else 60.0


async def test_an_encode_node_that_is_slow_for_one_tenant_is_asked_for_others() -> None:
    async with encode_node() as (maker, where):
        made, answers, others = fetcher(HurriedForTheFlood()), Answers(), Answers()
        maker.hangs_for = "flood"
        for _ in range(12):
            made.fetch(input_to_make(where, tenant="flood"), answers.done, answers.none)
        assert [await answers.all.get() for _ in range(12)] == [None] * 12
        assert len(maker.asked) == 8
        made.fetch(input_to_make(where, tenant="small"), others.done, others.none)
        assert await others.all.get() == ROWS
        await made.close()


REQUEST = pb.ReadRowsRequest(
    incarnation=HOLDER.incarnation,
    digest=IMAGE.digest,
    model_fingerprint=HOLDER.model_fingerprint,
    dtype=HOLDER.dtype,
    numerics=HOLDER.numerics,
)


async def test_readers_are_bounded_in_number() -> None:
    server, where = await serve(Holder(rows=bytes(64 << 20)).add_to_server)
    async with grpc.aio.insecure_channel(where) as channel:
        stub = encoder_rows_pb2_grpc.EncoderRowsStub(channel)
        # These calls stay open, since nobody reads on.
        calls = [stub.ReadRows(REQUEST) for _ in range(MOST_READERS)]
        for call in calls:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError, match="8 others read rows"):
            await stub.ReadRows(REQUEST).read()
    await server.stop(0.0)


async def test_a_reader_that_hangs_holds_no_rows_for_ever() -> None:
    holder = Holder(rows=bytes(64 << 20), call_s=0.1)
    server, where = await serve(holder.add_to_server)
    async with grpc.aio.insecure_channel(where) as channel:
        call = encoder_rows_pb2_grpc.EncoderRowsStub(channel).ReadRows(REQUEST)
        assert await holder.late.get() == "the rows were not read within 0.1 s"
        assert holder._num_readers == 0
        call.cancel()
    await server.stop(0.0)


async def test_a_fault_ends_the_process_since_requests_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: asyncio.Queue[BackgroundFault] = asyncio.Queue()
    before = current_watch.set(BackgroundWatch(faults.put_nowait))
    try:
        made = fetcher()

        async def broken(*_arguments: object) -> bytes:
            raise ValueError("out of luck")

        monkeypatch.setattr("baton.node.encoding.read_rows", broken)
        answers = Answers()
        made.fetch(input_of(IMAGE, "127.0.0.1:1"), answers.done, answers.none)
        assert "rows" in str(await faults.get())
        await made.close()
    finally:
        current_watch.reset(before)
