"""The fault schedules of test_fault_schedules.py with adapters: loads fail or take long, and names move in between.

`BATON_ADAPTER_SCHEDULES=1000` runs that many.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from baton.messages.adapters import AdapterSource
from baton.messages.generation import GenerateRequest
from baton.messages.sampling import SamplingParams
from baton.model_formats.adapters import open_adapter
from baton.node.adapters.adapter_cache import AdapterFault
from baton.node.adapters.adapter_threads import AdapterThreads
from baton.registry import DesiredState
from baton.registry.desired import NamedAdapter
from router.operations.adapters import ClusterAdapters
from router.operations.cluster_events import EventRing
from router.timers import LoopTimers
from tests.doubles.fake_adapter_threads import FakeAdapterThreads
from tests.fault.test_fault_schedules import Schedule
from tests.support.adapter_files import write_simple_adapter
from tests.support.simulated_cluster import Answer, SimulatedCluster, SimulatedLimits, SimulatedNode
from tests.support.simulated_oracle import expected_tokens
from tests.support.virtual_time import run_virtually

NUM_SCHEDULES = int(os.environ.get("BATON_ADAPTER_SCHEDULES", "30"))
NAMES = ("one", "two", "three")


class _Threads(FakeAdapterThreads):
    """Loads adapters into a simulated node's runner a little later, and sometimes in vain."""

    def __init__(self, node: SimulatedNode, rng: Random, struck: Counter[str], found: Mapping[str, str]) -> None:
        super().__init__()
        self._node = node
        self._rng = rng
        self._struck = struck
        self.found |= found

    def load(self, digest: str, directory: str, done: Callable[[AdapterFault | None], None]) -> None:
        def end() -> None:
            if self._rng.random() < 0.1:
                self._struck["a load failed"] += 1
                done(AdapterFault("its files changed", may_pass=self._rng.random() < 0.5))
            else:
                self._struck["a load"] += 1
                self._node.runner.adapters.load(Path(directory), digest)
                done(None)
            self._node.driver.wake()

        self._node.machine.wake(f"load-{digest}", end, self._rng.choice([0.001, 0.05, 1.0]))

    async def find_fault(self, directory: str, digest: str) -> AdapterFault | None:
        await asyncio.sleep(self._rng.choice([0.001, 0.2]))
        await self._node.machine.running()
        return await super().find_fault(directory, digest)


class AdapterCluster(SimulatedCluster):
    """A cluster whose nodes have adapters in their directories, and whose router gives them names."""

    def __init__(self, struck: Counter[str], sources: Sequence[AdapterSource], *args: Any) -> None:
        super().__init__(*args)
        self._struck = struck
        self._sources = sources
        self._adapters = ClusterAdapters(
            self.card.name,
            self.dispatcher.requests,
            self.view,
            self._links,
            LoopTimers(),
            EventRing("router", self.clock.monotonic),
            _never,
            _never,
            self._set_names,
        )
        self.move_names()

    def make_adapter_threads(self, node: SimulatedNode) -> AdapterThreads:
        return _Threads(node, self.rng, self._struck, {source.directory: source.digest for source in self._sources})

    def move_names(self) -> None:
        """Give each name to one of the adapters."""
        chosen = self.rng.sample(self._sources, len(NAMES))
        named = [NamedAdapter(replace(source, name=name)) for name, source in zip(NAMES, chosen, strict=True)]
        self._adapters.take_desired(DesiredState(adapters=frozenset(one.text for one in named)))

    def _set_names(self, names: Mapping[str, AdapterSource]) -> None:
        self.card = replace(self.card, adapters=names)


def _never(*_: Any) -> Any:
    raise AssertionError("no operator gives commands here")


class AdapterSchedule(Schedule):
    """A schedule whose requests name adapters, or the base model."""

    def __init__(self, seed: int, struck: Counter[str], sources: Sequence[AdapterSource]) -> None:
        super().__init__(seed, struck)
        self.cluster_type = partial(AdapterCluster, struck, sources)  # type: ignore[assignment]

    def _draw_limits(self, seed: int) -> SimulatedLimits:
        limits = super()._draw_limits(seed)
        return replace(limits, max_loras=self.rng.choice([1, 2]), max_cpu_loras=self.rng.choice([1, 2, 4]))

    async def _ask(self, number: int) -> None:
        await asyncio.gather(*(self._ask_one(f"r{number}-{part}") for part in range(2)))

    async def _ask_one(self, request_id: str) -> None:
        rng = self.rng
        await asyncio.sleep(rng.uniform(0, self.happening_s))
        prompt = rng.choice(self.prefixes) + self._tokens(rng.randint(1, 20))
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 12))
        name = rng.choice(["", *NAMES])
        request = GenerateRequest(prompt, request_id, model=name, temperature=0.0, seed=0, max_tokens=params.max_tokens)
        source = self.cluster.card.adapters.get(name)
        digest = source.digest if source is not None else ""
        answering = asyncio.create_task(self._answer(request, rng.choice([None, None, rng.uniform(0.01, 4.0)])))
        await asyncio.sleep(0)
        if rng.random() < 0.2:
            self._move_names()
        if rng.random() < 0.2:
            await asyncio.sleep(rng.expovariate(5.0))
            if not answering.done():
                self._leave(request_id)
        answer = await answering
        self._judge(answer, [expected_tokens(prompt, params, self.limits.spec, digest)])
        if answer.finished is not None and digest:
            self.struck["an adapter's tokens"] += 1
            self.struck["an adapter's tokens after a failover"] += answer.finished.path.attempts > 1
            moved = self.cluster.card.adapters[name].digest != digest
            self.struck["an adapter's tokens though its name had moved"] += moved

    async def _answer(self, request: GenerateRequest, timeout_s: float | None) -> Answer:
        return await self.cluster.generate(request, timeout_s)

    def _move_names(self) -> None:
        assert isinstance(self.cluster, AdapterCluster)
        self.cluster.move_names()


@pytest.fixture
def sources(tmp_path: Path) -> Sequence[AdapterSource]:
    """More adapters than names."""
    directories = [write_simple_adapter(tmp_path / str(seed), seed) for seed in range(5)]
    return [AdapterSource("", str(directory), open_adapter(directory).digest()) for directory in directories]


def test_no_request_has_tokens_of_another_adapter_and_every_block_comes_back(sources: Sequence[AdapterSource]) -> None:
    struck: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        try:
            run_virtually(AdapterSchedule(seed, struck, sources).run())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert struck["an adapter's tokens"] > NUM_SCHEDULES
    assert struck["an adapter's tokens after a failover"]
    assert struck["an adapter's tokens though its name had moved"]
    assert struck["a load"] > NUM_SCHEDULES
    assert struck["a load failed"]
