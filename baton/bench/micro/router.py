"""`baton bench router`: measures what a router sustains on one core.

The real router process has a core to itself. On another core are simulated nodes, which use the real protocol, and the
clients. Nodes and clients are one process, so one clock times each token: from the moment its node sends the step's
report to the moment its client has read it, including the work of node and client.

The added latency is this time minus the time without a router, which is measured first: a reader attaches to the same
nodes directly, at the same rate. The clients' reading counts as added latency.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from random import Random
from statistics import median

from baton.bench.config import RouterBenchConfig
from baton.bench.load.endpoint import Target
from baton.bench.load.grpc_endpoint import GrpcEndpoint
from baton.bench.load.http_endpoint import HttpEndpoint
from baton.bench.micro.relay_clients import MODEL, RelayClients
from baton.bench.micro.relay_nodes import DirectReader, RelayNode, RelayNodes
from baton.bench.micro.router_process import RouterProcess, router_process
from baton.bench.results.host import processor
from baton.bench.results.spread import Spread
from baton.errors import ConfigError
from baton.messages.ids import AttemptKey
from baton.messages.node import LoadReport, NodeDescription, StepFigures, StepReport
from baton.messages.sampling import SamplingParams
from baton.node.reports.reports import node_record
from baton.observe.ready import Ready
from baton.text.model_files import read_model_files
from baton.text.tokenizer import Tokenizer
from baton.wire.server.event_loop import RpcEventLoop
from router.admission.request import ValidRequest
from router.placement.placer import Placer
from router.placement.view import ClusterView

_STEPS_UNREAD = 4
"""A node that steps as fast as clients read has at most this many unread steps."""
_WARM_UP_STREAMS = 64
_TEXT = (
    "The runner who finishes the first leg hands the baton to the second. It is passed in the air, at speed, within "
    "twenty metres, and a team whose hands are sure can beat one whose legs are faster. "
)


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One kind of load: medians over its rounds, with their spread."""

    tokens_per_s: Spread
    requests_per_s: Spread
    """Requests that ended."""
    refused_per_s: float
    """Requests that the router refused."""
    tokens_per_message: float
    latency_ms_p50: Spread
    """Latency of a token from its step's report to its client."""
    latency_ms_p99: Spread
    router_cpu: float
    """Share of its core that the router used."""
    load_cpu: float
    """Share of the other core that nodes and clients used: near 1 they are the bottleneck, not the router."""


@dataclass(frozen=True, slots=True)
class Added:
    """Added latency in milliseconds."""

    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class RouterReport:
    """All figures of one number of streams."""

    processor: str
    front: str
    streams: int
    nodes: int
    kb_per_stream: float
    """Memory of the router per open stream, thousands of bytes."""
    router_mb: float
    """Memory of the router without streams."""
    placement_us: Spread
    """Time to choose nodes for one request, if as many nodes reported since the last choice as in the mixed load."""
    placement_all_news_us: Spread
    """The same, if all nodes reported since the last choice."""
    direct_ms: Spread
    """Median latency of a token without a router, at the rate of the load half."""
    relay: LoadFigures
    """As many tokens as possible: nodes step as soon as clients have read."""
    half: LoadFigures
    """Tokens at the given rate."""
    mixed: LoadFigures
    """Tokens and requests at the given rates."""
    requests: LoadFigures
    """As many requests as possible, of two tokens each."""

    @property
    def added_latency_ms(self) -> Added:
        """Latency of the load half minus the median latency without a router."""
        half, direct = self.half, self.direct_ms.median
        return Added(half.latency_ms_p50.median - direct, half.latency_ms_p99.median - direct)

    def summary(self) -> dict[str, object]:
        """Medians of the main figures, and all others under `details`."""
        return {
            "streams": self.streams,
            "nodes": self.nodes,
            "front": self.front,
            "requests_per_s": self.requests.requests_per_s.median,
            "tokens_per_s": self.relay.tokens_per_s.median,
            "added_latency_ms": asdict(self.added_latency_ms),
            "kb_per_stream": self.kb_per_stream,
            "placement_us": self.placement_us.median,
            "details": asdict(self),
        }


def run(config: RouterBenchConfig) -> RouterReport:
    """Runs the benchmark; raises ConfigError if there is only one core, and any error of a request."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("the router needs a core of its own: run the benchmark on at least two cores")
    if config.nodes < 2:
        raise ConfigError("at least two nodes are needed: one for prompts and one that decodes")
    os.sched_setaffinity(0, {cores[-1]})
    try:
        with asyncio.Runner(loop_factory=RpcEventLoop) as runner:
            return runner.run(_run(config, router_core=cores[0]))
    finally:
        os.sched_setaffinity(0, cores)


async def _run(config: RouterBenchConfig, router_core: int) -> RouterReport:
    bench = _Bench(config)
    async with bench.nodes_running():
        direct = await bench.direct()
        async with bench.routed(router_core) as loads:
            await loads.warm_up()
            before = loads.router.rss()
            await loads.open_idle_streams()
            after = loads.router.rss()
            relay = await loads.relay()
            half = await loads.steady()
            await loads.end_streams()
            mixed = await loads.mixed()
            await loads.end_streams()
            requests = await loads.requests()
            await loads.end_streams()
    num_reports = round(config.nodes * config.tokens_per_s / config.streams / config.requests_per_s)
    return RouterReport(
        processor=processor(),
        front=config.front,
        streams=config.streams,
        nodes=config.nodes,
        kb_per_stream=(after - before) / config.streams / 1e3,
        router_mb=before / 1e6,
        placement_us=placement_us(bench.descriptions, min(config.nodes, max(1, num_reports))),
        placement_all_news_us=placement_us(bench.descriptions, config.nodes),
        direct_ms=direct,
        relay=relay,
        half=half,
        mixed=mixed,
        requests=requests,
    )


class _Bench:
    """The nodes, which are read directly, and then through a router."""

    def __init__(self, config: RouterBenchConfig) -> None:
        self._config = config
        tokenizer = Tokenizer.load(config.model_dir)
        vocab_size = read_model_files(config.model_dir).vocab_size
        self._nodes = RelayNodes(config.nodes, MODEL, vocab_size, tokenizer.encode(_TEXT))
        self._decode = tokenizer.decode

    @property
    def descriptions(self) -> Sequence[NodeDescription]:
        return [node.description for node in self._nodes.nodes]

    async def direct(self) -> Spread:
        """Median latency of tokens without a router in milliseconds, at the rate of the load half."""
        config, rounds = self._config, []
        reader = DirectReader(self._nodes, config.streams)
        async with reader.reading(), _stepping_at(self._nodes, config.tokens_per_s / config.streams):
            await asyncio.sleep(config.settle_s)
            for _ in range(config.rounds):
                reader.latencies = array("f")
                await asyncio.sleep(config.round_s)
                reader.raise_failure()
                rounds.append(_quantile(reader.latencies, 0.5))
        return Spread.of(rounds, 1e3)

    @asynccontextmanager
    async def nodes_running(self) -> AsyncIterator[None]:
        """A context in which the nodes run."""
        await self._nodes.start()
        beating = asyncio.create_task(self._nodes.beat())
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
            beating.cancel()
            await self._nodes.stop()

    @asynccontextmanager
    async def routed(self, router_core: int) -> AsyncIterator[_Loads]:
        """A context in which a router is attached to the nodes, and clients are connected to it."""
        async with router_process(self.descriptions, self._config.model_dir, router_core) as router:
            endpoint = _endpoint(self._config, router.addresses)
            await endpoint.open()
            clients = RelayClients(endpoint, self._nodes, _TEXT[:120], self._decode)
            yield _Loads(self._config, self._nodes, clients, router)
            endpoint.close()


class _Loads:
    """The loads of clients that call a router."""

    def __init__(
        self, config: RouterBenchConfig, nodes: RelayNodes, clients: RelayClients, router: RouterProcess
    ) -> None:
        self._config = config
        self._nodes = nodes
        self._clients = clients
        self.router = router

    async def warm_up(self) -> None:
        self._clients.max_tokens = 32
        self._clients.open(_WARM_UP_STREAMS)
        async with self._stepping_when_read():
            await self._clients.wait_until(lambda: self._clients.num_open == 0)
        await asyncio.sleep(self._config.settle_s)

    async def open_idle_streams(self) -> None:
        """Opens streams that receive one token and then no more."""
        clients = self._clients
        clients.reset_counts()
        self._nodes.paused = True
        clients.max_tokens = 1 << 16
        while (opened := clients.num_open) < self._config.streams:
            clients.open(min(100, self._config.streams - opened))
            await clients.wait_until(lambda: clients.num_tokens == clients.num_open)
        await asyncio.sleep(self._config.settle_s)
        self._nodes.paused = False

    async def relay(self) -> LoadFigures:
        async with self._stepping_when_read():
            return await self._measure(lambda: self._clients.num_tokens > 0)

    async def steady(self) -> LoadFigures:
        async with _stepping_at(self._nodes, self._config.tokens_per_s / self._config.streams):
            return await self._measure(lambda: self._clients.num_tokens > 0)

    async def mixed(self) -> LoadFigures:
        """Streams of equal length that were started at equal intervals."""
        config, clients = self._config, self._clients
        tokens_each = max(2, round(config.tokens_per_s / config.requests_per_s))
        clients.is_replacing = True
        async with _stepping_at(self._nodes, config.tokens_per_s / config.streams):
            life_s = config.streams / config.requests_per_s
            started = time.monotonic()
            for number in range(config.streams):
                clients.max_tokens = tokens_each
                clients.open()
                await asyncio.sleep(max(0.0, started + life_s * number / config.streams - time.monotonic()))
            return await self._measure(lambda: self._clients.num_tokens > 0)

    async def requests(self) -> LoadFigures:
        clients = self._clients
        clients.is_replacing = True
        clients.max_tokens = 2
        async with _stepping_at(self._nodes, 200.0):
            clients.open(self._config.pending_requests)
            return await self._measure(lambda: clients.num_finished > 0)

    async def end_streams(self) -> None:
        self._clients.is_replacing = False
        self._clients.cancel_all()
        await asyncio.sleep(self._config.settle_s)

    @asynccontextmanager
    async def _stepping_when_read(self) -> AsyncIterator[None]:
        """A context in which each node steps as soon as few enough of its tokens are unread."""
        loop = asyncio.get_running_loop()
        due: set[RelayNode] = set()

        def step(node: RelayNode) -> None:
            due.discard(node)
            if is_on and node.num_running and node.unread <= (_STEPS_UNREAD - 1) * node.num_running:
                node.step()
                wake(node)

        def wake(node: RelayNode) -> None:
            if node not in due and node.unread <= (_STEPS_UNREAD - 1) * node.num_running:
                due.add(node)
                loop.call_soon(step, node)

        async def look() -> None:
            while True:  # a node without running requests is not woken by readers
                for node in self._nodes.decoding:
                    wake(node)
                await asyncio.sleep(0.01)

        is_on = True
        looking = asyncio.create_task(look())
        for node in self._nodes.decoding:
            node.on_read = wake
        try:
            yield
        finally:
            is_on = False
            looking.cancel()
            for node in self._nodes.decoding:
                node.on_read = None

    async def _measure(self, has_result: Callable[[], bool]) -> LoadFigures:
        """Measure all rounds. A round in which nothing came lasts until `has_result`: its rate is low, and not 0."""
        clients, router = self._clients, self.router
        await asyncio.sleep(self._config.settle_s)
        rounds = []
        for _ in range(self._config.rounds):
            gc.collect()
            # Tokens that were delayed by the collection, or by the end of the last round, are not measured.
            await asyncio.sleep(self._config.settle_s / 4)
            clients.reset_counts()
            started, router_cpu, load_cpu = time.monotonic(), router.cpu_s(), time.process_time()
            await asyncio.sleep(self._config.round_s)
            await clients.wait_until(has_result)
            clients.raise_failure()
            took = time.monotonic() - started
            rounds.append(
                _Round(
                    tokens_per_s=clients.num_tokens / took,
                    requests_per_s=clients.num_finished / took,
                    refused_per_s=clients.num_refused / took,
                    tokens_per_message=clients.num_tokens / max(1, clients.num_messages),
                    p50=_quantile(clients.latencies, 0.5),
                    p99=_quantile(clients.latencies, 0.99),
                    router_cpu=(router.cpu_s() - router_cpu) / took,
                    load_cpu=(time.process_time() - load_cpu) / took,
                )
            )
        return _figures(rounds)


@asynccontextmanager
async def _stepping_at(nodes: RelayNodes, steps_per_s: float) -> AsyncIterator[None]:
    """A context in which each node steps at this rate, at different times."""
    loop = asyncio.get_running_loop()
    rng = Random(0)
    timers: dict[RelayNode, asyncio.TimerHandle] = {}

    def step(node: RelayNode, due: float) -> None:
        node.step()
        timers[node] = loop.call_at(due + 1 / steps_per_s, step, node, due + 1 / steps_per_s)

    start = loop.time()
    for node in nodes.decoding:
        due = start + rng.random() / steps_per_s
        timers[node] = loop.call_at(due, step, node, due)
    try:
        yield
    finally:
        for timer in timers.values():
            timer.cancel()


@dataclass(frozen=True, slots=True)
class _Round:
    tokens_per_s: float
    requests_per_s: float
    refused_per_s: float
    tokens_per_message: float
    p50: float
    p99: float
    router_cpu: float
    load_cpu: float


def _figures(rounds: Sequence[_Round]) -> LoadFigures:
    return LoadFigures(
        tokens_per_s=Spread.of([turn.tokens_per_s for turn in rounds]),
        requests_per_s=Spread.of([turn.requests_per_s for turn in rounds]),
        refused_per_s=median(turn.refused_per_s for turn in rounds),
        tokens_per_message=median(turn.tokens_per_message for turn in rounds),
        latency_ms_p50=Spread.of([turn.p50 for turn in rounds], 1e3),
        latency_ms_p99=Spread.of([turn.p99 for turn in rounds], 1e3),
        router_cpu=median(turn.router_cpu for turn in rounds),
        load_cpu=median(turn.load_cpu for turn in rounds),
    )


def _quantile(values: array[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _endpoint(config: RouterBenchConfig, addresses: Ready) -> GrpcEndpoint | HttpEndpoint:
    if config.front == "grpc":
        return GrpcEndpoint(Target("baton", addresses.address, connections=config.connections))
    if config.front == "http":
        return HttpEndpoint(Target("openai", addresses.http_address, "/v1/completions"))
    raise ConfigError(f"front {config.front!r} is unknown; use grpc or http")


def placement_us(descriptions: Sequence[NodeDescription], num_reports: int, rounds: int = 500) -> Spread:
    """Microseconds to choose nodes for one request by predicted cost.

    The request has 1,024 tokens that no node has cached. Before each choice `num_reports` nodes report a step, in turn.
    """
    view, placer, rng = ClusterView(), Placer(), Random(0)
    view.registered([node_record(node, 1.0, lease_s=60.0) for node in descriptions])
    step = StepFigures(10.0, 512, 16, 16_000)
    took = []
    for node in descriptions:
        view.attached(node, 0.0)
        placer.on_attached(node)
    turns = cycle(descriptions)
    for number in range(rounds):
        now = number * num_reports / len(descriptions)
        for node in islice(turns, num_reports):
            report = StepReport((), LoadReport(running=rng.randrange(16)), step=step)
            placer.on_report(node.incarnation, report, now)
            view.reported(node.incarnation, report.load)
        prompt = [rng.randrange(descriptions[0].vocab_size) for _ in range(1024)]
        params, model = SamplingParams(max_tokens=256), descriptions[0].model
        request = ValidRequest(prompt, params, request_id=str(number), model=model)
        started = time.perf_counter()
        choice = placer.choose(view.candidates(), request, frozenset(), 1, 0.0, now)
        placer.placed(choice, now)
        took.append(time.perf_counter() - started)
        view.dispatched(choice.placement.decode.incarnation, AttemptKey(str(number), 1))
        placer.end(request.request_id)
    return Spread.of(took, 1e6)
