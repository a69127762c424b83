"""A simulated cluster whose nodes have several ranks each, that can be lost, stopped and continued, in virtual time.

A node that loses its ranks ends as `baton.node.serve.Node` does, one part after the other and with pauses between them,
while its peers and routers go on; then its supervisor starts another incarnation. It can also drain.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from baton.engine.runner import RunnerLost
from baton.messages.ids import AttemptKey
from baton.messages.node import NodeDescription, Role
from baton.messages.node_model import ONE_RANK, NodeShape
from baton.node.lifecycle import NodeStop
from baton.node.reports.logs import EventLog
from baton.registry import NodeRecord
from baton.runner import SimulatedSpec
from baton.runner.ranks.heartbeats import INTERVAL_S
from tests.doubles.fake_ranked_runner import FakeRankedRunner
from tests.doubles.faulty_transfer_backend import Faults
from tests.support.simulated_cluster import ENGINE, SimulatedCluster, SimulatedLimits, SimulatedNode

DRAIN_S = 10.0
_MISSED_HEARTBEATS = 10
"""Ranks are lost after so many intervals without a heartbeat of one, as in `RankGroup`."""
_RPC_GRACE_S = 1.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class RankedLimits(SimulatedLimits):
    """Sizes and times of a simulated cluster with ranks."""

    prefill_shape: NodeShape = ONE_RANK
    decode_shape: NodeShape = ONE_RANK

    @property
    def spec(self) -> SimulatedSpec:
        shapes = (self.prefill_shape, self.decode_shape)
        layers = max(shape.pp for shape in shapes)
        heads = max(shape.tp for shape in shapes)
        return self.spec_of(num_layers=layers, num_kv_heads=heads)

    def shape_of(self, role: Role) -> NodeShape:
        return self.prefill_shape if role is Role.PREFILL else self.decode_shape


class _ObservedLog(EventLog):
    """An event log whose newest event strikes whoever waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._strike: Callable[[], None] = lambda: None

    def strike_at(self, name: str, strike: Callable[[], None]) -> None:
        """Call `strike` at the next event with this name."""
        self._name, self._strike = name, strike

    def record(self, name: str, attempt: AttemptKey, value: int = 0, detail: str = "") -> None:
        super().record(name, attempt, value, detail)
        self._note(name)

    def record_at(self, monotonic_s: float, name: str, attempt: AttemptKey, value: int = 0, detail: str = "") -> None:
        super().record_at(monotonic_s, name, attempt, value, detail)
        self._note(name)

    def _note(self, name: str) -> None:
        if name == self._name:
            self._name = ""
            self._strike()


class RankedNode(SimulatedNode):
    """One incarnation of a node with several ranks."""

    log: _ObservedLog
    runner: FakeRankedRunner

    def __init__(self, cluster: RankedCluster, node_id: str, run: int, faults: Faults) -> None:
        self._ranked_cluster = cluster
        self._stopped_rank: int | None = None
        self.stop = NodeStop()
        self.has_left = False
        """Whether it has taken its record out of the registry."""
        super().__init__(cluster, node_id, run, faults)
        self.runner.on_lost(self._ranks_lost)
        self._tasks: list[asyncio.Task[None]] = []

    def _make_log(self) -> EventLog:
        return _ObservedLog()

    def _make_runner(self, limits: SimulatedLimits) -> FakeRankedRunner:
        assert isinstance(limits, RankedLimits)
        return FakeRankedRunner(limits.spec_for(self.role), limits.shape_of(self.role), self._from_another_thread)

    def _describe(self, address: str) -> NodeDescription:
        shape = self.runner.shape
        return replace(super()._describe(address), tp=shape.tp, pp=shape.pp)

    def _from_another_thread(self, call: Callable[[], None]) -> None:
        """Call the function now, a turn later or a moment later."""
        delay = self._ranked_cluster.rng.choice([None, 0.0, 0.015])
        if delay is None:
            call()
        else:
            asyncio.get_running_loop().call_later(delay, call)

    @property
    def is_lost(self) -> bool:
        return bool(self.runner.why_lost)

    @property
    def is_ending(self) -> bool:
        """Whether it has been told to end, or ends because its ranks are lost."""
        return self.stop.requested.is_set()

    @property
    def is_stuck(self) -> bool:
        """Whether its engine waits for a stopped rank."""
        return self._stopped_rank is not None

    @property
    def is_read(self) -> bool:
        """Whether a peer may be reading its memory now."""
        return self.offering.stats().reading > 0

    def _ranks_lost(self, reason: str) -> None:
        if not self.machine.is_gone:
            self._note_loss(reason)
            asyncio.get_running_loop().call_soon(self.stop.force)

    def _note_loss(self, reason: str) -> None:
        stats = self.scheduler.make_stats()
        state = {
            "while it computed": stats.num_running,
            "while a request waited": stats.num_waiting,
            "with leases": stats.leased_blocks,
            "while it was read": self.is_read,
            "while it read": self.intake.mover.figures.reads_in_flight,
            "while it was idle": self.is_idle,
            "while it drained": self.is_ending and not self.stop.forced.is_set(),
            "while a rank was stopped": self.is_stuck,
        }
        self._ranked_cluster.losses.update(
            [f"lost {when}" for when, holds in state.items() if holds] + [f"lost {reason}"]
        )

    def _crashed(self, error: BaseException) -> None:
        if isinstance(error, RunnerLost):
            asyncio.get_running_loop().call_soon(self.stop.force)
        else:
            super()._crashed(error)

    async def start(self) -> None:
        await super().start()
        self._tasks = [
            asyncio.create_task(self._live(), name=f"life-{self.incarnation}"),
            asyncio.create_task(self._watch_ranks(), name=f"ranks-{self.incarnation}"),
        ]

    def lose_ranks(self, reason: str) -> None:
        """End one rank, as SIGKILL does."""
        self.runner.lose(reason, self._stopped_rank)
        self._unstick()

    def disarm(self) -> None:
        """Forget a loss that is to come."""
        self.runner.disarm()
        self.log.strike_at("", lambda: None)

    def stop_rank(self, rank: int) -> None:
        """Stop one rank, as SIGSTOP does: the next step does not end until the rank goes on or the ranks are lost."""
        if not self.is_lost:
            self._stopped_rank = rank
            self.machine.hold(ENGINE)

    def continue_rank(self) -> None:
        """Continue a stopped rank, as SIGCONT does."""
        if not self.is_lost:
            self._unstick()

    def _unstick(self) -> None:
        self._stopped_rank = None
        self.machine.let_go_on(ENGINE)

    async def _watch_ranks(self) -> None:
        """Count the intervals without a heartbeat, as `RankGroup` does."""
        missed = 0
        while missed <= _MISSED_HEARTBEATS:
            await asyncio.sleep(INTERVAL_S)
            await self.machine.running()
            missed = missed + 1 if self.is_stuck else 0
        self.lose_ranks("rank 1 sends no heartbeats")

    async def _live(self) -> None:
        """Serve, drain and end as `Node.serve` does, and exit."""
        await self.stop.requested.wait()
        await self.machine.running()
        self.service.draining.refuse_new_work()
        await self._drain()
        for part in (
            self._leave,
            self._close_service,
            self._stop_engine,
            self.intake.stop,
            self.offering.stop,
            self._stop_server,
        ):
            await self._ranked_cluster.pause()
            await self.machine.running()
            await part()
        self._ranked_cluster.exited(self)

    async def _drain(self) -> None:
        idle = asyncio.create_task(self.service.draining.wait_idle())
        forced = asyncio.create_task(self.stop.forced.wait())
        try:
            await asyncio.wait((idle, forced), timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (idle, forced):
                task.cancel()
            await asyncio.gather(idle, forced, return_exceptions=True)

    async def _leave(self) -> None:
        self.has_left = True
        self._ranked_cluster.registered_nodes_changed()

    async def _close_service(self) -> None:
        self._cancel_heartbeat()
        self.service.close()

    async def _stop_engine(self) -> None:
        self.driver.stop()

    async def _stop_server(self) -> None:
        self._ranked_cluster.network.forget(self.incarnation)
        await asyncio.sleep(self._ranked_cluster.rng.choice([0.0, _RPC_GRACE_S]))

    async def end(self) -> None:
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*(t for t in self._tasks if t is not asyncio.current_task()), return_exceptions=True)
        self.runner.close()
        await super().end()


class RankedCluster(SimulatedCluster):
    """A cluster of nodes with ranks, and their supervisor."""

    make_node = RankedNode
    nodes: dict[str, RankedNode]  # type: ignore[assignment]

    def __init__(self, limits: SimulatedLimits, rng: Random, faults: Callable[[], Faults]) -> None:
        super().__init__(limits, rng, faults)
        self.ended: list[RankedNode] = []
        """The incarnations that have exited or were killed."""
        self.losses: Counter[str] = Counter()
        """What nodes were doing when they lost their ranks."""
        self._starting: list[asyncio.Task[Any]] = []

    async def start(self, node_id: str) -> RankedNode:
        await super().start(node_id)
        return self.nodes[node_id]

    async def pause(self) -> None:
        """Let something else happen, or nothing."""
        await asyncio.sleep(self.rng.choice([0.0, 0.0, 0.01, 0.3]))

    def _records(self) -> list[NodeRecord]:
        return [node.record for node in self.nodes.values() if not node.has_left]

    def registered_nodes_changed(self) -> None:
        self._register()

    def kill(self, node_id: str) -> None:
        self.ended.append(self.nodes[node_id])
        super().kill(node_id)

    def exited(self, node: RankedNode) -> None:
        """The process of a node has ended by itself: its supervisor starts it again."""
        self.kill(node.node_id)
        self._starting.append(asyncio.create_task(self._start_again(node.node_id)))

    async def _start_again(self, node_id: str) -> None:
        await asyncio.sleep(self.rng.choice([0.05, 1.0, 3.0]))
        await self.start(node_id)

    async def wait_until_settled(self, within_s: float) -> None:
        """Return when no node is about to end or to be started."""
        for _ in range(int(within_s / _POLL_S)):
            ending = [node for node in self.nodes.values() if node.is_ending or node.is_lost or node.is_stuck]
            if not ending and all(task.done() for task in self._starting):
                break
            await asyncio.sleep(_POLL_S)
        else:
            raise AssertionError(f"still ending: {[node.incarnation for node in ending]}")
        await asyncio.gather(*self._starting)

    def heal(self) -> None:
        self._faults = Faults
        for node in self.nodes.values():
            node.continue_rank()
        super().heal()

    def disarm(self) -> None:
        """Forget the losses that were to come."""
        for node in self.nodes.values():
            node.disarm()
