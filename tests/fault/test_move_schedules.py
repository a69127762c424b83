"""Schedules of faults in which streams are moved between decode nodes, in virtual time.

Prompts are pulled meanwhile, too. Moves begin at any moment of a stream, and nodes die, stop, are cut off or read slowly meanwhile. `test_fault_schedules`
says what holds and how a seed is repeated.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from dataclasses import replace

import pytest

from baton.messages.node import Role
from router.flight.active_request import ActiveRequest
from router.flight.flight_table import MoveEnded, MoveTo, StopMove
from tests.fault.test_fault_schedules import Schedule
from tests.fault.test_pull_schedules import PullingCluster
from tests.support.seeds import drawn_seeds, named_seed
from tests.support.simulated_cluster import BLOCK_SIZE, SimulatedLimits, SimulatedNode
from tests.support.virtual_time import run_virtually

NUM_SCHEDULES = int(os.environ.get("BATON_FAULT_SCHEDULES", "60"))
PER_TEST = 60
HAPPENS = {
    *("kill", "stop", "link cut", "one way", "reads frozen", "cancel", "finished after a failover"),
    *("moved", "stayed", "over", "stopped", "moved twice"),
}
"""Events that each sixty of schedules must contain at least once."""


class MoveSchedule(Schedule):
    """Requests whose streams are moved over and over again."""

    cluster_type = PullingCluster
    happening_s = 4.0
    num_requests = 4, 8
    longest_output = 40

    def _draw_limits(self, seed: int) -> SimulatedLimits:
        limits = replace(super()._draw_limits(seed), prefill_block_size=BLOCK_SIZE)
        return replace(limits, num_prefill_blocks=self.rng.choice([24, 48]), num_blocks=self.rng.choice([24, 48]))

    def _draw_kinds(self) -> tuple[int, int]:
        return 1, self.rng.randint(2, 3)

    def _pair(self) -> tuple[str, str] | None:
        nodes = [node.incarnation for _, node in sorted(self.cluster.nodes.items())]
        first, second = self.rng.sample(nodes, 2) if len(nodes) > 1 else ("", "")
        return (first, second) if first else None

    async def _disturb(self) -> None:
        moving = asyncio.create_task(self._move_streams())
        try:
            await super()._disturb()
        finally:
            await moving

    async def _move_streams(self) -> None:
        requests = self.cluster.dispatcher.requests
        num_moves: Counter[str] = Counter()

        def note(active: ActiveRequest, ended: MoveEnded) -> None:
            how = "moved" if ended.placement is not None else "stayed" if ended.why else "over"
            self.struck[how] += 1
            num_moves[active.request.request_id] += ended.placement is not None
            self.struck["moved twice"] += num_moves[active.request.request_id] == 2

        requests.on_move_ended.add(note)
        for _ in range(60):
            await asyncio.sleep(self.rng.uniform(0.0, 0.1))
            for active in list(requests.active_requests()):
                decoder = active.flight.decoder
                others = [node for _, node in sorted(self.cluster.nodes.items()) if self._may_take(node, decoder)]
                key = active.flight.moving_to
                if key is not None and self.rng.random() < 0.02:
                    self.struck["stopped"] += 1
                    requests.feed(active, StopMove(key, "the test ends it"))
                elif others:
                    to = self.rng.choice(others).description
                    requests.feed(active, MoveTo(to, self.rng.choice([3, 10, 40])))

    @staticmethod
    def _may_take(node: SimulatedNode, decoder: object) -> bool:
        return node.role is Role.DECODE and node.description is not decoder


SEEDS = drawn_seeds(NUM_SCHEDULES)


@pytest.mark.parametrize("first", SEEDS[::PER_TEST])
def test_a_move_changes_no_token_and_every_block_comes_back(first: int) -> None:
    struck: Counter[str] = Counter()
    seeds = range(first, min(first + PER_TEST, SEEDS.stop))
    for seed in seeds:
        with named_seed(seed):
            run_virtually(MoveSchedule(seed, struck).run())
    if len(seeds) == PER_TEST:
        assert not [what for what in HAPPENS if not struck[what]], struck
