"""Schedules of faults in which streams are moved between decode nodes, in virtual time.

Prompts are pulled meanwhile, too. Moves begin at any moment of a stream, and nodes die, stop, are cut off or read
slowly. `test_fault_schedules` says what holds and how a seed is repeated.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest

from tests.fault.test_pull_schedules import PullSchedule
from tests.support.moved_streams import count_moves, keep_moving
from tests.support.seeds import drawn_seeds, named_seed
from tests.support.virtual_time import run_virtually

NUM_SCHEDULES = int(os.environ.get("BATON_FAULT_SCHEDULES", "60"))
PER_TEST = 60
HAPPENS = {
    *("kill", "stop", "link cut", "one way", "reads frozen", "cancel", "finished after a failover"),
    *("stream moved", "stream stayed", "over before it moved", "move ended", "moved twice", "pulled"),
}
"""Events that each sixty of schedules must contain at least once."""


class MoveSchedule(PullSchedule):
    """Requests whose streams are moved over and over again."""

    happening_s = 4.0
    num_requests = 4, 8
    longest_output = 32
    """Tokens: behind the longest prompt, of 60, they fit in the smallest pool, of 24 blocks."""
    is_counting = False

    def _draw_kinds(self) -> tuple[int, int]:
        return 1, self.rng.randint(2, 3)

    async def _disturb(self) -> None:
        requests = self.cluster.dispatcher.requests
        if not self.is_counting:
            self.is_counting = True
            count_moves(requests, self.struck)
        moving = asyncio.create_task(keep_moving(self.rng, self.cluster, requests, self.struck))
        try:
            await super()._disturb()
        finally:
            await moving


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
