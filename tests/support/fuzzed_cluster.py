"""A cluster in virtual time for fuzzed requests; after each request nothing of it may be left."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

from baton.messages.generation import ModelCard
from baton.messages.ids import AttemptKey
from baton.messages.node import NodeDescription, StepReport
from baton.messages.sampling import SamplingParams
from baton.v1 import generation_pb2 as pb
from baton.wire.services.generation_service import SERVICE_NAME, GenerationServicer
from router.admission.limits import DispatchLimits
from router.dispatcher import Dispatcher
from router.front import GenerationHandler
from router.timers import LoopTimers, TimerHandle
from tests.doubles.fake_tokenizer import FakeTokenizer
from tests.doubles.faulty_transfer_backend import Faults
from tests.support.local_rpc import LocalServer, Reply
from tests.support.request_bounds import Served
from tests.support.simulated_cluster import SimulatedCluster, SimulatedLimits
from tests.support.simulated_oracle import expected_tokens
from tests.support.virtual_time import VirtualTimeLoop

LIMITS = SimulatedLimits(num_blocks=192, chunk=256, max_num_seqs=16, digests=False)
SPEC = LIMITS.spec
SERVED = Served(SPEC.name, SPEC.vocab_size, SPEC.max_model_len)
CANARY = pb.GenerateRequest(token_ids={"ids": [5, 6, 7, 8, 9]}, sampling_params={"seed": 3, "max_tokens": 6})
CANARY_TOKENS = expected_tokens([5, 6, 7, 8, 9], SamplingParams(temperature=1.0, seed=3, max_tokens=6), SPEC)
PATIENCE_S = 600.0
"""The longest wait, in seconds of virtual time."""

T = TypeVar("T")


class LetterTokenizer(FakeTokenizer):
    """A tokenizer that maps the letters of any text into the vocabulary of the simulated model."""

    def letter(self, token_id: int) -> str:
        return chr(32 + token_id)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % SPEC.vocab_size for letter in text]


class CountedTimers(LoopTimers):
    """Timers that know the number of pending callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[asyncio.TimerHandle] = []

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        handle = super().call_at(when, callback)
        assert isinstance(handle, asyncio.TimerHandle)
        self._made.append(handle)
        return handle

    def pending(self) -> int:
        now = self.monotonic()
        self._made = [handle for handle in self._made if not handle.cancelled() and handle.when() > now]
        return len(self._made)


class ReportFilter:
    """Passes what nodes send on to the dispatcher. `replace_report` returns the reports to pass on instead of one."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.replace_report: Callable[[StepReport], Sequence[StepReport]] = lambda report: (report,)

    def on_attached(self, description: NodeDescription) -> None:
        self._dispatcher.requests.on_attached(description)

    def on_report(self, incarnation: str, report: StepReport) -> None:
        for passed_on in self.replace_report(report):
            self._dispatcher.requests.on_report(incarnation, passed_on)

    def on_cut(self, incarnation: str, reason: str) -> None:
        self._dispatcher.requests.on_cut(incarnation, reason)

    def attempts_on(self, incarnation: str) -> Sequence[AttemptKey]:
        return self._dispatcher.requests.attempts_on(incarnation)

    def on_lost(self, incarnation: str, reason: str) -> None:
        self._dispatcher.requests.on_lost(incarnation, reason)


class FuzzedCluster:
    """A cluster that serves many fuzzed requests, and the gRPC server at which they arrive."""

    def __init__(self) -> None:
        self.cluster = SimulatedCluster(LIMITS, Random(1), Faults)
        self.timers = CountedTimers()
        cluster, codec = self.cluster, LetterTokenizer()

        def card() -> ModelCard:
            return ModelCard(SPEC.name, SPEC.max_model_len, SPEC.vocab_size, embedding_size=8)

        limits = DispatchLimits(thread_text_chars=200)
        self.dispatcher = Dispatcher(cluster.view, cluster._links, codec, card, self.timers, Random(2), limits)
        cluster.dispatcher = self.dispatcher
        self.report_filter = ReportFilter(self.dispatcher)
        cluster._links.listen(self.report_filter)
        self.card = card
        self.server = LocalServer()
        self.handler = GenerationHandler(self.dispatcher, codec, card)
        GenerationServicer(self.handler).add_to_server(self.server)  # type: ignore[arg-type]

    async def start(self) -> None:
        for name in ("prefill-0", "decode-0"):
            await self.cluster.start(name)
        await self.cluster.wait_until_whole()
        # The link between the nodes stays open after the first request.
        await self.call("Generate", CANARY.SerializeToString())
        await asyncio.sleep(1.0)
        self._tasks = count_tasks()

    async def call(self, method: str, request: bytes, **how: Any) -> Reply:
        return await self.server.call(f"/{SERVICE_NAME}/{method}", request, **how)

    async def beside_a_canary(self, ask: Callable[[FuzzedCluster], Awaitable[T]]) -> T:
        """Run `ask` beside an ordinary request and return its answer.

        Checks that the ordinary request got its tokens and that nothing of either is left.
        """
        async with asyncio.timeout(PATIENCE_S):
            canary = asyncio.create_task(self.call("Generate", CANARY.SerializeToString()))
            reply = await ask(self)
            unharmed = await canary
        assert unharmed.code == "OK", unharmed
        assert tokens_of(events_of(unharmed)) == CANARY_TOKENS
        await self._assert_nothing_is_left()
        return reply

    async def _assert_nothing_is_left(self) -> None:
        requests = self.dispatcher.requests
        assert (requests.num_live, requests.num_waiting, requests.num_placed) == (0, 0, 0)
        assert self.timers.pending() == 0
        await self.cluster.wait_until_idle(PATIENCE_S)
        for node in self.cluster.nodes.values():
            node.assert_nothing_is_left()
        left = count_tasks() - self._tasks
        assert not left, left


def count_tasks() -> Counter[str]:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return Counter(str(task.get_coro().__qualname__) for task in others)  # type: ignore[union-attr]


Run = Callable[[Callable[[FuzzedCluster], Awaitable[Any]]], Any]


@contextmanager
def fuzzed_cluster() -> Iterator[Run]:
    """Yield a function that runs a coroutine function on the cluster, beside an ordinary request (the canary)."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:

        async def start() -> FuzzedCluster:
            cluster = FuzzedCluster()
            await cluster.start()
            return cluster

        cluster = runner.run(start())
        yield lambda ask: runner.run(cluster.beside_a_canary(ask))
        runner.run(cluster.cluster.close())


def events_of(reply: Reply) -> list[pb.GenerateResponse]:
    return [pb.GenerateResponse.FromString(message) for message in reply.messages]


def tokens_of(events: Sequence[pb.GenerateResponse], sequence_index: int = 0) -> list[int]:
    chunks = [event.chunk for event in events if event.HasField("chunk")]
    return [token for chunk in chunks if chunk.sequence_index == sequence_index for token in chunk.token_ids]
