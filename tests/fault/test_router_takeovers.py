"""Requests that move from router to router: late messages and rolling restarts, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from random import Random

import pytest

from baton.client.continuation import CallKind, Continuation, EndpointRotation, with_id_and_seed
from baton.errors import Unreachable
from baton.messages.generation import Chunk, Finished, GenerateEvent, GenerateRequest
from baton.messages.node import Abort, Adopt
from baton.messages.sampling import SamplingParams
from router.flight.flight_table import AttemptCause
from tests.doubles.faulty_transfer_backend import Faults
from tests.support.always_first import AlwaysFirst
from tests.support.simulated_cluster import Answer, SimulatedLimits, simulated_cluster
from tests.support.simulated_oracle import expected_tokens
from tests.support.simulated_routers import RoutedCluster
from tests.support.virtual_time import run_virtually

NAMES = ["router-a", "router-b", "router-c"]
PROMPT = list(range(20))
NUM_TOKENS = 90
LIMITS = SimulatedLimits(num_blocks=64, chunk=24)
EXPECTED = expected_tokens(PROMPT, SamplingParams(temperature=0.0, seed=0, max_tokens=NUM_TOKENS), LIMITS.spec)


class Client:
    """One client that changes its router when the test says so."""

    def __init__(self, cluster: RoutedCluster) -> None:
        self._cluster = cluster
        now = asyncio.get_running_loop().time()
        rng = AlwaysFirst()
        self._continuation = Continuation(EndpointRotation(NAMES, rng), rng, now, 60.0)
        self._request = with_id_and_seed(
            GenerateRequest(PROMPT, "r", temperature=0.0, seed=0, max_tokens=NUM_TOKENS), Random(2)
        )
        self.token_ids: list[int] = []
        self.finished: Finished | None = None

    def call(self) -> tuple[str, AsyncGenerator[GenerateEvent, None]]:
        """Make the next call; at which router, and what it answers."""
        call = self._continuation.next_call()
        name = NAMES[call.endpoint]
        if call.kind is CallKind.GENERATE:
            return name, self._cluster.routers[name].answer(lambda router: router.generate(self._request))
        return name, self._cluster.routers[name].answer(
            lambda router: router.resume("r", call.positions, call=call.number)
        )

    async def read(self, events: AsyncGenerator[GenerateEvent, None], until: int = NUM_TOKENS) -> None:
        """Read until it has so many tokens, and to the end if that is all of them."""
        async for event in events:
            fresh = self._continuation.receive(event, asyncio.get_running_loop().time())
            if isinstance(fresh, Chunk):
                self.token_ids += fresh.token_ids
            self.finished = fresh if isinstance(fresh, Finished) else self.finished
            if until < NUM_TOKENS and len(self.token_ids) >= until:
                return

    def leave(self) -> None:
        """Give up the call that it made last."""
        assert self._continuation.call_failed(Unreachable("nothing is heard"), asyncio.get_running_loop().time()) == 0.0


@pytest.mark.parametrize("leaves", [False, True], ids=["client-is-believed-to-be-there", "client-has-left"])
def test_a_late_adopt_takes_no_request_from_the_router_that_serves_the_client(leaves: bool) -> None:
    run_virtually(_late_adoption(leaves))


async def _late_adoption(leaves: bool) -> None:
    async with simulated_cluster(Random(1), limits=LIMITS, faults=Faults, cluster=RoutedCluster) as made:
        assert isinstance(made, RoutedCluster)
        for name in NAMES:
            made.start_router(name)
        await asyncio.sleep(1.0)
        client = Client(made)
        name, events = client.call()
        await client.read(events, 5)
        await made.routers[name].kill()
        client.leave()
        slow, late = client.call()
        for stream in made.streams_of(slow):
            stream.held = []
        reading = asyncio.create_task(client.read(late))
        await asyncio.sleep(0.1)
        client.leave()
        name, events = client.call()
        assert (slow, name) == ("router-b", "router-c")
        serving = asyncio.create_task(client.read(events))
        await asyncio.sleep(0.1)
        if leaves:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await late.aclose()
        held = [message for stream in made.streams_of(slow) for message in stream.held or ()]
        assert {type(message) for message in held} == ({Adopt, Abort} if leaves else {Adopt})
        for stream in made.streams_of(slow):
            stream.let_go_on()
        await serving
        assert client.finished is not None
        assert client.finished.path.attempts == 1, "nothing was computed again"
        assert client.token_ids == EXPECTED
        assert made.routers[name].dispatcher.requests.counters.moved == 0
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await late.aclose()
        await made.wait_until_idle(30.0)
        for node in made.nodes.values():
            node.assert_nothing_is_left()


def test_a_router_to_which_a_client_returns_takes_its_attempt_back() -> None:
    run_virtually(_back_at_the_first())


async def _back_at_the_first() -> None:
    """The second router was slow: its messages reach the nodes when the client is at the first router again."""
    async with simulated_cluster(Random(1), limits=LIMITS, faults=Faults, cluster=RoutedCluster) as made:
        assert isinstance(made, RoutedCluster)
        for name in NAMES:
            made.start_router(name)
        await asyncio.sleep(1.0)
        client, first = Client(made), made.routers["router-a"].dispatcher
        _, events = client.call()
        await client.read(events, 5)
        client.leave()
        slow, late = client.call()
        for stream in made.streams_of(slow):
            stream.held = []
        reading = asyncio.create_task(client.read(late))
        await asyncio.sleep(0.1)
        back = made.routers["router-a"].answer(lambda router: router.resume("r", [len(client.token_ids)], call=3))
        tokens: list[int] = list(client.token_ids)
        async for event in back:
            if isinstance(event, Chunk):
                tokens += event.token_ids
            for stream in made.streams_of(slow):
                stream.let_go_on()
        assert tokens == EXPECTED
        assert first.requests.counters.moved == 0
        assert made.routers[slow].dispatcher.requests.counters.moved == 1
        await asyncio.gather(reading, return_exceptions=True)
        await events.aclose()
        await late.aclose()


@pytest.mark.parametrize("seed", range(4))
def test_a_rolling_restart_of_two_routers_computes_nothing_again(seed: int) -> None:
    run_virtually(_rolling_restart(seed))


async def _rolling_restart(seed: int) -> None:
    rng = Random(seed)
    limits = SimulatedLimits(num_blocks=128, chunk=24, max_num_seqs=8)
    sizes = {"prefill": 2, "decode": 2}
    async with simulated_cluster(rng, **sizes, limits=limits, faults=Faults, cluster=RoutedCluster) as made:
        assert isinstance(made, RoutedCluster)
        runs = [made.start_router(name) for name in NAMES[:2]]
        await asyncio.sleep(1.0)
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=60)
        prompts = [[rng.randrange(limits.spec.vocab_size) for _ in range(rng.randint(1, 40))] for _ in range(12)]

        async def ask(number: int) -> Answer:
            await asyncio.sleep(rng.uniform(0.0, 1.5))
            n = 3 if number % 4 == 3 else 1
            return await made.ask(
                GenerateRequest(prompts[number], f"r{number}", temperature=0.0, seed=0, max_tokens=60, n=n)
            )

        asking = [asyncio.create_task(ask(number)) for number in range(len(prompts))]
        for name in NAMES[:2]:
            await asyncio.sleep(0.5)
            await made.routers[name].stop()
            await asyncio.sleep(0.3)
            runs.append(made.start_router(name))
        answers = await asyncio.gather(*asking)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.error is None
            assert answer.token_ids == expected_tokens(prompt, params, limits.spec)
        counters = [run.dispatcher.requests.counters for run in runs]
        assert sum(of_one.adopted for of_one in counters) > 0
        begun = sum((of_one.attempts for of_one in counters), Counter())
        assert begun == {AttemptCause.FIRST: len(prompts)}, "each prompt was computed once"
        await made.wait_until_idle(30.0)
        for node in made.nodes.values():
            node.assert_nothing_is_left()
