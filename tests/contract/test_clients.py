"""Both Python clients over real gRPC: the caller gets one complete answer, whatever happens to its routers."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from baton.client import AsyncGenerationClient, GenerationClient
from baton.client.generation import SILENCE_S
from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    EngineFault,
    RequestNotFound,
    Unreachable,
)
from baton.messages.generation import (
    Accepted,
    Chunk,
    Finished,
    GenerateEvent,
    GenerateRequest,
    ModelCard,
    Path,
    TakeChunk,
)
from baton.messages.pooling import EmbedInput, EmbedRequest, EmbedResponse, EmbedResult
from baton.wire.clients.generation_client import GenerationStub
from baton.wire.server.server import RpcServer
from baton.wire.services import generation_service
from baton.wire.services.generation_service import GenerationServicer
from tests.support.always_first import AlwaysFirst

REQUEST = GenerateRequest((1, 2, 3), max_tokens=6)
TEXT = "abcdef"
FINISHED = Finished("length", None, 3, 6, 0, 1.0, 2.0, 3.0, 4.0, 5.0, 6, Path("p", "d", 2, ""))


class Router:
    """A router that answers with the same letters as every other one, until it fails."""

    def __init__(self, breaks_after: int | None = None, error: BatonError | None = None) -> None:
        self.breaks_after = breaks_after
        self.error = error or Draining("closing")
        self.knows = True
        self.hangs = False
        self.calls: list[object] = []
        self.closed = asyncio.Event()

    async def generate(
        self, request: GenerateRequest, timeout_s: float | None, take: TakeChunk | None
    ) -> AsyncGenerator[GenerateEvent, None]:
        self.calls.append(request)
        async for event in self._answer(request.request_id, 0):
            yield event

    async def resume(
        self,
        request_id: str,
        next_token_index: Sequence[int],
        timeout_s: float | None,
        take: TakeChunk | None,
        call: int,
    ) -> AsyncGenerator[GenerateEvent, None]:
        self.calls.append((request_id, *next_token_index))
        if not self.knows:
            raise RequestNotFound("nobody knows it")
        async for event in self._answer(request_id, next_token_index[0]):
            yield event

    async def _answer(self, request_id: str, first: int) -> AsyncGenerator[GenerateEvent, None]:
        try:
            for index in range(first, len(TEXT)):
                if index == self.breaks_after:
                    raise self.error
                if index == first:
                    yield Accepted(request_id, 7, 3)
                yield Chunk(index, (index,), TEXT[index])
            if self.hangs:
                await asyncio.get_running_loop().create_future()
            yield FINISHED
        finally:
            self.closed.set()

    async def cancel(self, request_id: str) -> None:
        self.calls.append(request_id)
        if not self.knows:
            raise RequestNotFound("nobody knows it")

    async def tokenize(self, model: str, text: str) -> Sequence[int]:
        return [len(text)]

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        return str(list(token_ids))

    async def embed(self, request: EmbedRequest, timeout_s: float | None) -> EmbedResponse:
        return EmbedResponse(request.request_id, [EmbedResult([0.5, float(len(request.inputs))])], 3)

    def list_models(self) -> Sequence[ModelCard]:
        return [ModelCard("m", 64, 300)]


@asynccontextmanager
async def served(*routers: Router) -> AsyncIterator[list[str]]:
    """Serve these routers and yield their addresses."""
    async with AsyncExitStack() as stack:
        addresses = []
        for router in routers:
            server = RpcServer((generation_service.SERVICE_NAME,))
            addresses.append(f"127.0.0.1:{server.bind('127.0.0.1', 0)}")
            GenerationServicer(router).add_to_server(server.server)
            await server.start()
            stack.push_async_callback(server.stop, 0.0)
        yield addresses


Ask = Callable[..., Awaitable[list[GenerateEvent]]]


async def ask_async(
    addresses: Sequence[str],
    request: GenerateRequest = REQUEST,
    timeout_s: float | None = None,
    silence_s: float = SILENCE_S,
) -> list[GenerateEvent]:
    async with AsyncGenerationClient(*addresses, rng=AlwaysFirst(), silence_s=silence_s) as client:
        return [event async for event in client.generate(request, timeout_s)]


async def ask_sync(
    addresses: Sequence[str],
    request: GenerateRequest = REQUEST,
    timeout_s: float | None = None,
    silence_s: float = SILENCE_S,
) -> list[GenerateEvent]:
    def run() -> list[GenerateEvent]:
        with GenerationClient(*addresses, rng=AlwaysFirst(), silence_s=silence_s) as client:
            return list(client.generate(request, timeout_s))

    return await asyncio.to_thread(run)


@pytest.fixture(params=[ask_async, ask_sync], ids=["async", "sync"])
def ask(request: pytest.FixtureRequest) -> Ask:
    chosen: Ask = request.param
    return chosen


def assert_whole(events: Sequence[GenerateEvent]) -> None:
    """Check that the answer has Accepted once, each token and letter once, and Finished."""
    assert isinstance(events[0], Accepted)
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert [token for chunk in chunks for token in chunk.token_ids] == list(range(len(TEXT)))
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert isinstance(events[-1], Finished)
    assert len(events) == len(chunks) + 2


async def test_a_lost_stream_is_resumed_at_the_next_router(ask: Ask) -> None:
    first, second = Router(breaks_after=2), Router()
    async with served(first, second) as addresses:
        assert_whole(await ask(addresses))
    sent = first.calls[0]
    assert isinstance(sent, GenerateRequest)
    assert sent.seed is not None
    assert second.calls == [(sent.request_id, 2)]


async def test_a_request_that_no_router_knows_is_generated_again(ask: Ask) -> None:
    first, second = Router(breaks_after=3), Router()
    second.knows = False
    async with served(first, second) as addresses:
        assert_whole(await ask(addresses))
    again = replace(first.calls[0], call=3)  # type: ignore[type-var]
    assert second.calls == [(second.calls[0][0], 3), again]  # type: ignore[index]


async def test_a_retry_while_the_request_is_live_takes_over_its_stream(ask: Ask) -> None:
    first = Router(breaks_after=0, error=DuplicateRequest("is live"))
    async with served(first) as addresses:
        with pytest.raises(DuplicateRequest):
            await ask(addresses, GenerateRequest((1,), request_id="mine"))

    class RefusesDuplicates(Router):
        """Refuses the request as a duplicate, and resumes it."""

        async def generate(
            self, request: GenerateRequest, timeout_s: float | None, take: TakeChunk | None
        ) -> AsyncGenerator[GenerateEvent, None]:
            self.calls.append(request)
            raise DuplicateRequest("is live")
            yield FINISHED

    router = RefusesDuplicates()
    async with served(router) as addresses:
        assert_whole(await ask(addresses))
    assert [type(call) for call in router.calls] == [GenerateRequest, tuple]


async def test_an_unreachable_router_is_skipped(ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    async with served(Router()) as addresses:
        assert_whole(await ask([nobody, *addresses]))
    with pytest.raises(Unreachable):
        await ask([nobody, nobody])


async def test_an_error_about_the_request_itself_is_not_retried(ask: Ask) -> None:
    first, second = Router(breaks_after=2, error=EngineFault("NaN")), Router()
    async with served(first, second) as addresses:
        with pytest.raises(EngineFault):
            await ask(addresses)
    assert second.calls == []


async def test_one_deadline_covers_all_calls(ask: Ask) -> None:
    first, second = Router(breaks_after=2), Router()
    second.hangs = True
    async with served(first, second) as addresses:
        with pytest.raises(DeadlineExceeded):
            await ask(addresses, timeout_s=1.5)
        await second.closed.wait()


async def test_a_router_that_accepts_connections_but_never_answers_is_skipped() -> None:
    """The router is like a stopped process: its kernel accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        async with served(Router()) as addresses:
            mute = f"127.0.0.1:{stopped.getsockname()[1]}"
            async with AsyncGenerationClient(mute, *addresses, rng=AlwaysFirst(), silence_s=0.05) as client:
                assert_whole([event async for event in client.generate(REQUEST)])
                # It is doubted now, so nobody waits for it again.
                assert_whole([event async for event in client.generate(REQUEST)])


async def test_a_router_without_news_that_answers_probes_is_kept(ask: Ask) -> None:
    first, second = Router(), Router()
    first.hangs = True
    async with served(first, second) as addresses:
        with pytest.raises(DeadlineExceeded):
            await ask(addresses, timeout_s=0.5, silence_s=0.02)
        assert second.calls == []


async def test_all_streams_leave_a_mute_router() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        stub = GenerationStub(f"127.0.0.1:{stopped.getsockname()[1]}", silence_s=0.05)

        async def ask_it() -> None:
            with pytest.raises(Unreachable, match="has stopped answering"):
                _ = [event async for event in stub.generate(REQUEST, None)]

        await asyncio.gather(*(ask_it() for _ in range(3)))
        await stub.close()


async def test_several_threads_use_a_blocking_client_whose_own_thread_ends_with_it() -> None:
    first, second = Router(), Router()
    first.hangs = True
    before = set(threading.enumerate())
    async with served(first, second) as addresses:

        def run() -> None:
            with GenerationClient(*addresses, rng=AlwaysFirst()) as client:
                (serving,) = {one for one in set(threading.enumerate()) - before if one.name == "generation-client"}
                stream, left_open = client.generate(REQUEST), client.generate(REQUEST)
                threads = [threading.Thread(target=next, args=(one,)) for one in (stream, left_open)]
                for thread in threads:
                    thread.start()
                assert client.tokenize("four") == [4]
                assert client.detokenize([4]) == "[4]"
                assert client.embed(EmbedRequest([EmbedInput("a")])).results == (EmbedResult((0.5, 1.0)),)
                assert [card.name for card in client.list_models()] == ["m"]
                client.cancel("r")
                for thread in threads:
                    thread.join()
                stream.close()
            assert not serving.is_alive()
            left_open.close()
            client.close()

        await asyncio.to_thread(run)
        assert first.calls[-1] == "r"
        await first.closed.wait()


async def test_calls_of_a_blocking_client_end_with_an_error_when_it_is_closed() -> None:
    router = Router()
    router.hangs = True
    async with served(router) as addresses:
        client = GenerationClient(*addresses)

        def read(begun: threading.Barrier) -> None:
            stream = client.generate(REQUEST)
            assert isinstance(next(stream), Accepted)
            begun.wait()
            with pytest.raises(Cancelled, match=r"client (was|is) closed"):
                list(stream)

        def run() -> None:
            begun = threading.Barrier(3)
            with ThreadPoolExecutor(2) as pool:
                readers = [pool.submit(read, begun) for _ in range(2)]
                begun.wait()
                client.close()
                for reader in readers:
                    reader.result()
            with pytest.raises(Cancelled, match="is closed"):
                client.tokenize("four")

        await asyncio.to_thread(run)


async def test_the_garbage_collector_may_end_a_stream_in_the_clients_own_thread() -> None:
    class Reader:
        def __init__(self, stream: Generator[GenerateEvent, None, None]) -> None:
            self.stream, self.itself = stream, self

    router = Router()
    router.hangs = True
    async with served(router) as addresses:

        def run() -> None:
            with GenerationClient(*addresses) as client:
                reader = Reader(client.generate(REQUEST))
                assert isinstance(next(reader.stream), Accepted)
                del reader
                client._loop.call_soon_threadsafe(gc.collect)
                assert client.tokenize("four") == [4]

        await asyncio.to_thread(run)
        await router.closed.wait()


async def test_closing_a_stream_cancels_its_call_and_other_calls_go_to_any_router_that_answers() -> None:
    first, second = Router(), Router()
    first.hangs, first.knows = True, False
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    async with served(first, second) as addresses:
        async with AsyncGenerationClient(*addresses, rng=AlwaysFirst()) as client:
            stream = client.generate(REQUEST)
            await anext(stream)
            await stream.aclose()
            await first.closed.wait()
            await client.cancel("r")
            assert second.calls == ["r"]
            second.knows = False
            with pytest.raises(RequestNotFound):
                await client.cancel("r")
        async with AsyncGenerationClient(nobody, *addresses, rng=AlwaysFirst()) as client:
            assert await client.tokenize("four") == [4]
            assert await client.detokenize([4]) == "[4]"
            assert (await client.embed(EmbedRequest([EmbedInput("a")]))).results == (EmbedResult((0.5, 1.0)),)
            assert [card.name for card in await client.list_models()] == ["m"]
            with pytest.raises(Unreachable):
                await client.cancel("r")


async def test_a_client_that_knows_the_cluster_is_gone_does_not_retry() -> None:
    first = Router(breaks_after=2)
    async with served(first) as addresses:

        def run() -> None:
            with GenerationClient(*addresses, has_cluster_ended=lambda: True) as client:
                list(client.generate(REQUEST))

        with pytest.raises(Draining):
            await asyncio.to_thread(run)
    assert len(first.calls) == 1


async def test_a_cancelled_request_is_not_retried(ask: Ask) -> None:
    first, second = Router(breaks_after=1, error=Cancelled("by an operator")), Router()
    async with served(first, second) as addresses:
        with pytest.raises(Cancelled):
            await ask(addresses)
    assert second.calls == []
