"""Schedules of lost, stopped and continued ranks, drawn from seeds, over a whole cluster in virtual time.

The nodes have shapes: stages of layers, and ranks in each stage. A rank is lost before, in or after a step, at an event
of a hand-off, while its node joins or drains, or after so long without heartbeats. Its incarnation then ends and
answers nothing more. As in test_fault_schedules.py each request ends once and right, and every block of every node is
free in the end; `BATON_FAULT_SEED=N` runs one schedule alone, `BATON_RANK_SCHEDULES=1000` a thousand.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import fields

import pytest

from baton.errors import Cancelled, DeadlineExceeded, TransferFailed, WouldBeLate
from baton.messages.ids import AttemptKey
from baton.messages.node import Role
from baton.messages.node_model import NodeShape
from baton.messages.node_report import TraceEvent
from tests.doubles.fake_ranked_runner import LossMoment
from tests.fault.test_fault_schedules import PATIENCE_S, Schedule
from tests.support.seeds import drawn_seeds, named_seed
from tests.support.simulated_cluster import Answer, simulated_cluster
from tests.support.simulated_ranks import RankedCluster, RankedLimits, RankedNode
from tests.support.virtual_time import run_virtually

NUM_SCHEDULES = int(os.environ.get("BATON_RANK_SCHEDULES", "60"))
PER_TEST = 60
SHAPES = [NodeShape(), NodeShape(tp=2), NodeShape(pp=2), NodeShape(tp=2, pp=2), NodeShape(tp=4)]
EVENTS = {
    Role.PREFILL: ["scheduled", "chunk_computed", "lease_granted", "offered", "closing_offered", "read_progress"],
    Role.DECODE: ["expected", "offer_received", "confirmed", "remote_kv_arrived", "first_token", "preempted", "abort"],
}
"""Events at which a rank is lost."""
HAPPENS = {
    *("lost before a step", "lost in a step", "lost after a step", "lost at an event"),
    *("lost just when it joined", "lost while it drained", "lost rank 1 sends no heartbeats", "a stopped rank went on"),
    *("lost while it computed", "lost while a request waited", "lost while it was idle", "lost with leases"),
    *("link cut", "one way", "cut from the router", "reads frozen"),
    *("lost while it was read", "lost while it read", "finished after a failover"),
}
"""Events that the schedules of a test must contain at least once."""
FOLLOWS = {
    "scheduled": "queued",
    "chunk_computed": "scheduled",
    "first_token": "scheduled",
    "remote_kv_arrived": "kv_arrived",
    "offered": "lease_granted",
    "closing_offered": "offered",
    "read_progress": "offered",
    "offer_received": "expected",
    "confirmed": "offer_received",
    "kv_arrived": "confirmed",
}
"""Events that come only after another event of the same attempt on the same node."""
ONCE = {"lease_granted", "closing_offered", "kv_arrived", "expected", "finished"}
COMPUTES = {"scheduled", "chunk_computed", "first_token", "preempted"}
"""Events that do not come after the sequence has finished."""


def broken_rules(logs: Mapping[str, Sequence[TraceEvent]]) -> list[str]:
    """The rules that the events of all incarnations break, each with its incarnation, attempt and event."""
    attempts = {incarnation: _by_attempt(events) for incarnation, events in logs.items()}
    found = [
        f"{incarnation} {attempt}: {broken}"
        for incarnation, of_node in attempts.items()
        for attempt, events in of_node.items()
        for broken in _broken_on_a_node(events)
    ]
    closed = {
        attempt
        for of_node in attempts.values()
        for attempt, events in of_node.items()
        if any(event.name == "closing_offered" for event in events)
    }
    for incarnation, of_node in attempts.items():
        for attempt, events in of_node.items():
            if any(event.name == "kv_arrived" for event in events) and attempt not in closed:
                found.append(f"{incarnation} {attempt}: its KV arrived, and nobody has offered all of it")
    return found


def _by_attempt(events: Sequence[TraceEvent]) -> Mapping[AttemptKey, list[TraceEvent]]:
    found: defaultdict[AttemptKey, list[TraceEvent]] = defaultdict(list)
    for event in events:
        found[event.attempt].append(event)
    return found


def _broken_on_a_node(events: Sequence[TraceEvent]) -> Iterator[str]:
    seen: set[str] = set()
    finished: set[str] = set()
    for event in events:
        name, sequence = event.name, event.detail if event.detail.startswith("sequence") else ""
        if name in FOLLOWS and FOLLOWS[name] not in seen:
            yield f"{name} before {FOLLOWS[name]}"
        if name in ONCE and (name, sequence) in {(one, sequence) for one in seen & ONCE} and name != "finished":
            yield f"{name} twice"
        if sequence in finished and name in COMPUTES | {"finished"}:
            yield f"{name} after the end"
        if name == "finished":
            finished.add(sequence)
        seen.add(name)


class RankSchedule(Schedule):
    """One cluster of nodes with ranks, a few requests, and the losses of ranks meanwhile."""

    limits: RankedLimits
    happening_s = 1.5

    def _draw_limits(self, seed: int) -> RankedLimits:
        drawn = super()._draw_limits(seed)
        same = {field.name: getattr(drawn, field.name) for field in fields(drawn)}
        return RankedLimits(**same, prefill_shape=self.rng.choice(SHAPES), decode_shape=self.rng.choice(SHAPES[1:]))

    async def run(self) -> None:
        rng = self.rng
        sizes = {"prefill": rng.randint(1, 2), "decode": rng.randint(1, 2)}
        async with simulated_cluster(
            rng, **sizes, limits=self.limits, faults=self.faults, cluster=RankedCluster
        ) as cluster:
            assert isinstance(cluster, RankedCluster)
            self.cluster = self.ranked = cluster
            asking = [asyncio.create_task(self._ask(number)) for number in range(rng.randint(3, 7))]
            await asyncio.gather(*(self._disturb() for _ in range(rng.randint(1, 3))))
            cluster.heal()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*asking)
            cluster.disarm()
            await cluster.wait_until_settled(PATIENCE_S)
            await cluster.wait_until_idle(PATIENCE_S)
            for node in cluster.nodes.values():
                node.assert_nothing_is_left()
                self._count(node)
            assert cluster.dispatcher.requests.num_live == 0
            self.struck.update(cluster.losses)
            everybody = [*cluster.ended, *cluster.nodes.values()]
            assert not [node.crashes for node in everybody if node.crashes]
            assert not broken_rules({node.incarnation: node.log.after(0) for node in everybody})

    def _judge(self, answer: Answer, expected: list[list[int]]) -> None:
        super()._judge(answer, expected)
        if answer.error is None or isinstance(answer.error, Cancelled | DeadlineExceeded | WouldBeLate):
            return
        if isinstance(answer.error, TransferFailed) and self.limits.on_transfer_failure == "fail":
            return
        assert "attempts failed" in str(answer.error), f"{answer.error!r}"
        self.struck["attempts exhausted"] += 1

    async def _disturb(self) -> None:
        acts: list[Callable[[], Awaitable[None]]] = [
            self._lose_at_a_step,
            self._lose_at_a_step,
            self._lose_at_an_event,
            self._lose_now,
            self._lose_while_it_joins,
            self._lose_while_it_drains,
            self._stop_a_rank,
            self._stop_a_rank,
            self._cut_the_links,
            self._cut_the_links,
            super()._disturb,
        ]
        act = self.rng.choice(acts)
        await asyncio.sleep(self.rng.uniform(0, self.happening_s / 3))
        await act()

    def _any_node_with_ranks(self) -> RankedNode | None:
        nodes = [node for _, node in sorted(self.ranked.nodes.items()) if node.runner.shape.num_ranks > 1]
        return self.rng.choice(nodes) if nodes else None

    def _any_rank_of(self, node: RankedNode) -> int:
        return self.rng.randrange(1, node.runner.shape.num_ranks)

    async def _lose_now(self) -> None:
        if (node := self._any_node_with_ranks()) is not None:
            node.lose_ranks("rank 1 was ended by SIGKILL")

    async def _lose_at_a_step(self) -> None:
        if (node := self._any_node_with_ranks()) is not None:
            moment = self.rng.choice([LossMoment.BEFORE, LossMoment.IN, LossMoment.IN, LossMoment.AFTER])
            node.runner.lose_at_step(self.rng.randint(0, 4), moment, self._any_rank_of(node), f"{moment.value} a step")

    async def _lose_at_an_event(self) -> None:
        if (node := self._any_node_with_ranks()) is not None:
            event = self.rng.choice(EVENTS[node.role])
            node.log.strike_at(event, lambda: node.lose_ranks("at an event"))

    async def _cut_the_links(self) -> None:
        """Cut what connects a node of several ranks: they have one stream to the router and one link to each peer."""
        cut = self.rng.choice([self._cut_a_link, self._hold_one_way, self._cut_from_router, self._freeze_reads])
        await cut()

    async def _lose_while_it_joins(self) -> None:
        if (node := self._any_node_with_ranks()) is None:
            return
        self.ranked.kill(node.node_id)
        await asyncio.sleep(self.rng.choice([0.0, 0.5]))
        joins = await self.ranked.start(node.node_id)
        await asyncio.sleep(self.rng.choice([0.0, 0.001, 0.01, 0.1]))
        joins.lose_ranks("just when it joined")

    async def _lose_while_it_drains(self) -> None:
        if (node := self._any_node_with_ranks()) is None:
            return
        node.stop.drain()
        await asyncio.sleep(self.rng.choice([0.0, 0.05, 0.5]))
        node.lose_ranks("while it drained")

    async def _stop_a_rank(self) -> None:
        if (node := self._any_node_with_ranks()) is None:
            return
        node.stop_rank(self._any_rank_of(node))
        await asyncio.sleep(self.rng.uniform(0.1, 9.0))
        self.struck["a stopped rank went on"] += node.is_stuck and not node.machine.is_gone
        node.continue_rank()


SEEDS = drawn_seeds(NUM_SCHEDULES)


@pytest.mark.parametrize("first", SEEDS[::PER_TEST])
def test_every_request_ends_once_whichever_rank_is_lost(first: int) -> None:
    struck: Counter[str] = Counter()
    seeds = range(first, min(first + PER_TEST, SEEDS.stop))
    for seed in seeds:
        with named_seed(seed):
            run_virtually(RankSchedule(seed, struck).run())
    if len(seeds) == PER_TEST:
        assert not [happening for happening in HAPPENS if not struck[happening]], struck
        assert struck["finished"] > 2 * PER_TEST, struck
        assert struck["attempts exhausted"] < PER_TEST / 10, struck
