"""Schedules of faults in which nodes pull the beginnings of prompts from each other's prefix caches, in virtual time.

Any node pulls from any other one, which may die, stop, forget the blocks or never have had them. `test_fault_schedules`
says what holds and how a seed is repeated.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from baton.messages.ids import AttemptKey
from baton.messages.node import HeldPrefix, Leg, RouterMessage, Submit
from baton.node.attempts.submit_check import engine_request
from tests.fault.test_fault_schedules import Schedule
from tests.support.seeds import drawn_seeds, named_seed
from tests.support.simulated_cluster import BLOCK_SIZE, SimulatedCluster, SimulatedLimits, SimulatedNode
from tests.support.virtual_time import run_virtually

NUM_SCHEDULES = int(os.environ.get("BATON_FAULT_SCHEDULES", "60"))
PER_TEST = 60
HAPPENS = {
    *("kill", "stop", "link cut", "one way", "reads frozen", "cancel", "finished after a failover"),
    *("pulled behind own blocks", "pulled by a prefill node", "pulled by a decode node"),
    "pull ended: peer_gone",
}
"""Events that each sixty of schedules must contain at least once."""


class PullingCluster(SimulatedCluster):
    """A cluster whose router names, for each prompt, a node that may have its beginning."""

    rng: Random

    async def start(self, node_id: str) -> SimulatedNode:
        node = await super().start(node_id)
        for other in self.nodes.values():
            if other is not node:
                node.intake.holders.meet(other.description.as_peer)
                other.intake.holders.meet(node.description.as_peer)
        return node

    def readdressed(self, node: SimulatedNode, message: RouterMessage) -> RouterMessage:
        if not isinstance(message, Submit) or message.leg is Leg.DECODE:
            return message
        others = [self.nodes[name] for name in sorted(self.nodes) if name != node.node_id]
        if not others:
            return message
        request = engine_request(message, frozenset())
        best = max(others, key=lambda other: self._num_cached(other, request.request_id, message))
        num_tokens = self._num_cached(best, request.request_id, message)
        if self.rng.random() < 0.2:
            # What the router knows is old.
            best, num_tokens = self.rng.choice(others), num_tokens + BLOCK_SIZE
        return replace(message, held_prefix=HeldPrefix(best.description.as_peer, num_tokens)) if num_tokens else message

    @staticmethod
    def _num_cached(node: SimulatedNode, request_id: str, submit: Submit) -> int:
        manager = node.scheduler.kv_cache_manager
        return manager.get_computed_blocks(engine_request(submit, frozenset()), with_host=False).num_tokens


class PullSchedule(Schedule):
    """Requests that begin alike, one after the other, so that each finds what the ones before have left."""

    cluster_type = PullingCluster
    happening_s = 6.0
    num_requests = 6, 12
    num_prefix_tokens = 30

    def _draw_limits(self, seed: int) -> SimulatedLimits:
        limits = replace(super()._draw_limits(seed), prefill_block_size=BLOCK_SIZE)
        # The longest request fits on every node.
        return replace(limits, num_prefill_blocks=self.rng.choice([24, 48]), num_blocks=self.rng.choice([24, 48]))

    def _pair(self) -> tuple[str, str] | None:
        nodes = [node.incarnation for _, node in sorted(self.cluster.nodes.items())]
        first, second = self.rng.sample(nodes, 2) if len(nodes) > 1 else ("", "")
        return (first, second) if first else None

    def _count(self, node: SimulatedNode) -> None:
        super()._count(node)
        begun: set[AttemptKey] = set()
        for event in node.log.after(0):
            if event.name == "pull_begun":
                begun.add(event.attempt)
                self.struck["pulled behind own blocks"] += event.value > 0
            elif event.attempt in begun and event.name == "kv_arrived":
                self.struck["pulled"] += 1
                self.struck[f"pulled by a {node.role.value} node"] += 1
            elif event.attempt in begun and event.name == "kv_failed":
                self.struck[f"pull ended: {event.detail}"] += 1


SEEDS = drawn_seeds(NUM_SCHEDULES)
LINK_ENDS_IN_A_PROBE = 1263
"""In this schedule a link for pulls ends while a probe's read runs, which only another link brings to its end."""


@pytest.mark.parametrize("first", SEEDS[::PER_TEST])
def test_what_is_pulled_changes_no_token_and_every_block_comes_back(first: int) -> None:
    struck: Counter[str] = Counter()
    seeds = range(first, min(first + PER_TEST, SEEDS.stop))
    for seed in (*seeds, LINK_ENDS_IN_A_PROBE):
        with named_seed(seed):
            run_virtually(PullSchedule(seed, struck).run())
    if len(seeds) == PER_TEST:
        assert not [what for what in HAPPENS if not struck[what]]
