"""Router and nodes on hosts of their own, over a network whose links are cut, dead in one direction, or slow."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from baton.messages.node_report import KV_PROBE_FAILED, TraceEvent
from baton.messages.operator import ClusterStatus
from baton.processes.fork_server import ForkedProcess
from baton.registry.embedded import find_redis_server
from baton.v1 import operator_pb2
from tests.support.command_on_host import start_on_host
from tests.support.hosts import Hosts, NotPermitted, hosts
from tests.support.process_cluster import BOUND_S, ClusterSession
from tests.support.slow_model import FLAGS, STEP_TIMES, assert_undisturbed, slow_request

PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
_PAUSE_S = 0.05
PORT, OPERATOR_PORT, REDIS_PORT, GUEST_PORT = 7000, 7001, 7002, 7003
ENVIRONMENT = {
    **STEP_TIMES,
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "v0",
    "UCX_TCP_USER_TIMEOUT": "3s",
    "OMP_NUM_THREADS": "1",
}


Process = subprocess.Popen[bytes] | ForkedProcess


class HostsCluster:
    """The processes of a cluster on five hosts, without a supervisor."""

    def __init__(self, network: Hosts, directory: Path, model: Path) -> None:
        self.network = network
        self._directory = directory
        self._model = model
        self._stack = ExitStack()

    def __enter__(self) -> HostsCluster:
        address = self.network.address
        redis = [str(find_redis_server()), "--port", str(REDIS_PORT), "--bind", address("router"), "--save", ""]
        self._start_redis([*redis, "--protected-mode", "no"])
        common = self._common
        front = ["--router-id", "router-0", "--grpc-port", str(PORT), "--operator-port", str(OPERATOR_PORT)]
        # Every request goes over both hosts, even where one node alone would be cheaper.
        settings = [*common, "--host", address("router"), "--runner", "simulated", "--placement", "least-loaded"]
        words = ["router", *settings, *front]
        self._start("router", words)
        for name in (*PREFILL, *DECODE):
            self._start(name, self._node(name, name, PORT))
        return self

    @property
    def _common(self) -> list[str]:
        registry = f"redis://{self.network.address('router')}:{REDIS_PORT}"
        return ["--registry", registry, "--model", str(self._model), "--insecure"]

    def _node(self, name: str, host: str, port: int) -> list[str]:
        place = ["--node-id", name, "--host", self.network.address(host), "--port", str(port)]
        return ["node", *self._common, "--role", name.partition("-")[0], *place, *FLAGS]

    def _start_redis(self, command: list[str]) -> None:
        log = self._directory / "redis.log"
        with open(log, "wb") as output:
            redis = subprocess.Popen(self.network.command("router", command), stdout=output, stderr=output)
        self._stack.callback(_end, redis)
        _wait_until_ready(log, redis)

    def _start(self, host: str, words: list[str]) -> None:
        self._stack.callback(_end, self._run(host, host, words, ENVIRONMENT))

    def _run(self, host: str, name: str, words: list[str], environment: Mapping[str, str]) -> Process:
        log = self._directory / f"{name}.log"
        with open(log, "wb") as output:
            process = start_on_host(self.network.namespace(host), words, {**os.environ, **environment}, output)
        _wait_until_ready(log, process)
        return process

    @contextmanager
    def guest(self, name: str, host: str, environment: Mapping[str, str]) -> Iterator[None]:
        """One more node on a host, with other settings of its environment."""
        words = self._node(name, host, GUEST_PORT)
        process = self._run(host, name, words, {**ENVIRONMENT, **environment})
        try:
            yield
        finally:
            _end(process)

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def nodes(self, role: str) -> tuple[str, ...]:
        return PREFILL if role == "prefill" else DECODE

    def process(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(address=f"{self.network.address(name)}:{PORT}")

    def tracebacks(self) -> dict[str, str]:
        """First lines with a traceback in the logs."""
        logs = {log.stem: log.read_text(errors="replace").splitlines() for log in self._directory.glob("*.log")}
        found = {name: [line for line in lines if "Traceback" in line] for name, lines in logs.items()}
        return {name: lines[0][:2000] for name, lines in found.items() if lines}


def _wait_until_ready(log: Path, process: Process) -> None:
    while b"ready" not in (seen := log.read_bytes()).lower():
        assert process.poll() is None, seen.decode()
        time.sleep(_PAUSE_S)


def _end(process: Process) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(BOUND_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


class HostsSession(ClusterSession):
    """A client and operator of the cluster."""

    async def wait_until_whole(self) -> ClusterStatus:
        """Wait until the router uses every node."""
        return await self.wait_for_status(lambda status: sum(node.status == "Ready" for node in status.nodes) == 5)

    async def latest_attempt(self, name: str, request_id: str) -> int:
        """The number of the attempt that a node works on. The first read behind a host that was unplugged may meet its
        old connection, and cost the first attempt."""
        return max(event.attempt.attempt for event in await self.trace(name, request_id))

    async def told(self, name: str, request_id: str, attempt: int) -> list[TraceEvent]:
        """The events of one attempt that a node keeps, oldest first."""
        return [event for event in await self.trace(name, request_id) if event.attempt.attempt == attempt]

    async def prefill_node(self, request_id: str, attempt: int) -> str:
        """The name of the prefill node of a request's attempt, by the router: a throttled node may be too slow to say
        it before the client takes it for dead."""
        asked = operator_pb2.ListRequestsRequest(request_id=request_id)
        (row,) = (await self._operator.ListRequests(asked, timeout=BOUND_S)).requests
        assert row.attempts == attempt
        name: str = row.prefill_node
        return name


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[HostsCluster]:
    try:
        with hosts(f"bt{os.getpid() % 10_000}", ("router", *PREFILL, *DECODE)) as network:
            with HostsCluster(network, tmp_path_factory.mktemp("hosts"), model) as cluster:
                yield cluster
            assert cluster.tracebacks() == {}
    except NotPermitted as why:
        pytest.skip(f"no network namespaces here: {why}")


@pytest.fixture
async def session(spread: HostsCluster) -> AsyncIterator[HostsSession]:
    """The cluster; all processes run and are idle before a test and after it."""
    router = spread.network.address("router")
    async with (
        grpc.aio.insecure_channel(f"{router}:{PORT}") as public,
        grpc.aio.insecure_channel(f"{router}:{OPERATOR_PORT}") as private,
    ):
        opened = HostsSession(spread, public, private)  # type: ignore[arg-type]
        await opened.wait_until_whole()
        await opened.wait_until_idle()
        yield opened
        await opened.wait_until_whole()
        await opened.wait_until_idle()
        after = slow_request(f"after-{os.urandom(4).hex()}", chunks=1)
        assert_undisturbed(await opened.generate(after), after)


def test_each_set_of_hosts_has_a_network_of_its_own() -> None:
    number = os.getpid() % 10_000
    try:
        with hosts(f"a{number}b", ("one",)) as first, hosts(f"b{number}a", ("one",)) as second:
            assert first.address("one") != second.address("one")
    except NotPermitted as why:
        pytest.skip(f"no network namespaces here: {why}")


async def test_an_undisturbed_cluster_gives_the_expected_tokens(session: HostsSession) -> None:
    requests = [slow_request(f"plain-{i}", chunks=2, sampled=bool(i % 2)) for i in range(4)]
    for answer, request in zip(await asyncio.gather(*map(session.generate, requests)), requests, strict=True):
        assert_undisturbed(answer, request)
        assert (answer.end.path.attempts, answer.end.kv_bytes > 0) == (1, True)


async def test_a_node_whose_data_network_nobody_reaches_is_named_before_any_request(
    session: HostsSession, spread: HostsCluster
) -> None:
    """Its messages take the network of the hosts, its transfer agent listens on the loopback device: a common mistake,
    with which handshakes succeed."""

    def details(status: ClusterStatus) -> dict[str, str]:
        return {node.name: node.detail for node in status.nodes if node.detail.startswith(KV_PROBE_FAILED)}

    with spread.guest("prefill-lo", PREFILL[0], {"UCX_NET_DEVICES": "lo"}):
        status = await session.wait_for_status(lambda status: len(details(status)) == 3)
        seen = details(status)
        assert set(seen) == {"prefill-lo", *DECODE}
        assert all("could not read known bytes of prefill-lo" in detail for detail in seen.values())
        requests = [slow_request(f"beside-{i}", chunks=2, sampled=bool(i % 2)) for i in range(6)]
        for answer, request in zip(await asyncio.gather(*map(session.generate, requests)), requests, strict=True):
            assert_undisturbed(answer, request)
            assert answer.end.path.prefill_node in PREFILL
    await session.wait_for_status(lambda status: not details(status))


async def test_a_decode_node_is_unplugged_while_it_reads(session: HostsSession, spread: HostsCluster) -> None:
    request = slow_request("unplugged", chunks=6, sampled=True)
    answering = asyncio.create_task(session.generate(request, BOUND_S))
    name = await session.wait_for_event("decode", "read_done", "unplugged")
    attempt = await session.latest_attempt(name, "unplugged")
    with spread.network.unplugged(name):
        answer = await answering
        assert_undisturbed(answer, request)
        assert answer.end.path.attempts > attempt
        assert answer.end.path.decode_node != name
    await session.wait_until_whole()
    assert "kv_arrived" not in [event.name for event in await session.told(name, "unplugged", attempt)]


async def test_a_read_from_a_host_that_never_returns_ends(session: HostsSession, spread: HostsCluster) -> None:
    """Until the read ends it may write, so its blocks are kept."""
    request = slow_request("vanished")
    with ExitStack() as slow:
        for name in PREFILL:
            slow.enter_context(spread.network.throttled(name, "40kbit"))
        answering = asyncio.create_task(session.generate(request, BOUND_S))
        # The first chunk fits into what a throttled host sends at once, the second is on its way for seconds.
        decode = await session.wait_for_event("decode", "read_started", "vanished", 2)
        attempt = await session.latest_attempt(decode, "vanished")
        prefill = await session.prefill_node("vanished", attempt)
        with spread.network.unplugged(prefill):
            assert_undisturbed(await answering, request)
            await session.wait_until_idle(decode)
            told = [event.name for event in await session.told(decode, "vanished", attempt)]
            assert told.index("quarantined") < told.index("quarantine_released")
            assert "kv_arrived" not in told


@pytest.mark.parametrize("deaf", ["prefill", "decode"])
async def test_a_pair_of_nodes_whose_link_is_dead_in_one_direction(
    session: HostsSession, spread: HostsCluster, deaf: str
) -> None:
    """Both nodes still reach the router. `deaf`: the node that gets nothing from the other one."""
    request = slow_request(f"deaf-{deaf}", chunks=6, sampled=True)
    answering = asyncio.create_task(session.generate(request, BOUND_S))
    decode = await session.wait_for_event("decode", "read_done", request.request_id)
    attempt = await session.latest_attempt(decode, request.request_id)
    prefill = await session.prefill_node(request.request_id, attempt)
    with ExitStack() as cut:
        if deaf != "decode":
            cut.enter_context(spread.network.blackhole(decode, prefill))
        if deaf != "prefill":
            cut.enter_context(spread.network.blackhole(prefill, decode))
        answer = await answering
        assert_undisturbed(answer, request)
        assert answer.end.path.attempts > attempt
        reader = await session.told(decode, request.request_id, attempt)
        assert "kv_arrived" not in [event.name for event in reader]
        assert [event.detail for event in reader if event.name == "kv_failed"] == ["peer_gone"]
        sender = await session.told(prefill, request.request_id, attempt)
        assert "lease_suspect" in [event.name for event in sender]


async def test_a_slow_link_fails_no_request(session: HostsSession, spread: HostsCluster) -> None:
    request = slow_request("slow", chunks=4)
    with spread.network.throttled(PREFILL[0], "400kbit"), spread.network.throttled(PREFILL[1], "400kbit"):
        answers = await asyncio.gather(
            *(session.generate(one, BOUND_S) for one in (request, slow_request("slow-2", chunks=4)))
        )
    assert_undisturbed(answers[0], request)
    assert [(answer.end.path.attempts, answer.end.kv_bytes > 0) for answer in answers] == [(1, True), (1, True)]
