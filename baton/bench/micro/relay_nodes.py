"""Nodes that compute nothing: they serve the real gRPC service and report scripted tokens, one report per step.

All nodes and clients are on one event loop, so one clock times a step's report and the reading of its tokens.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from baton.errors import AdapterRefused, BatonError, NodeLost
from baton.messages.ids import AttemptKey
from baton.messages.node import (
    HEARTBEAT_S,
    Abort,
    Leg,
    LoadReport,
    NodeDescription,
    Outcome,
    RequestDelta,
    Role,
    RouterMessage,
    StageTimings,
    StepFigures,
    StepReport,
    Submit,
)
from baton.messages.node_report import NodeReport, TraceEvent, TraceStep
from baton.model_formats.adapters import AdapterInfo
from baton.wire.clients.node_client import NodeClient
from baton.wire.server.server import RpcServer
from baton.wire.services.node_service import SERVICE_NAME, NodeServicer

NUM_BLOCKS = 1 << 20
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 20
_TIMINGS = StageTimings(queue_ms=0.1, prefill_ms=5.0, transfer_ms=1.0, kv_bytes=1 << 20)


class RelayStream:
    """One request: its tokens, when they were reported, and how many its client has read."""

    __slots__ = ("max_tokens", "node", "num_read", "offset", "request_id", "sent_at", "waiting")

    def __init__(self, request_id: str, offset: int, max_tokens: int) -> None:
        self.request_id = request_id
        self.offset = offset
        """Index in the script of its first token."""
        self.max_tokens = max_tokens
        self.sent_at: list[float] = []
        """Time of each token's report, seconds on the monotonic clock."""
        self.num_read = 0
        self.node: RelayNode | None = None
        """The node where it decodes."""
        self.waiting: tuple[RelayNode, AttemptKey] | None = None
        """A decode leg whose prompt is not computed yet."""


class RelayNodes:
    """All nodes of a simulated cluster: half of them compute prompts, the others decode."""

    def __init__(self, count: int, model: str, vocab_size: int, script: Sequence[int]) -> None:
        self.script = script
        self.streams: dict[str, RelayStream] = {}
        self.paused = False
        """Whether decode nodes take no steps."""
        self.nodes = [RelayNode(self, bench_description(index, count, model, vocab_size)) for index in range(count)]

    @property
    def decoding(self) -> Sequence[RelayNode]:
        return [node for node in self.nodes if node.description.role is Role.DECODE]

    async def start(self) -> None:
        for node in self.nodes:
            await node.start()

    def forget(self) -> None:
        """Drops all streams, after their clients have ended."""
        self.streams.clear()
        for node in self.nodes:
            node.unread = 0

    async def stop(self) -> None:
        await asyncio.gather(*(node.stop() for node in self.nodes))

    async def beat(self) -> None:
        """Sends heartbeats forever, one node after the other, as if each had its own clock."""
        while True:
            for node in self.nodes:
                await asyncio.sleep(HEARTBEAT_S / 2 / len(self.nodes))
                node.beat()


class RelayNode:
    """One node with its own gRPC server; see `baton.wire.services.node_service.NodeHandler`."""

    def __init__(self, owner: RelayNodes, description: NodeDescription) -> None:
        self._owner = owner
        self._server = RpcServer((SERVICE_NAME,))
        port = self._server.bind("127.0.0.1", 0)
        self.description = replace(description, address=f"127.0.0.1:{port}")
        NodeServicer(self).add_to_server(self._server.server)
        self._port: _Port | None = None
        self._running: dict[AttemptKey, RelayStream] = {}
        self.unread = 0
        """Tokens that were reported and that their clients have not read."""
        self.on_read: Callable[[RelayNode], None] | None = None
        """Called when a client has read tokens of this node."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    def step(self) -> None:
        """Reports one token for every running request."""
        if self._port is None or not self._running or self._owner.paused:
            return
        now, script = time.monotonic(), self._owner.script
        deltas, ended = [], []
        for attempt, stream in self._running.items():
            index = len(stream.sent_at)
            stream.sent_at.append(now)
            token = (script[(stream.offset + index) % len(script)],)
            if index == stream.max_tokens - 1:
                ended.append(attempt)
                deltas.append(RequestDelta(attempt, index, token, outcome=Outcome.LENGTH, timings=_TIMINGS))
            else:
                deltas.append(RequestDelta(attempt, index, token))
        self.unread += len(deltas)
        for attempt in ended:
            del self._running[attempt]
        step = StepFigures(10.0, 0, len(deltas), 100 * len(deltas))
        self._port.put(StepReport(deltas, self.load(), step=step))

    def beat(self) -> None:
        """Sends a heartbeat, if nothing else was reported lately."""
        if self._port is not None:
            self._port.beat(self.load())

    def receive(self, message: RouterMessage) -> None:
        """Handles a message of the router."""
        if isinstance(message, Abort):
            self._running.pop(message.attempt, None)
        elif isinstance(message, Submit):
            stream = self._owner.streams.get(message.attempt.request_id)
            if stream is None:  # its client has ended already
                self._running.pop(message.attempt, None)
            elif message.leg is Leg.DECODE and not stream.sent_at:
                stream.waiting = (self, message.attempt)
            elif message.leg is Leg.DECODE:
                self.run(message.attempt, stream)
            else:
                self._compute_prompt(message, stream)

    def run(self, attempt: AttemptKey, stream: RelayStream) -> None:
        """The prompt's KV has arrived: the request takes part in the next step."""
        stream.node = self
        self._running[attempt] = stream

    def end_all(self) -> None:
        """Drops all running requests."""
        self._running.clear()

    def _compute_prompt(self, submit: Submit, stream: RelayStream) -> None:
        if self._port is None:
            return
        first = self._owner.script[stream.offset % len(self._owner.script)]
        goes_on = Outcome.HANDED_OFF if submit.leg is Leg.PREFILL else None
        outcome = Outcome.LENGTH if stream.max_tokens == 1 else goes_on
        stream.sent_at.append(time.monotonic())
        self._port.put(
            StepReport([RequestDelta(submit.attempt, 0, (first,), outcome=outcome, timings=_TIMINGS)], self.load())
        )
        if outcome is None:
            self.run(submit.attempt, stream)
        elif stream.waiting is not None:
            node, attempt = stream.waiting
            node.run(attempt, stream)

    def load(self) -> LoadReport:
        return LoadReport(running=len(self._running), total_blocks=NUM_BLOCKS, free_blocks=NUM_BLOCKS)

    def open_port(self, router_id: str, router_incarnation: str = "", keeps: Sequence[AttemptKey] = ()) -> _Port:
        self._port = _Port(self)
        return self._port

    def describe(self) -> NodeDescription:
        return self.description

    def report(self) -> NodeReport:
        return NodeReport(self.description, self.load())

    def drain(self) -> None:
        """Does nothing: there is no work to wait for."""

    def set_role(self, incarnation: str, role: Role) -> None:
        """Does nothing: benchmarks change no roles."""

    async def reset_prefix_cache(self, incarnation: str) -> int:
        """Does nothing: there is no prefix cache."""
        return 0

    async def inspect_adapter(self, incarnation: str, directory: str) -> AdapterInfo:
        """Raises AdapterRefused: there is no model."""
        raise AdapterRefused("there is no model")

    def trace(self, after: int) -> Sequence[TraceEvent]:
        return ()

    def steps(self, after: int) -> Sequence[TraceStep]:
        return ()


class _Port:
    """The connection of a router to a node; see `baton.wire.services.node_service.RouterPort`."""

    def __init__(self, node: RelayNode) -> None:
        self._node = node
        self._reports: deque[StepReport | None] = deque()
        self._filled = asyncio.Event()
        self._is_quiet = True

    def receive(self, message: RouterMessage) -> None:
        self._node.receive(message)

    def refuse(self, attempt: AttemptKey, error: str) -> None:
        self.put(StepReport([RequestDelta(attempt, outcome=Outcome.ERROR, error=error)], self._node.load()))

    def put(self, report: StepReport | None) -> None:
        self._is_quiet = False
        self._reports.append(report)
        self._filled.set()

    def beat(self, load: LoadReport) -> None:
        if self._is_quiet:
            self.put(StepReport((), load))
        self._is_quiet = True

    async def reports(self) -> AsyncIterator[StepReport]:
        while True:
            while self._reports:
                report = self._reports.popleft()
                if report is None:
                    return
                yield report
            self._filled.clear()
            await self._filled.wait()

    def close(self) -> None:
        self.put(None)


def bench_description(index: int, count: int, model: str, vocab_size: int) -> NodeDescription:
    """Describes the node with this index, still without an address. The first half are prefill nodes."""
    role = Role.PREFILL if index < count // 2 else Role.DECODE
    name = f"{role.value}-{index}"
    return NodeDescription(
        node_id=name,
        incarnation=f"{name}.bench",
        role=role,
        address="",
        pid=1,
        version="bench",
        model=model,
        model_fingerprint="bench",
        dtype="bfloat16",
        numerics="bench",
        bit_exact=True,
        vocab_size=vocab_size,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        eos_token_ids=frozenset(),
    )


# Reads simulated nodes directly, without a router, and measures the latency of each token.


class DirectReader:
    """Attaches to all decode nodes, as a router does, and reads streams that are divided among them."""

    def __init__(self, nodes: RelayNodes, num_streams: int) -> None:
        self._nodes = nodes
        self._num_streams = num_streams
        self._loss: NodeLost | None = None
        self.latencies = array("f")
        """Latency of each token from its step's report until it was read here, seconds."""

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """A context in which the streams run; on exit they have ended and all nodes are detached."""
        decoding = self._nodes.decoding
        async with AsyncExitStack() as opened:
            for node in decoding:
                stream = await NodeClient(node.description.address).attach("bench-direct")
                opened.push_async_callback(stream.close)
                stream.listen(self._on_report, self._on_lost)
            for number in range(self._num_streams):
                name = f"direct-{number}"
                request = self._nodes.streams[name] = RelayStream(name, number * 7, 1 << 16)
                decoding[number % len(decoding)].run(AttemptKey(name, 1), request)
            try:
                yield
            finally:
                for node in decoding:
                    node.end_all()
                self._nodes.forget()

    def raise_failure(self) -> None:
        """Raises BatonError if a node was lost."""
        if self._loss is not None:
            raise BatonError(str(self._loss))

    def _on_report(self, report: StepReport) -> None:
        now, streams = time.monotonic(), self._nodes.streams
        for delta in report.deltas:
            self.latencies.append(now - streams[delta.attempt.request_id].sent_at[delta.first_index])

    def _on_lost(self, loss: NodeLost) -> None:
        self._loss = loss
