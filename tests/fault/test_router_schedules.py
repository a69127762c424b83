"""Schedules of faults with two routers, over a whole cluster in virtual time: routers and nodes die, records are lost,
clients go elsewhere while their streams are open. Each request gets each of its tokens once, or an error of a node.
While a router and a pair of nodes live, none ends as cancelled, unreachable or with too many attempts.

`BATON_ROUTER_SCHEDULES=1000` runs that many, `BATON_FAULT_SEED=N` one of them alone.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random

from baton.engine.sequences.sequence_group import sequence_seed
from baton.errors import AttemptsExhausted, BatonError, Cancelled, StreamDiverged, Unreachable
from baton.messages.generation import GenerateRequest
from baton.messages.node import Role
from baton.messages.sampling import SamplingParams
from router.dispatcher import Dispatcher
from router.flight.flight_table import AttemptCause
from tests.doubles.faulty_transfer_backend import Faults
from tests.support.moved_streams import count_moves, move_streams
from tests.support.seeds import drawn_seeds, named_seed
from tests.support.simulated_cluster import SimulatedLimits, simulated_cluster
from tests.support.simulated_oracle import expected_prompt_logprobs, expected_tokens
from tests.support.simulated_routers import RoutedCluster
from tests.support.virtual_time import run_virtually

NUM_SCHEDULES = int(os.environ.get("BATON_ROUTER_SCHEDULES", "40"))
SEEDS = drawn_seeds(NUM_SCHEDULES)
HAPPENING_S = 2.5
PATIENCE_S = 400.0
ROUTERS = ("router-a", "router-b")


class Schedule:
    """One cluster with its routers, a few requests and their faults, all drawn from one seed."""

    moves_streams = True

    def __init__(self, seed: int, struck: Counter[str]) -> None:
        self.rng = Random(seed)
        self.struck = struck
        self.limits = SimulatedLimits(
            num_blocks=48,
            chunk=self.rng.choice([4, 8, 24]),
            orphan_grace_s=self.rng.choice([0.0, 0.3, 10.0, 10.0]),
            on_transfer_failure=self.rng.choice(["reroute", "recompute"]),
        )
        self.cluster: RoutedCluster

    async def run(self) -> None:
        rng = self.rng
        sizes = {"prefill": rng.randint(1, 2), "decode": rng.randint(1, 2)}
        async with simulated_cluster(rng, **sizes, limits=self.limits, faults=Faults, cluster=RoutedCluster) as made:
            assert isinstance(made, RoutedCluster)
            self.cluster = made
            for name in ROUTERS:
                made.start_router(name)
            asking = [asyncio.create_task(self._ask(number)) for number in range(rng.randint(2, 5))]
            moving = asyncio.create_task(self._keep_moving())
            await asyncio.gather(*(self._disturb() for _ in range(rng.randint(1, 3))), moving)
            self.cluster.store.up = True
            made.heal()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*asking)
            await made.wait_until_idle(PATIENCE_S)
            for node in made.nodes.values():
                node.assert_nothing_is_left()
            for router in made.routers.values():
                assert router.dispatcher.requests.num_live == 0
                self.struck["adopted"] += router.dispatcher.requests.counters.adopted
                self.struck["moved"] += router.dispatcher.requests.counters.moved
                self.struck["resumed"] += router.dispatcher.requests.counters.resumed

    async def _ask(self, number: int) -> None:
        rng = self.rng
        prompt = [rng.randrange(self.limits.spec.vocab_size) for _ in range(rng.randint(1, 40))]
        await asyncio.sleep(rng.uniform(0, HAPPENING_S / 2))
        temperature, seed = rng.choice([(0.0, 0), (1.0, 5)])
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=rng.randint(1, 40))
        n = rng.choice([1, 1, 1, 3])
        request = GenerateRequest(
            prompt, f"r{number}", temperature=temperature, seed=seed, max_tokens=params.max_tokens, n=n
        )
        if number % 3 == 2:
            request = replace(request, prompt_logprobs=2)
        chance = rng.choice([0.0, 0.0, 0.1])
        answer = await self.cluster.ask(request, lambda: rng.random() < chance)
        each = [replace(params, seed=sequence_seed(seed, index)) for index in range(n)]
        expected = [expected_tokens(prompt, one, self.limits.spec) for one in each]
        if answer.error is not None:
            assert type(answer.error) not in (BatonError, StreamDiverged), f"{answer.error!r}"
            if isinstance(answer.error, Cancelled | AttemptsExhausted | Unreachable):
                assert not self._could_be_served(), f"{answer.error!r}"
            self.struck[f"failed: {type(answer.error).__name__}"] += 1
            return
        assert answer.sequences == dict(enumerate(expected))
        if request.prompt_logprobs is not None:
            of_prompt = expected_prompt_logprobs(prompt, request.prompt_logprobs, self.limits.spec)
            assert answer.ranks_in_prompt == [(position.token_id, position.rank) for position in of_prompt]
        self.struck["finished"] += 1

    def _could_be_served(self) -> bool:
        """Whether a router and a pair of nodes live."""
        roles = {node.role for node in self.cluster.nodes.values()}
        return roles == {Role.PREFILL, Role.DECODE} and not all(r.is_gone for r in self.cluster.routers.values())

    async def _disturb(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, HAPPENING_S))
        match self.rng.randrange(6):
            case 0:
                node = self.cluster.nodes[self.rng.choice(sorted(self.cluster.nodes))]
                self.struck["node killed"] += 1
                self.cluster.kill(node.node_id)
                await asyncio.sleep(self.rng.choice([0.0, 0.5, 2.0]))
                await self.cluster.start(node.node_id)
            case 5:
                self.cut_links(1.0)
            case 1:
                self.struck["records lost"] += 1
                self.cluster.store.up = False
                await self._kill_router()
            case _:
                await self._kill_router()

    def cut_links(self, share: float) -> None:
        """Links of one router break, or those of all of them."""
        cut = self.cluster.cut_links(self.rng.choice([*ROUTERS, ""]), lambda: self.rng.random() < share)
        self.struck["link cut"] += cut

    async def _keep_moving(self) -> None:
        """Streams are moved at all routers meanwhile, if there are other nodes for them."""
        counted: set[object] = set()
        for _ in range(40 * self.moves_streams):
            await asyncio.sleep(self.rng.uniform(0.0, 0.1))
            for router in self.cluster.routers.values():
                requests = router.dispatcher.requests
                if requests not in counted:
                    counted.add(requests)
                    count_moves(requests, self.struck)
                if not router.is_gone:
                    move_streams(self.rng, self.cluster, requests, self.struck)

    async def _kill_router(self) -> None:
        name = self.rng.choice(ROUTERS)
        if self.cluster.routers[name].is_gone:
            return
        self.struck["router killed"] += 1
        await self.cluster.routers[name].kill()
        await asyncio.sleep(self.rng.choice([0.05, 0.5, 2.0]))
        self.cluster.start_router(name)


def test_each_token_comes_once_whichever_router_dies() -> None:
    struck: Counter[str] = Counter()
    for seed in SEEDS:
        with named_seed(seed):
            run_virtually(Schedule(seed, struck).run())
    if NUM_SCHEDULES >= 40 and len(SEEDS) > 1:
        for name in (
            "router killed",
            "node killed",
            "link cut",
            "records lost",
            "adopted",
            "moved",
            "resumed",
            "stream moved",
        ):
            assert struck[name], struck
        assert struck["finished"] > 2 * NUM_SCHEDULES, struck


class Flaps(Schedule):
    """No process dies: links between routers and nodes break repeatedly, and some clients change their router."""

    moves_streams = False

    def __init__(self, seed: int, struck: Counter[str]) -> None:
        super().__init__(seed, struck)
        self.limits = replace(self.limits, orphan_grace_s=10.0, num_blocks=128)
        self.had_when_placed_again: list[int] = []
        """Tokens that each request had of which there was another attempt."""
        self.computed_again: Counter[str] = Counter()
        """Causes of attempts that computed a prompt again at the router to which its client listens."""

    async def _ask(self, number: int) -> None:
        for router in self.cluster.routers.values() if number == 0 else ():
            router.dispatcher.requests.on_retry.add(partial(self._placed_again, router.dispatcher))
        await super()._ask(number)

    def _placed_again(self, dispatcher: Dispatcher, request_id: str, attempt: int, cause: str) -> None:
        run = dispatcher.requests.find(request_id)
        assert run is not None
        self.had_when_placed_again.append(run.flight.num_output_tokens)
        found = [router.dispatcher.requests.find(request_id) for router in self.cluster.routers.values()]
        # A router that its client has left may not know that yet, since its links are cut, too.
        if run.flight.takeover == max(one.flight.takeover for one in found if one is not None):
            self.computed_again[cause] += cause not in COMPUTE_NOTHING_AGAIN

    async def _disturb(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            await asyncio.sleep(self.rng.uniform(0, HAPPENING_S))
            self.cut_links(self.rng.choice([0.5, 1.0]))

    async def run(self) -> None:
        await super().run()
        for router in self.cluster.routers.values():
            counters = router.dispatcher.requests.counters
            self.struck["links back"] += counters.links_back
            self.struck["not kept"] += counters.attempts[AttemptCause.NOT_KEPT]
        assert not +self.computed_again, "a prompt was computed again, and everybody lives"
        assert max(self.had_when_placed_again, default=0) <= 1, "a decode node had brought tokens, and lives"


COMPUTE_NOTHING_AGAIN = {AttemptCause.FIRST.value, AttemptCause.NOT_KEPT.value}
"""Causes of attempts that repeat no computation: what was sent as a link was cut did not arrive."""


def test_links_that_are_cut_while_both_ends_live_cost_no_prompt() -> None:
    struck: Counter[str] = Counter()
    for seed in SEEDS:
        with named_seed(seed):
            run_virtually(Flaps(seed, struck).run())
    if NUM_SCHEDULES >= 40 and len(SEEDS) > 1:
        assert struck["links back"] > NUM_SCHEDULES, struck
        assert struck["not kept"] < struck["links back"] / 20, struck
        assert struck["finished"] > 2 * NUM_SCHEDULES, struck
