"""Schedules of faults over nodes whose KV cache is in parts.

The parts of a read end at different times and in different ways. Still each request ends once, with the right tokens or
an error, and every block comes back.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from baton.engine.runner import KVMemory
from baton.messages.node import Role
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.digest_definition import DIGEST_MODULUS, BlockDigests
from baton.runner.blocks.sub_blocks import WHOLE, Division
from kv_transfer.mover.part_mover import DeliverEvent
from kv_transfer.mover.parts_mover import OwnPart, PartsMover
from tests.doubles.fake_transfer_backend import FakeTransferFabric
from tests.fault.test_fault_schedules import Schedule
from tests.support.parts_runner import DividedRunner
from tests.support.seeds import drawn_seeds, named_seed
from tests.support.simulated_cluster import SimulatedCluster, SimulatedLimits, SimulatedNode
from tests.support.virtual_time import run_virtually

NUM_SCHEDULES = int(os.environ.get("BATON_FAULT_SCHEDULES", "40"))
LAYERS = {Role.PREFILL: (range(1), range(1, 3)), Role.DECODE: (range(2), range(2, 3))}
"""Three pairs of parts have layers in common."""


class PartsFabric(FakeTransferFabric):
    """A fabric on which what happens to a node happens to the agents of all its parts."""

    def _parts(self, incarnation: str) -> Sequence[str]:
        return [name for name in self._agents if name.partition("/")[0] == incarnation]

    def kill(self, incarnation: str) -> None:
        for name in self._parts(incarnation):
            super().kill(name)

    def freeze(self, incarnation: str) -> None:
        for name in self._parts(incarnation):
            super().freeze(name)

    def thaw(self, incarnation: str) -> None:
        for name in self._parts(incarnation):
            super().thaw(name)


class DividedNode(SimulatedNode):
    """A node in parts, whose movers are all in its process."""

    runner: DividedRunner

    def _make_runner(self, limits: SimulatedLimits) -> DividedRunner:
        return DividedRunner(limits.spec_for(self.role), LAYERS[self.role])

    def _make_digests(self) -> BlockDigests:
        each = [block_digests(memory) for memory in self.runner.memories]

        def digests(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
            shares = zip(*(of_part(ids, division) for of_part in each), strict=True)
            return [sum(share) % DIGEST_MODULUS for share in shares]

        return digests

    def _make_mover(self, deliver: DeliverEvent) -> PartsMover:
        def part(number: int, memory: KVMemory) -> OwnPart:
            assert memory.layers is not None
            return OwnPart(memory.layers, partial(self._make_part_mover, number, memory))

        parts = [part(number, memory) for number, memory in enumerate(self.runner.memories)]
        return PartsMover(self.runner.layout, parts, deliver)


class PartsCluster(SimulatedCluster):
    """A cluster of nodes in parts."""

    make_node = DividedNode

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.fabric = PartsFabric(sender_must_pump=True)


class PartsSchedule(Schedule):
    """A schedule over nodes in parts."""

    cluster_type = PartsCluster

    def _draw_limits(self, seed: int) -> SimulatedLimits:
        return replace(super()._draw_limits(seed), num_layers=3)


SEEDS = drawn_seeds(NUM_SCHEDULES)


def test_every_request_of_nodes_in_parts_ends_once_and_every_block_comes_back() -> None:
    struck: Counter[str] = Counter()
    for seed in SEEDS:
        with named_seed(seed):
            schedule = PartsSchedule(seed, struck)
            run_virtually(schedule.run())
            for node in schedule.cluster.nodes.values():
                merge = node.half.mover.merge
                assert [*merge._connecting, *merge._reads, *merge._fills] == []
    assert struck["finished with KV of another node"] > struck["finished"] / 2 > 0
    assert struck["digest mismatch"] or len(SEEDS) < 40
