"""The router frees everything of a request as soon as it ends: nothing waits for the garbage collector."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from baton.messages.generation import ModelCard
from baton.messages.ids import AttemptKey
from baton.messages.node import Outcome
from baton.v1 import generation_pb2 as generation
from baton.v1 import generation_pb2_grpc
from baton.wire.http2.call import Call
from baton.wire.server.fault_barrier import FaultBarrier
from baton.wire.server.server import streaming_server
from baton.wire.services.generation_service import SERVICE_NAME, GenerationServicer
from router.admission.tenants import Tenants
from router.flight.active_request import ActiveRequest
from router.flight.flight import Flight
from router.front import GenerationHandler
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.support.router_parts import MODEL, decode, prefill
from tests.support.router_rig import RouterRig, router_rig
from tests.support.uncollected import garbage_collector_off

NUM_REQUESTS = 10
KEPT = (Call, ActiveRequest, Flight)


@pytest.fixture(autouse=True)
def count_uncollected() -> Iterator[Callable[[], Counter[str]]]:
    """Counts objects of requests that have not been freed."""
    with garbage_collector_off(*KEPT) as count_uncollected:
        yield count_uncollected


@asynccontextmanager
async def serving(rig: RouterRig) -> AsyncIterator[generation_pb2_grpc.GenerationStub]:
    card = ModelCard(MODEL, 64, 300)
    server = streaming_server((SERVICE_NAME,), FaultBarrier(), None)
    handler = GenerationHandler(rig.dispatcher, FakeTokenizer(), lambda: card, Tenants())
    GenerationServicer(handler).add_to_server(server.server)
    port = server.bind("127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield generation_pb2_grpc.GenerationStub(channel)
    finally:
        await server.stop(0)
        await clients_calls_end()


async def clients_calls_end() -> None:
    """Wait for the tasks that gRPC's client has of cancelled calls: closing its channel does not."""
    calls = [task for task in asyncio.all_tasks() if "_AioCall" in getattr(task.get_coro(), "__qualname__", "")]
    if calls:
        await asyncio.wait(calls)


async def start_request(rig: RouterRig, stub: generation_pb2_grpc.GenerationStub) -> tuple[Any, AttemptKey]:
    stream = stub.Generate(generation.GenerateRequest(model=MODEL, text="hello"))
    to_prefill = await rig.next_submit("p1")
    await rig.next_submit("d1")
    rig.report("p1", to_prefill.attempt, 0, "w", Outcome.HANDED_OFF)
    rig.report("d1", to_prefill.attempt, 1, "o")
    return stream, to_prefill.attempt


async def read_to_its_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


@pytest.mark.timeout(20)
@pytest.mark.parametrize("end", ["finish", "cancel", "cancelled by its id", "fault", "shut down"])
async def test_an_ended_request_is_freed_without_the_garbage_collector(
    end: str, count_uncollected: Callable[[], Counter[str]]
) -> None:
    async with router_rig(prefill(), decode()) as rig, serving(rig) as stub:
        for _ in range(NUM_REQUESTS):
            stream, attempt = await start_request(rig, stub)
            accepted = await stream.read()
            if end == "finish":
                rig.report("d1", attempt, 2, "rd", Outcome.LENGTH)
                await read_to_its_end(stream)
            elif end == "cancel":
                await stream.read()
                stream.cancel()
                await rig.next_abort("d1")
            else:
                if end == "cancelled by its id":
                    await stub.Cancel(generation.CancelRequest(request_id=accepted.request_id))
                elif end == "fault":
                    rig.report("d1", attempt, 2, "", Outcome.ERROR)
                else:
                    rig.dispatcher.leave_all_to_other_routers()
                with pytest.raises(grpc.aio.AioRpcError):
                    await read_to_its_end(stream)
            while not rig.nodes["d1"].inbox.empty():
                rig.nodes["d1"].inbox.get_nowait()
            while not rig.nodes["p1"].inbox.empty():
                rig.nodes["p1"].inbox.get_nowait()
        while rig.requests.num_live:  # noqa: ASYNC110 - the dispatcher tells nobody, and what it keeps is looked at
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0)
        assert count_uncollected() == Counter()
