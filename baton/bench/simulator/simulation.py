"""Simulates one workload on one cluster in virtual time."""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from baton.bench.results.outcome import Outcome, Outcomes
from baton.bench.simulator.config import Failure, NodeSizes, PlannerMode, SimulationConfig
from baton.bench.simulator.drafts import DraftTotals, SimulatedDrafts
from baton.bench.simulator.encoders import EncodeNode, EncoderFigures, total
from baton.bench.simulator.events import SharedHost, Timeline, TimelineEntry
from baton.bench.simulator.handoff import HandOffs, Network
from baton.bench.simulator.node import SimulatedNode
from baton.bench.simulator.planner import SimulatedPlanner
from baton.bench.simulator.policies import make_placer
from baton.bench.simulator.router import MODEL, FirstTokenParts, SimulatedRouter
from baton.bench.workloads.workload import WorkloadRequest
from baton.errors import BatonError
from baton.messages.node import NodeDescription, Role
from baton.messages.node_model import GENERATES, Capability
from router.placement.cost_model import ServiceLevel
from router.placement.placer import PlacementSettings


@dataclass(slots=True)
class Simulated:
    """The result of a simulation."""

    outcomes: Outcomes
    duration_s: float
    """Virtual time from the first arrival to the last end."""
    parts: FirstTokenParts
    num_steps: int
    num_retries: int
    num_failures: int
    bytes_moved: float
    num_preemptions: int
    timeline: dict[str, list[TimelineEntry]] | None
    drafts: DraftTotals | None = None
    """None: no node drafts tokens."""
    moves: list[dict[str, Any]] = field(default_factory=list)
    """The decisions of the planner, the first one first."""
    encoders: EncoderFigures | None = None
    """None: there are no encode nodes."""


def simulate(
    workload: Iterable[WorkloadRequest],
    config: SimulationConfig,
    progress: Callable[[int], None] = lambda ended: None,
) -> Simulated:
    """Simulates one cell to its end. `progress` is called with the number of requests that have ended."""
    # There are too few reference cycles for the collector to be worth a search through a million objects.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        simulation = Simulation(config, progress)
        simulation.run(workload)
        return simulation.result()
    finally:
        if was_enabled:
            gc.enable()


class Simulation:
    """A simulated cluster and its clients."""

    def __init__(self, config: SimulationConfig, progress: Callable[[int], None]) -> None:
        self.outcomes = Outcomes()
        self.nodes: dict[str, SimulatedNode] = {}
        """The current incarnation of each node, by the node's name."""
        self.timeline = Timeline()
        self._config = config
        self._progress = progress
        self._rng = Random(config.seed)
        self._network = Network(self.timeline, config.nic_bytes_per_s, config.network_latency_s)
        self._handoffs = HandOffs(self.timeline, self._network, config.sizes.kv_bytes_per_token)
        settings = PlacementSettings(
            require_disaggregation=bool(config.arrangement.prefill) and not config.arrangement.is_conditional,
            target=ServiceLevel(config.target_ttft_ms, config.target_tpot_ms),
        )
        self.router = SimulatedRouter(
            self.timeline,
            self._network,
            make_placer(config.policy, settings, self._rng),
            self._rng,
            config,
            self._on_request_end,
        )
        contention = config.contention
        self._host = None if contention is None else SharedHost(self.timeline, contention)
        self._dead_nodes: list[SimulatedNode] = []
        self._num_failures = 0
        self._requests: Iterator[WorkloadRequest] = iter(())
        self._held: deque[tuple[WorkloadRequest, float | None]] = deque()
        """Requests that wait for others to end, and their planned times; None: the time at which they are sent."""
        self._turns: dict[int, deque[WorkloadRequest]] = {}
        """The turns of each session that are still to come."""
        self._session_of: dict[int, int] = {}
        self._is_exhausted = False
        for role, count in ((Role.PREFILL, config.arrangement.prefill), (Role.DECODE, config.arrangement.decode)):
            for number in range(config.cell * count, (config.cell + 1) * count):
                self._start_node(f"{role.value}-{number}", role, 1)
        self.encoders = [
            EncodeNode(
                _describe(f"encode-{number}", Role.ENCODE, 1, config.sizes, has_images=True),
                self.timeline,
                config.sizes.encode_ms / 1e3,
                lambda node: self.router.view.reported(node.incarnation, node.load()),
            )
            for number in range(config.num_encode)
        ]
        for node in self.encoders:
            self.router.attach_encoder(node)
        self._plan_failures()
        self.planner = None
        if config.planner is not PlannerMode.OFF:
            self.planner = SimulatedPlanner(self, self.timeline, self.router, config)

    def run(self, workload: Iterable[WorkloadRequest]) -> None:
        """Simulates the workload to its end."""
        self._requests = iter(workload)
        self._schedule_arrival()
        self.timeline.run()
        if self.router.num_open:
            raise BatonError(f"{self.router.num_open} requests never ended: this is a bug in the simulator")

    def result(self) -> Simulated:
        """Returns the result, after `run`."""
        nodes = [*self._dead_nodes, *self.nodes.values()]
        entries = {node.incarnation: node.timeline for node in nodes if node.timeline is not None}
        outcomes, drafts = self.outcomes, None
        for node in nodes:
            if node.drafts is not None:
                drafts = drafts or DraftTotals()
                drafts.add(node.drafts.totals)
        return Simulated(
            outcomes=outcomes,
            duration_s=duration_s(outcomes),
            parts=self.router.parts,
            num_steps=sum(node.num_steps for node in nodes),
            num_retries=self.router.num_retries,
            num_failures=self._num_failures,
            bytes_moved=self._network.bytes_moved,
            num_preemptions=sum(node.scheduler.make_stats().num_preemptions for node in nodes),
            timeline=entries if self._config.keeps_timeline else None,
            drafts=drafts,
            moves=[] if self.planner is None else self.planner.moves,
            encoders=total(self.encoders) if self.encoders else None,
        )

    # Nodes.

    def change_role(self, node: SimulatedNode, role: Role) -> None:
        """The node gives back what it still has, and comes back with another role after `flip_s`."""
        node.give_back()
        node.is_gone = True
        self._dead_nodes.append(node)
        self.router.lose(node)
        self._handoffs.node_gone(node)
        self.timeline.call_at(self.timeline.now + self._config.flip_s, lambda: self._restart(node, role))

    def _start_node(self, node_id: str, role: Role, run: int) -> None:
        config = self._config
        sizes = config.sizes_of(role)
        description = _describe(node_id, role, run, sizes, has_images=config.image_share > 0)
        speculation = sizes.speculation
        node = SimulatedNode(
            description,
            sizes,
            self.timeline,
            self._handoffs,
            self.router.report,
            stepwise=config.stepwise or self._host is not None or speculation is not None,
            keeps_timeline=config.keeps_timeline,
            host=self._host,
            drafts=None if speculation is None else SimulatedDrafts(speculation, config.seed),
        )
        self.nodes[node_id] = node
        self.router.attach(node)
        if config.mtbf_s != math.inf:
            self._plan_failure(
                Failure(node_id, self.timeline.now + self._rng.expovariate(1 / config.mtbf_s), config.repair_s)
            )

    def _plan_failures(self) -> None:
        for failure in self._config.failures:
            if failure.node_id not in self.nodes:
                raise BatonError(f"no node is called {failure.node_id}; the nodes are {', '.join(self.nodes)}")
            self._plan_failure(failure)

    def _plan_failure(self, failure: Failure) -> None:
        self.timeline.call_at(failure.at_s, lambda: self._fail(failure))

    def _fail(self, failure: Failure) -> None:
        node = self.nodes.get(failure.node_id)
        if node is None or node.is_gone or self.is_done:
            return
        self._num_failures += 1
        node.fail()
        self._dead_nodes.append(node)
        now = self.timeline.now

        def noticed() -> None:
            self.router.lose(node)
            self._handoffs.node_gone(node)

        self.timeline.call_at(now + self._config.detect_s, noticed)
        if failure.down_s != math.inf:
            back_at = now + max(failure.down_s, self._config.detect_s)
            self.timeline.call_at(back_at, lambda: self._restart(node))

    def _restart(self, node: SimulatedNode, role: Role | None = None) -> None:
        description = node.description
        run = int(description.incarnation.rpartition(".")[2]) + 1
        self._start_node(description.node_id, role or description.role, run)

    # Requests.

    @property
    def is_done(self) -> bool:
        """Whether all requests have ended."""
        return self._is_exhausted and not (self.router.num_open or self._held or self._turns)

    def _schedule_arrival(self) -> None:
        """Schedules the next arrival; later turns of a session wait for the turn before."""
        for request in self._requests:
            if request.session is not None and request.turn > 0:
                self._turns.setdefault(request.session, deque()).append(request)
                continue
            self.timeline.call_at(request.arrival_s, lambda request=request: self._due(request))  # type: ignore[misc]
            return
        self._is_exhausted = True

    def _due(self, request: WorkloadRequest) -> None:
        self._schedule_arrival()
        # As in the load generator: latency counts from the arrival, or without one from when the request is sent.
        self._arrive(request, request.arrival_s if request.arrival_s > 0 else None)

    def _arrive(self, request: WorkloadRequest, planned_s: float | None) -> None:
        limit = self._config.max_concurrency
        if limit is not None and self.router.num_open >= limit:
            self._held.append((request, planned_s))
            return
        if request.session is not None:
            self._session_of[request.index] = request.session
        self.router.arrive(request, self.timeline.now if planned_s is None else planned_s)

    def _on_request_end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        now = self.timeline.now
        if self._held:
            held, planned_s = self._held.popleft()
            self.timeline.call_at(now, lambda: self._arrive(held, planned_s))
        session = self._session_of.pop(outcome.index, None)
        if session is not None and session in self._turns:
            self._next_turn(session, now)
        count = len(self.outcomes)
        if count % 1024 == 0:
            self._progress(count)

    def _next_turn(self, session: int, now: float) -> None:
        turns = self._turns[session]
        request = turns.popleft()
        if not turns:
            del self._turns[session]
        at = max(now + request.think_s, request.arrival_s)
        self.timeline.call_at(at, lambda: self._arrive(request, at))


def duration_s(outcomes: Outcomes) -> float:
    """Seconds from the first arrival to the last end."""
    begin = min(outcomes.planned_s, default=0.0)
    return float(max(outcomes.finished_s, default=begin) - begin)


def _describe(node_id: str, role: Role, run: int, sizes: NodeSizes, *, has_images: bool) -> NodeDescription:
    return NodeDescription(
        node_id=node_id,
        incarnation=f"{node_id}.{run}",
        role=role,
        address=f"{node_id}:{1024 + run}",
        pid=run,
        version="0",
        model=MODEL,
        model_fingerprint=MODEL,
        dtype="simulated",
        numerics="simulated",
        bit_exact=True,
        vocab_size=1 << 16,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        num_blocks=max(1, sizes.cache_tokens // sizes.block_size),
        eos_token_ids=frozenset(),
        kv_layout=MODEL,
        block_bytes=round(sizes.kv_bytes_per_token * sizes.block_size),
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        tp=sizes.shape.tp,
        pp=sizes.shape.pp,
        takes_moves=role is Role.DECODE,
        capabilities=GENERATES | {Capability.IMAGE} if has_images else frozenset(),
    )
