"""A whole cluster in one thread and virtual time: it runs the code of the processes without sockets, threads and NIXL.

Router, nodes, engines, links, leases, transfers and movers are the real ones. Connections are a `FakeNetwork`,
one-sided reads a `FakeTransferFabric` under a `FaultyTransferBackend`, tokens and KV bytes those of the simulated
runner, whose next token follows from every KV byte of the history: a wrong block gives wrong tokens.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, cast

from baton.clock import Clock
from baton.engine.connector import KVTransferOutput
from baton.engine.kv_cache.block_hash import CacheKeyFields
from baton.engine.request import Request
from baton.engine.runner import KVMemory
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.scheduler_config import PreemptionMode, TransferFailurePolicy
from baton.errors import BatonError, NobodyListens, NodeLost
from baton.messages.generation import Chunk, Finished, GenerateEvent, GenerateRequest, ModelCard, PromptLogprobs
from baton.messages.ids import AttemptKey, Peer
from baton.messages.node import NodeDescription, Role, RouterMessage, StageTimings, StepReport
from baton.messages.sampling import TokenLogprobs
from baton.node.adapters.adapter_threads import AdapterThreads
from baton.node.attempts.attempt_times import TransferFigures
from baton.node.kv.connector import BothHalves
from baton.node.kv.intake import Intake
from baton.node.kv.intake_connector import IntakeConnector
from baton.node.kv.offer_connector import OfferConnector
from baton.node.kv.offering import Offering
from baton.node.kv.shared_mover import SharedMover
from baton.node.reports.logs import EventLog
from baton.node.serve import Outbox
from baton.node.service import NodeService
from baton.registry import NodeRecord
from baton.runner import SimulatedSpec
from baton.runner.blocks.block_digests import block_digests
from baton.runner.blocks.digest_definition import BlockDigests
from baton.runner.simulated import SimulatedRunner
from baton.wire.liveness import PeerAccess, PortState
from decode_node.senders import KnownSenders, own_kv_format
from kv_transfer.backends.base import TransferBackend
from kv_transfer.layout import PROTOCOL_VERSION, LayoutFingerprint, LinkIdentity, part_name
from kv_transfer.mover.part_mover import DeliverEvent
from kv_transfer.mover.parts_mover import PartsMover
from kv_transfer.mover.pieces import WindowLimits
from kv_transfer.receiver.join_probe import JoinProbes
from kv_transfer.receiver.probe_values import ProbeState
from kv_transfer.receiver.transfer import TransferBook
from kv_transfer.sender.lease_values import LeaseTimes
from router.admission.limits import DispatchLimits
from router.dispatcher import Dispatcher
from router.node_links import NodeLinks
from router.placement.view import ClusterView
from router.timers import LoopTimers
from tests.doubles.fake_engine_driver import FakeEngineDriver
from tests.doubles.fake_mover import FakeMover
from tests.doubles.fake_transfer_backend import FakeTransferBackend, FakeTransferFabric
from tests.doubles.faulty_transfer_backend import Faults, FaultyTransferBackend
from tests.support.executors import Ahead, executor_for
from tests.support.fake_network import FakeNetwork, FakeServer
from tests.support.handoff_rig import mover_of_one_part
from tests.support.router_parts import record_of
from tests.support.virtual_time import LoopClock

ROUTER = "router-0"
STEP_S = 0.01
MOVER_TURN_S = 0.02
BLOCK_SIZE = 4
ENGINE = "engine"
"""The name of the turns of an engine's driver."""
_POLL_S = 0.25
_JOIN_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class SimulatedLimits:
    """Sizes and times of a simulated cluster."""

    num_blocks: int = 48
    num_prefill_blocks: int = 0
    """The number of blocks of a prefill node; 0: as many as a decode node has."""
    prefill_block_size: int = BLOCK_SIZE
    """The number of tokens in a block of a prefill node; in one of a decode node there are BLOCK_SIZE."""
    chunk: int = 8
    max_num_seqs: int = 4
    lease: LeaseTimes = field(default_factory=lambda: LeaseTimes(lease_s=4, unclaimed_s=12, grace_s=2))
    max_quarantined_blocks: int = 1024
    window: WindowLimits | None = None
    heartbeat_s: float = 1.0
    ahead: Ahead = "no"
    """Whether nodes schedule asynchronously."""
    num_host_blocks: int = 0
    preemption_mode: PreemptionMode = "recompute"
    on_transfer_failure: TransferFailurePolicy = "reroute"
    orphan_grace_s: float = 10.0
    digests: bool = True
    """Whether both nodes compute digests."""
    meets_senders: bool = True
    """Whether decode nodes open links to prefill nodes as these join, and not before the first request."""
    num_layers: int = 1
    max_loras: int = 8
    """How many different adapters a step may have."""
    max_cpu_loras: int = 1
    """How many adapters a node may have in memory."""

    def spec_for(self, role: Role) -> SimulatedSpec:
        """The model and cache of a node of this role."""
        return replace(self.spec, block_size=self.prefill_block_size) if role is Role.PREFILL else self.spec

    @property
    def spec(self) -> SimulatedSpec:
        return self.spec_of(num_layers=self.num_layers, num_kv_heads=1)

    def spec_of(self, *, num_layers: int, num_kv_heads: int) -> SimulatedSpec:
        return SimulatedSpec(
            block_size=BLOCK_SIZE,
            num_blocks=max(self.num_blocks, self.num_prefill_blocks),
            num_host_blocks=self.num_host_blocks,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=4,
            vocab_size=97,
            max_model_len=128,
        )


class _Machine:
    """A process: runs scheduled turns while it runs, and none while it is stopped or gone."""

    def __init__(self) -> None:
        self.is_gone = False
        self._running = asyncio.Event()
        self._running.set()
        self._due: dict[str, Callable[[], None]] = {}
        self._held: set[str] = set()

    def wake(self, name: str, turn: Callable[[], None], after_s: float) -> None:
        """Schedule a turn; a turn that is already scheduled under this name runs only once."""
        if name not in self._due and not self.is_gone:
            self._due[name] = turn
            asyncio.get_running_loop().call_later(after_s, self._take, name)

    def _take(self, name: str) -> None:
        if self._running.is_set() and name in self._due and name not in self._held:
            self._due.pop(name)()

    def hold(self, name: str) -> None:
        """Run no turns under this name until `let_go_on`, as if that thread were stuck."""
        self._held.add(name)

    def let_go_on(self, name: str) -> None:
        self._held.discard(name)
        if not self.is_gone:
            self._take(name)

    async def running(self) -> None:
        """Return when the process runs."""
        await self._running.wait()

    def pause(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()
        for name in list(self._due):
            self._take(name)

    def end(self) -> None:
        self.is_gone = True
        self._due.clear()


class _Hasher(Executor):
    """A process's thread for digests: runs the given functions a little later, one after the other."""

    def __init__(self, machine: _Machine, latency: Callable[[], float]) -> None:
        self._machine = machine
        self._latency = latency
        self._queue: deque[Callable[[], None]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                # A real executor hands the error to the future alone, too.
                future.set_exception(error)

        self._queue.append(run)
        self._machine.wake("hasher", self._next, self._latency())
        return future

    def _next(self) -> None:
        self._queue.popleft()()
        if self._queue:
            self._machine.wake("hasher", self._next, self._latency())


class _Driver(FakeEngineDriver):
    def __init__(self, machine: _Machine, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._machine = machine
        self._is_over = False

    def submit(self, request: Request, adapter_directory: str = "") -> None:
        super().submit(request, adapter_directory)
        self.wake()

    def abort(self, request_ids: Sequence[str]) -> None:
        super().abort(request_ids)
        self.wake()

    def abort_sequence(self, request_id: str, index: int) -> None:
        super().abort_sequence(request_id, index)
        self.wake()

    def tell_transfer(self, news: KVTransferOutput) -> None:
        super().tell_transfer(news)
        self.wake()

    def stop(self) -> None:
        self._is_over = True

    def wake(self) -> None:
        self._machine.wake(ENGINE, self._go_on, STEP_S)

    def _go_on(self) -> None:
        if self._is_over:
            return
        try:
            self.turn()
        except Exception as error:
            # The real driver's thread ends here, too.
            self._is_over = True
            self._on_crash(error)
            return
        if self._core.has_work() or not self._inbox.empty():
            self.wake()


class _Mover(FakeMover):
    def __init__(self, machine: _Machine, name: str, is_busy: Callable[[], bool], *args: Any) -> None:
        """`name`: of its turns. `is_busy`: returns whether the mover is too busy to compute digests itself."""
        super().__init__(*args)
        self._machine = machine
        self._name = name
        self._is_busy = is_busy

    @property
    def _has_to_move(self) -> bool:
        return self._is_busy()

    def _enqueue(self, command: Callable[[], None]) -> bool:
        taken = super()._enqueue(command)
        self._machine.wake(self._name, self._go_on, 0.0)
        return taken

    def _go_on(self) -> None:
        for _ in range(4):
            self.turn()
        if self.has_work:
            self._machine.wake(self._name, self._go_on, MOVER_TURN_S)


class _Role:
    """The role of a node, as its service uses it."""

    def __init__(self, role: Role, offering: Offering, intake: Intake, reading: IntakeConnector) -> None:
        self.handoff = offering if role is Role.PREFILL else intake
        self._role = role
        self._offering = offering
        self._intake = intake
        self._reading = reading

    def attempt_aborted(self, attempt: AttemptKey) -> None:
        self._intake.abandon(attempt)
        if self._role is Role.PREFILL or self._offering.knows(attempt):
            self._offering.aborted(attempt)

    def attempt_timed(self, attempt: AttemptKey, timings: StageTimings) -> None:
        self._offering.timed(attempt, timings)

    def move_asked(self, to: AttemptKey, holder: str) -> None:
        self._offering.move_asked(to, holder)

    def arrived_tokens(self, attempt: AttemptKey) -> Sequence[int]:
        return self._intake.arrived_tokens(attempt)

    def transfer_figures(self, attempt: AttemptKey) -> TransferFigures | None:
        stats = self._reading.stats(attempt)
        return TransferFigures(stats.num_bytes, 0.0, self._intake.prompt_timings(attempt)) if stats else None


class SimulatedNode:
    """One incarnation of a node."""

    def __init__(self, cluster: SimulatedCluster, node_id: str, run: int, faults: Faults) -> None:
        limits, network = cluster.limits, cluster.network
        self.node_id = node_id
        self.incarnation = f"{node_id}.{run}"
        self.role = Role(node_id.partition("-")[0])
        self.runner = self._make_runner(limits)
        self.backends: list[FaultyTransferBackend] = []
        self.machine = _Machine()
        self.log = self._make_log()
        self._cluster = cluster
        self._faults = faults
        layout = LayoutFingerprint.of(self.runner.model, self.runner.layout, FakeTransferBackend.name)
        address = f"{node_id}:{1000 + run}"
        identity = LinkIdentity("sim", node_id, self.incarnation, layout, address)
        clock, post = cluster.clock, asyncio.get_running_loop().call_soon
        outbox = Outbox(post)
        digests = self._make_digests() if limits.digests else None
        self._hasher = _Hasher(self.machine, lambda: cluster.rng.choice([0.0005, 0.02, 0.2]))
        mover = SharedMover(self._make_mover)
        self.offering = cluster.make_handoff(
            identity,
            self.runner.memory,
            mover.of_sender,
            self._tell_engine,
            self.log.record,
            clock,
            limits.lease,
            limits.heartbeat_s,
            cluster.nobody_listens,
            digests=digests,
            is_running=lambda address, within_s: network.answers(self.incarnation, address),
        )
        self.intake = cluster.make_intake(
            identity,
            mover.of_reader,
            TransferBook(
                limits.max_quarantined_blocks,
                digest_every=1 if limits.digests else 0,
                keeps_valid_blocks=limits.on_transfer_failure == "recompute",
                clock=clock,
            ),
            JoinProbes(identity.node_id, identity.incarnation, clock),
            self._tell_engine,
            self.log.record,
            post,
            clock,
            PeerAccess(
                lambda address: cast(Any, network.channel(self.incarnation, address)),
                lambda address, within_s: network.answers(self.incarnation, address),
                cluster.probe_port,
            ),
            self.runner.layout,
            limits.heartbeat_s,
        )
        self.half = self.offering if self.role is Role.PREFILL else self.intake
        """The half that the node's role is named for."""
        reading = IntakeConnector(self.intake, self.runner.layout, post)
        self.connector = connector = BothHalves(
            OfferConnector(self.offering, self.runner.layout, outbox.add, post, outbox.add_work), reading
        )
        kv_format = own_kv_format(self.runner.model.dtype, identity)
        self.senders = KnownSenders(kv_format, self._sender_joined, self._sender_left)
        self.scheduler = self._new_scheduler(limits, clock, connector)
        self.crashes: list[BaseException] = []
        adapters = cluster.make_adapter_threads(self)
        self.driver = _Driver(
            self.machine,
            self.scheduler,
            self.runner,
            lambda news: post(self._on_step, news),
            self._crashed,
            executor=executor_for(limits.ahead),
            flush=outbox.flush,
            adapters=adapters,
            max_cpu_loras=limits.max_cpu_loras,
        )
        self.description = self._describe(address)
        role = _Role(self.role, self.offering, self.intake, reading)
        self.service = NodeService(
            self.description,
            role,  # type: ignore[arg-type]
            self.driver,
            self.log,
            clock,
            lambda: None,
            limits.orphan_grace_s,
            adapters=adapters,
        )
        self._heartbeat: asyncio.Task[None] | None = None

    def _make_log(self) -> EventLog:
        return EventLog()

    def _make_runner(self, limits: SimulatedLimits) -> SimulatedRunner:
        return SimulatedRunner(limits.spec_for(self.role))

    def _crashed(self, error: BaseException) -> None:
        self.crashes.append(error)

    def _new_scheduler(self, limits: SimulatedLimits, clock: Clock, connector: Any) -> Scheduler:
        prefills = self.role is Role.PREFILL
        config = SchedulerConfig(
            num_blocks=(prefills and limits.num_prefill_blocks) or limits.num_blocks,
            block_size=self.runner.layout.block_size,
            max_num_batched_tokens=limits.chunk,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.spec.max_model_len,
            watermark=0.0,
            num_host_blocks=limits.num_host_blocks,
            preemption_mode=limits.preemption_mode,
            on_transfer_failure=limits.on_transfer_failure,
            max_loras=limits.max_loras,
        )
        fields = CacheKeyFields.of(self.runner.model, self.runner.layout)
        return Scheduler(config, fields, clock, connector=connector)

    def _describe(self, address: str) -> NodeDescription:
        model, spec = self.runner.model, self._cluster.limits.spec
        return NodeDescription(
            node_id=self.node_id,
            incarnation=self.incarnation,
            role=self.role,
            address=address,
            pid=1,
            version="0",
            model=model.name,
            model_fingerprint=model.fingerprint,
            dtype=model.dtype,
            numerics=model.numerics,
            bit_exact=True,
            vocab_size=spec.vocab_size,
            max_model_len=spec.max_model_len,
            block_size=self.runner.layout.block_size,
            num_blocks=spec.num_blocks,
            eos_token_ids=frozenset(),
            on_transfer_failure=self._cluster.limits.on_transfer_failure,
            embedding_size=model.embedding_size,
            link_protocol=PROTOCOL_VERSION,
            capabilities=model.capabilities,
            takes_moves=True,
        )

    @property
    def record(self) -> NodeRecord:
        """The record of the node in the registry."""
        return record_of(self.description)

    def _make_digests(self) -> BlockDigests:
        return block_digests(self.runner.memory)

    def _make_mover(self, deliver: DeliverEvent) -> PartsMover:
        memory = self.runner.memory
        return mover_of_one_part(memory, partial(self._make_part_mover, 0, memory), deliver)

    def _make_part_mover(self, number: int, memory: KVMemory, deliver: DeliverEvent) -> FakeMover:
        cluster, agent = self._cluster, part_name(self.incarnation, number)
        return _Mover(
            self.machine,
            f"mover-{number}",
            lambda: cluster.rng.random() < 0.5,
            lambda: self._make_backend(agent, memory),
            deliver,
            cluster.clock,
            cluster.limits.window,
            block_digests(memory),
            self._hasher,
        )

    def _make_backend(self, agent: str, memory: KVMemory) -> TransferBackend:
        inner = FakeTransferBackend(self._cluster.fabric, agent, memory)
        self.backends.append(FaultyTransferBackend(inner, self._faults, in_probes=self._cluster.has_faults_in_probes))
        return self.backends[-1]

    def _sender_joined(self, source: Peer) -> None:
        if self.role is Role.DECODE and self._cluster.limits.meets_senders:
            self.intake.sender_joined(source)

    def _sender_left(self, incarnation: str) -> None:
        self.intake.sender_left(incarnation)

    def _tell_engine(self, news: KVTransferOutput) -> None:
        self.driver.tell_transfer(news)

    def _on_step(self, news: Any) -> None:
        if not self.machine.is_gone:
            self.service.on_step(news)

    async def start(self) -> None:
        await self.offering.start()
        await self.intake.start()
        server = FakeServer()
        self.offering.add_to_server(server)
        self._cluster.network.serve(self.incarnation, self.description.address, server.servicer)
        self._heartbeat = asyncio.create_task(self.service.heartbeat(), name=f"heartbeat-{self.incarnation}")

    def _cancel_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    async def end(self) -> None:
        """End everything of the process."""
        self.machine.end()
        self._cancel_heartbeat()
        if self._heartbeat is not None:
            (ended,) = await asyncio.gather(self._heartbeat, return_exceptions=True)
            if isinstance(ended, Exception):
                raise ended
        await self.intake.stop()
        await self.offering.stop()
        self.service.close()

    @property
    def is_idle(self) -> bool:
        """Whether every block is free (or only cached), nothing runs or waits, and no read is in flight."""
        stats = self.scheduler.make_stats()
        busy = stats.num_running or stats.num_waiting or stats.leased_blocks or stats.quarantined_blocks
        return not busy and stats.free_blocks == stats.total_blocks and not self.half.mover.figures.reads_in_flight

    def assert_nothing_is_left(self) -> None:
        """Check that books, queues and agents are as empty as at the start."""
        assert not self.crashes
        assert self.is_idle, f"{self.incarnation}: {self.scheduler.make_stats()} {self.scheduler.requests}"
        self.scheduler.kv_cache_manager.check_invariant()
        assert not self.scheduler.requests
        assert self.connector.num_followed == 0
        stats, counts = self.offering.stats(), self.intake.counts()
        assert (stats.granted, stats.reading, stats.suspect) == (0, 0, 0), f"{self.incarnation}: {stats}"
        assert (counts.live, counts.quarantined) == (0, 0), f"{self.incarnation}: {counts}"


class _Stream:
    """The router's end of its stream to one node."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        node: SimulatedNode,
        router_id: str,
        router_incarnation: str,
        keeps: Sequence[AttemptKey],
    ) -> None:
        self.welcome = node.description
        self.router_id = router_id
        self.held: list[RouterMessage] | None = None
        """Messages of the router that are held back; None: messages are delivered at once."""
        self._node = node
        self._cluster = cluster
        self._up = cluster.network.pipe(ROUTER, node.incarnation)
        self._down = cluster.network.pipe(node.incarnation, ROUTER)
        self._port = node.service.open_port(router_id, router_incarnation, keeps)
        self._tasks = [
            asyncio.create_task(self._carry_up(), name=f"up-{node.incarnation}"),
            asyncio.create_task(self._carry_down(), name=f"down-{node.incarnation}"),
        ]
        self._telling: asyncio.Task[None] | None = None

    async def _carry_up(self) -> None:
        while True:
            self._port.receive(await self._up.read())

    async def _carry_down(self) -> None:
        async for report in self._port.reports():
            self._down.send(report)
        self._down.send(NodeLost(f"node {self._node.node_id} ended the stream"))

    def send(self, message: RouterMessage) -> None:
        message = self._cluster.readdressed(self._node, message)
        if self.held is None:
            self._up.send(message)
        else:
            self.held.append(message)

    def let_go_on(self) -> None:
        """Deliver the messages that were held back."""
        held, self.held = self.held or [], None
        for message in held:
            self._up.send(message)

    def listen(self, on_report: Callable[[StepReport], None], on_lost: Callable[[NodeLost], None]) -> None:
        self._telling = asyncio.create_task(self._tell(on_report, on_lost), name=f"tell-{self._node.incarnation}")

    async def _tell(self, on_report: Callable[[StepReport], None], on_lost: Callable[[NodeLost], None]) -> None:
        try:
            while True:
                on_report(await self._down.read())
        except NodeLost as loss:
            on_lost(loss)

    def cut(self) -> None:
        """Break the connection for both sides at once."""
        self._down.break_off(NodeLost(f"node {self._node.node_id} is gone: connection reset"))
        self._let_go()

    def _let_go(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._port.close()

    async def close(self) -> None:
        self._let_go()
        if self._telling is not None:
            self._telling.cancel()
            self._tasks.append(self._telling)
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Client:
    """The client of one node."""

    def __init__(self, cluster: SimulatedCluster, address: str) -> None:
        self._cluster = cluster
        self._address = address

    async def attach(
        self,
        router_id: str,
        incarnation: str = "",
        router_incarnation: str = "",
        keeps: Sequence[AttemptKey] = (),
    ) -> _Stream:
        for node in list(self._cluster.nodes.values()):
            if node.description.address == self._address:
                await node.machine.running()
                if not node.machine.is_gone:
                    return self._cluster.add_stream(_Stream(self._cluster, node, router_id, router_incarnation, keeps))
        raise NobodyListens(f"nobody listens on {self._address}")

    async def close(self) -> None:
        return


@dataclass(slots=True)
class Answer:
    """The answer to a request: the tokens of each sequence so far, and its one end."""

    sequences: dict[int, list[int]] = field(default_factory=lambda: {0: []})
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finished: Finished | None = None
    error: BatonError | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first sequence."""
        return self.sequences[0]

    @property
    def ranks_in_prompt(self) -> list[tuple[int, int]]:
        """Token id and rank at each position of the prompt from the second one on; empty if it was not asked for."""
        return [(position.token_id, position.rank) for position in self.prompt_logprobs]

    def note(self, event: GenerateEvent) -> None:
        """Add an event that the client received."""
        if isinstance(event, PromptLogprobs):
            assert not self.prompt_logprobs, "they come once"
            assert not any(self.sequences.values()), "they come before all tokens"
            self.prompt_logprobs = event.positions
        if isinstance(event, Chunk):
            token_ids = self.sequences.setdefault(event.sequence_index, [])
            assert event.first_index == len(token_ids), "a gap, or a token twice"
            token_ids += event.token_ids
        elif isinstance(event, Finished):
            self.finished = event


class SimulatedCluster:
    """A cluster, made by `simulated_cluster`. `nodes` has the live incarnation of each node."""

    make_handoff: Callable[..., Offering] = Offering
    make_intake: Callable[..., Intake] = Intake
    make_node: Callable[..., SimulatedNode] = SimulatedNode
    make_adapter_threads: Callable[..., AdapterThreads | None] = staticmethod(lambda node: None)
    has_faults_in_probes = False

    def __init__(self, limits: SimulatedLimits, rng: Random, faults: Callable[[], Faults]) -> None:
        self.limits = limits
        self.rng = rng
        self.clock = LoopClock()
        self.network = FakeNetwork(lambda: rng.uniform(0.0002, 0.002))
        self.fabric = FakeTransferFabric(sender_must_pump=True)
        self.nodes: dict[str, SimulatedNode] = {}
        self._runs: dict[str, int] = {}
        self._faults = faults
        self._streams: list[_Stream] = []
        self._ending: list[asyncio.Task[None]] = []
        timers = LoopTimers()
        self.view = ClusterView()
        self._links = NodeLinks(
            lambda address: _Client(self, address), ROUTER, timers, rng, router_incarnation=f"{ROUTER}.1"
        )
        spec = limits.spec
        self.card = ModelCard(spec.name, spec.max_model_len, spec.vocab_size)
        patience = DispatchLimits(capacity_wait_s=20.0, recovery_wait_s=60.0)
        self.dispatcher = Dispatcher(self.view, self._links, None, lambda: self.card, timers, rng, patience)

    def readdressed(self, node: SimulatedNode, message: RouterMessage) -> RouterMessage:
        """The message that a router's message to this node is replaced by."""
        return message

    def streams_of(self, router_id: str) -> list[_Stream]:
        """Return the streams of one router."""
        return [stream for stream in self._streams if stream.router_id == router_id]

    def add_stream(self, stream: _Stream) -> _Stream:
        self._streams.append(stream)
        return stream

    async def probe_port(self, address: str) -> PortState:
        """Return the state of a port, as the kernel would."""
        is_taken = any(node.description.address == address for node in self.nodes.values())
        return PortState.LISTENING if is_taken else PortState.REFUSED

    async def nobody_listens(self, address: str) -> bool:
        return await self.probe_port(address) is PortState.REFUSED

    async def start(self, node_id: str) -> SimulatedNode:
        """Start and register a new incarnation of the node."""
        self._runs[node_id] = run = self._runs.get(node_id, 0) + 1
        node = self.nodes[node_id] = self.make_node(self, node_id, run, self._faults())
        await node.start()
        self._register()
        return node

    def _records(self) -> list[NodeRecord]:
        return [node.record for node in self.nodes.values()]

    def _register(self) -> None:
        records = self._records()
        self.view.registered(records)
        self._links.update(records)
        for node in self.nodes.values():
            node.senders.update({record.name: record for record in records})

    def kill(self, node_id: str) -> None:
        """End a node as SIGKILL does. Its record stays, as in a registry whose lease has not run out."""
        node = self.nodes.pop(node_id)
        node.machine.end()
        self.fabric.kill(node.incarnation)
        self.cut_from_router(node)
        self.network.forget(node.incarnation)
        self._ending.append(asyncio.create_task(node.end(), name=f"end-{node.incarnation}"))

    def cut_from_router(self, node: SimulatedNode) -> None:
        """Break the streams of all routers to this node."""
        for stream in [stream for stream in self._streams if stream.welcome.incarnation == node.incarnation]:
            self._streams.remove(stream)
            stream.cut()

    def cut_links(self, router_id: str = "", which: Callable[[], bool] = lambda: True) -> int:
        """Break streams of this router, or of all routers. Returns their number."""
        cut = [stream for stream in self._streams if router_id in ("", stream.router_id) and which()]
        for stream in cut:
            self._streams.remove(stream)
            stream.cut()
        return len(cut)

    def stop(self, node: SimulatedNode) -> None:
        """Stop a node as SIGSTOP does: it runs, sends and receives nothing, and its peers are not notified."""
        node.machine.pause()
        self.fabric.freeze(node.incarnation)
        self.network.silence(node.incarnation)

    def resume(self, node: SimulatedNode) -> None:
        """Resume a stopped node as SIGCONT does."""
        self.fabric.thaw(node.incarnation)
        self.network.unsilence(node.incarnation)
        node.machine.resume()

    def heal(self) -> None:
        """Resume everything that was stopped, held or stalled."""
        for node in self.nodes.values():
            self.resume(node)
            for backend in node.backends:
                backend.heal()
        self.network.heal()

    async def generate(self, request: GenerateRequest, timeout_s: float | None = None) -> Answer:
        """Run one request to its end."""
        answer = Answer()

        def note(event: GenerateEvent) -> bool:
            assert answer.finished is None, f"{event} after the end"
            answer.note(event)
            return True

        # Every second client takes chunks directly, as those of the router's own gRPC server do.
        take = note if zlib.crc32(request.request_id.encode()) % 2 else None
        try:
            async for event in self.dispatcher.generate(request, timeout_s, take):
                note(event)
        except BatonError as error:
            answer.error = error
        return answer

    async def wait_until_whole(self) -> None:
        """Return when the router is attached to every live node."""
        while {d.incarnation for d in self.view.descriptions()} != {node.incarnation for node in self.nodes.values()}:
            self.dispatcher.requests.changed.clear()
            await self.dispatcher.requests.changed.wait()

    async def wait_until_joined(self) -> None:
        """Return when every decode node may read from every prefill node, or has found that it can't."""
        halves = [node.half for node in self.nodes.values()]
        senders = [node.incarnation for node in self.nodes.values() if node.role is Role.PREFILL]
        pairs = [(half.probes, sender) for half in halves if isinstance(half, Intake) for sender in senders]
        for _ in range(int(_JOIN_WITHIN_S / MOVER_TURN_S)):
            if all(probes.state(sender) is ProbeState.PASSED or probes.objection(sender) for probes, sender in pairs):
                return
            await asyncio.sleep(MOVER_TURN_S)
        raise AssertionError("not all pairs were probed")

    async def wait_until_idle(self, within_s: float) -> None:
        """Return when no live node uses a block, or after `within_s`. Polling costs nothing in virtual time."""
        for _ in range(int(within_s / _POLL_S)):
            if all(node.is_idle for node in self.nodes.values()):
                return
            await asyncio.sleep(_POLL_S)

    async def close(self) -> None:
        await self._links.close()
        for node in self.nodes.values():
            await node.end()
            self.network.forget(node.incarnation)
        await asyncio.gather(*self._ending)
        await asyncio.sleep(0.1)


@asynccontextmanager
async def simulated_cluster(
    rng: Random,
    *,
    prefill: int = 1,
    decode: int = 1,
    limits: SimulatedLimits | None = None,
    faults: Callable[[], Faults] = Faults,
    cluster: Callable[[SimulatedLimits, Random, Callable[[], Faults]], SimulatedCluster] = SimulatedCluster,
) -> AsyncIterator[SimulatedCluster]:
    """Yield a cluster whose nodes are attached; checks at the end that no task is left."""
    before = asyncio.all_tasks()
    made = cluster(limits or SimulatedLimits(), rng, faults)
    for name in [*(f"prefill-{i}" for i in range(prefill)), *(f"decode-{i}" for i in range(decode))]:
        await made.start(name)
    await made.wait_until_whole()
    if made.limits.meets_senders:
        await made.wait_until_joined()
    try:
        yield made
    finally:
        await made.close()
    left = asyncio.all_tasks() - before
    assert not left, f"left behind: {left}"
