"""Nodes of two versions of one model behind two routers, in virtual time: other weights under the same name.

Nodes and routers die in mid-stream, and nodes come back with the other version. Each stream has the tokens of one
version alone, and ends whole or with an error that says why. A change of version by the documented steps ends none.

`BATON_VERSION_SCHEDULES=1000` runs that many schedules, `BATON_FAULT_SEED=N` one of them alone.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

from baton.engine.sequences.sequence_group import sequence_seed
from baton.errors import AttemptsExhausted, BatonError, TransferFailed, Unreachable, VersionGone
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.registry import DesiredState
from baton.runner import SimulatedSpec
from baton.runner.simulated import SimulatedRunner
from router.placement.versions import PASSES_OVER_AFTER_S
from tests.doubles.faulty_transfer_backend import Faults
from tests.support.seeds import drawn_seeds, named_seed
from tests.support.simulated_cluster import Answer, SimulatedCluster, SimulatedLimits, SimulatedNode, simulated_cluster
from tests.support.simulated_oracle import expected_tokens
from tests.support.simulated_routers import RoutedCluster
from tests.support.virtual_time import run_virtually

SEEDS = drawn_seeds(int(os.environ.get("BATON_VERSION_SCHEDULES", "20")))
HAPPENING_S = 1.0
PATIENCE_S = 400.0
ROUTERS = ("router-a", "router-b")
NODES = ("decode-1", "prefill-1", "decode-0", "prefill-0")
NEW_VOCABULARY = 89
"""Simulated tokens are taken modulo the size of the vocabulary."""


TYPED = {VersionGone, AttemptsExhausted, TransferFailed, Unreachable}
"""How streams may end whose nodes or routers die."""


def spec_of(limits: SimulatedLimits, *, is_new: bool) -> SimulatedSpec:
    return replace(limits.spec, vocab_size=NEW_VOCABULARY) if is_new else limits.spec


class NewNode(SimulatedNode):
    """A node of the new version."""

    def _make_runner(self, limits: SimulatedLimits) -> SimulatedRunner:
        return SimulatedRunner(spec_of(limits, is_new=True))


class TwoVersions(RoutedCluster):
    """A cluster whose nodes are started in one of two versions, with two routers."""

    def __init__(self, limits: SimulatedLimits, rng: Random, faults: Callable[[], Faults]) -> None:
        super().__init__(limits, rng, faults)
        self.new: set[str] = set()
        """The names of the nodes whose next incarnation is of the new version."""
        self.make_node = self._make_node

    def _make_node(self, cluster: SimulatedCluster, node_id: str, run: int, faults: Faults) -> SimulatedNode:
        return (NewNode if node_id in self.new else SimulatedNode)(cluster, node_id, run, faults)

    def cordon(self, *names: str) -> None:
        """Cordon these nodes and no others."""
        for router in self.routers.values():
            router.view.desired(DesiredState(cordoned=frozenset(names)))

    async def wait_until_unused(self, node: SimulatedNode) -> None:
        """Return when nothing of any router is left on the node, as `baton drain` does."""
        for _ in range(int(PATIENCE_S / 0.05)):
            statuses = [status for router in self.routers.values() for status in router.view.statuses(0.0, 0.0)]
            in_flight = sum(status.in_flight for status in statuses if status.incarnation == node.incarnation)
            if node.is_idle and not in_flight:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{node.incarnation} is still in use")


class Clients:
    """Sends requests, and compares each answer with those of both versions."""

    def __init__(self, cluster: TwoVersions, rng: Random, struck: Counter[str]) -> None:
        self._cluster = cluster
        self._rng = rng
        self._struck = struck
        self.errors: list[BatonError] = []
        self.versions: list[int] = []
        """The version of each whole answer, in the order of their ends."""

    async def ask(self, name: str) -> None:
        rng = self._rng
        prompt = [rng.randrange(NEW_VOCABULARY) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(temperature=1.0, seed=rng.randrange(99), max_tokens=rng.randint(20, 50))
        n = rng.choice([1, 1, 1, 3])
        request = GenerateRequest(prompt, name, temperature=1.0, seed=params.seed, max_tokens=params.max_tokens, n=n)
        chance = rng.choice([0.0, 0.0, 0.05])
        answer = await self._cluster.ask(request, lambda: rng.random() < chance)
        each = [replace(params, seed=sequence_seed(params.seed, index)) for index in range(n)]
        wholes = [
            [expected_tokens(prompt, one, spec_of(self._cluster.limits, is_new=is_new)) for one in each]
            for is_new in (False, True)
        ]
        self._judge(answer, wholes)

    def _judge(self, answer: Answer, wholes: list[list[list[int]]]) -> None:
        fitting = [
            version
            for version, expected in enumerate(wholes)
            if all(tokens == expected[index][: len(tokens)] for index, tokens in answer.sequences.items())
        ]
        assert fitting, "a stream has tokens of two versions"
        self._struck["ended behind tokens"] += any(answer.sequences.values()) and answer.error is not None
        if answer.error is not None:
            assert type(answer.error) in TYPED, repr(answer.error)
            self._struck[type(answer.error).__name__] += 1
            self.errors.append(answer.error)
            return
        version = next(one for one in fitting if answer.sequences == dict(enumerate(wholes[one])))
        self.versions.append(version)
        assert answer.finished is not None
        self._struck["finished"] += 1
        self._struck["finished after a failover"] += answer.finished.path.attempts > 1


class Schedule:
    """Requests, and nodes and routers that die under them, all drawn from one seed."""

    def __init__(self, seed: int, struck: Counter[str]) -> None:
        self.rng = Random(seed)
        self.struck = struck

    async def run(self) -> None:
        rng = self.rng
        limits = SimulatedLimits(
            num_blocks=96, on_transfer_failure=rng.choice(["reroute", "recompute"]), orphan_grace_s=10.0
        )
        async with simulated_cluster(rng, prefill=0, decode=0, limits=limits, cluster=TwoVersions) as made:
            assert isinstance(made, TwoVersions)
            made.new.update(name for name in NODES if rng.random() < 0.5)
            for name in NODES:
                await made.start(name)
            for name in ROUTERS:
                made.start_router(name)
            clients = Clients(made, rng, self.struck)
            asking = [asyncio.create_task(self._ask(clients, number)) for number in range(rng.randint(3, 5))]
            await asyncio.gather(*(self._kill(made) for _ in range(rng.randint(1, 3))))
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*asking)
            await made.wait_until_idle(PATIENCE_S)
            for node in made.nodes.values():
                node.assert_nothing_is_left()

    async def _ask(self, clients: Clients, number: int) -> None:
        await asyncio.sleep(self.rng.uniform(0, HAPPENING_S / 2))
        await clients.ask(f"r{number}")

    async def _kill(self, made: TwoVersions) -> None:
        rng = self.rng
        await asyncio.sleep(rng.uniform(0, HAPPENING_S))
        for _ in range(100):
            if any(router.dispatcher.requests.num_live_tokens for router in made.routers.values()):
                break
            await asyncio.sleep(0.01)
        self.struck["kill"] += 1
        if rng.random() < 0.25:
            name = rng.choice(ROUTERS)
            if not made.routers[name].is_gone:
                await made.routers[name].kill()
                await asyncio.sleep(rng.choice([0.05, 0.5]))
                made.start_router(name)
            return
        names, is_new = sorted(made.nodes), rng.choice([False, True])
        of_version = [name for name in names if (name in made.new) is is_new]
        killed = of_version if rng.random() < 0.5 else [rng.choice(names)] if names else []
        becomes_other = rng.random() < 0.5
        for name in killed:
            made.kill(name)
        await asyncio.sleep(rng.choice([0.0, 0.5, 2.0]))
        for name in killed:
            made.new ^= {name} if becomes_other else set()
            await made.start(name)


def test_no_stream_has_tokens_of_two_versions() -> None:
    struck: Counter[str] = Counter()
    for seed in SEEDS:
        with named_seed(seed):
            run_virtually(Schedule(seed, struck).run())
    if len(SEEDS) > 1:
        assert struck["finished after a failover"], "streams go on at nodes of their version"
        assert struck["VersionGone"], "streams end where no such node is left"


async def change_version(made: TwoVersions, clients: Clients) -> None:
    """Replace one node after the other by one of the new version, as docs/deploy.md says."""
    for name in NODES:
        node = made.nodes[name]
        made.cordon(name)
        await made.wait_until_unused(node)
        made.kill(name)
        made.new.add(name)
        await made.start(name)
        made.cordon()
        await asyncio.sleep(1.0)


async def rolling_change(rng: Random, struck: Counter[str]) -> None:
    limits = SimulatedLimits(num_blocks=96)
    async with simulated_cluster(rng, prefill=0, decode=0, limits=limits, cluster=TwoVersions) as made:
        assert isinstance(made, TwoVersions)
        for name in NODES:
            await made.start(name)
        for name in ROUTERS:
            made.start_router(name)
        # Routers have seen the old version for so long that they pass over to no other one at once.
        await asyncio.sleep(PASSES_OVER_AFTER_S + 1.0)
        clients, is_over = Clients(made, rng, struck), False

        async def keep_asking(client: int) -> None:
            number = 0
            while not is_over:
                number += 1
                await clients.ask(f"c{client}-{number}")

        asking = [asyncio.create_task(keep_asking(client)) for client in range(6)]
        async with asyncio.timeout(PATIENCE_S):
            await change_version(made, clients)
            is_over = True
            await asyncio.gather(*asking)
        assert not clients.errors
        assert set(clients.versions) == {0, 1}
        clients.versions.clear()
        await clients.ask("last")
        assert clients.versions == [1]


def test_a_change_of_version_by_the_documented_steps_ends_no_stream() -> None:
    struck: Counter[str] = Counter()
    run_virtually(rolling_change(Random(7), struck))
