"""A cluster of real processes, started with `baton up`, with a client, an operator and the view of the kernel."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import grpc

from baton.cli.cluster.run_dir import RunDir
from baton.cli.cluster.state import ClusterState, ProcessState
from baton.errors import NodeLost, Unreachable
from baton.messages.node import LoadReport
from baton.messages.node_report import TraceEvent
from baton.messages.operator import ClusterStatus
from baton.v1 import operator_pb2, operator_pb2_grpc
from baton.wire.clients.node_client import NodeClient
from baton.wire.codec.operator import CLUSTER_STATUS
from tests.support.caller import Caller
from tests.support.forked_commands import BatonProcess, run_baton
from tests.support.reports import QueuedReports

BOUND_S = 100.0
"""The longest wait, in seconds: far beyond what anything takes, also on a busy machine."""
_PAUSE_S = 0.05
"""Seconds between two polls, so that polling takes no core from the processes."""


class ProcessCluster:
    """The processes of one `baton up`, named as in `baton status`."""

    def __init__(self, run_dir: Path, environment: Mapping[str, str]) -> None:
        self._run_dir = RunDir(run_dir)
        # Several clusters run side by side, and commands start more.
        defaults = {"BATON_HTTP_PORT": "0", "BATON_PLACEMENT": "least-loaded", "BATON_KV_CACHE_MEMORY": "32MiB"}
        self._environment = {**os.environ, **defaults, **environment}

    def baton(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the command on this cluster."""
        place = ["--run-dir", str(self._run_dir.path)]
        pipe = subprocess.PIPE
        return run_baton([*words, *place], self._environment, stdout=pipe, stderr=pipe, timeout=BOUND_S)

    @contextmanager
    def running(self, *flags: str, as_program: bool = False) -> Iterator[None]:
        """Run `baton up` for the time of the `with` block; as a program, its fork server is its own, too."""
        words = ["up", *flags, "-o", "json", "--run-dir", str(self._run_dir.path)]
        with self.log.open("wb") as stderr:
            supervisor = BatonProcess(
                words, self._environment, as_program=as_program, stdout=subprocess.PIPE, stderr=stderr
            )
        with supervisor, ExitStack() as stack:
            # One that hangs would be waited for; its processes end with it.
            stack.callback(supervisor.kill)
            assert supervisor.stdout is not None
            started = supervisor.stdout.readline()
            assert started, self.log.read_text()
            try:
                yield
            finally:
                stopped = self.baton("down", "--timeout", "60", "--force")
                assert stopped.returncode == 0, stopped.stderr
                assert supervisor.wait(BOUND_S) <= 0, self.log.read_text()

    @property
    def run_dir(self) -> Path:
        return self._run_dir.path

    @property
    def log(self) -> Path:
        """What the supervisor prints."""
        return self._run_dir.path.with_name(f"{self._run_dir.path.name}.log")

    @property
    def state(self) -> ClusterState:
        """The state that the supervisor wrote last."""
        state = self._run_dir.read_state()
        assert state is not None, "no cluster is running"
        return state

    def tracebacks(self) -> dict[str, str]:
        """Return the first traceback in the log of each process; a fault outside a process must cause none."""
        found = {}
        for log in (self.log, *sorted((self._run_dir.path / "logs").glob("*.log"))):
            before, traceback, after = log.read_text(errors="replace").partition("Traceback")
            if traceback:
                found[log.stem] = before.rpartition("\n")[2] + traceback + after[:3000]
        return found

    def process(self, name: str) -> ProcessState:
        """Return the state of one process."""
        return next(process for process in self.state.processes if process.name == name)

    def nodes(self, role: str) -> list[str]:
        """Return the names of the nodes of a role."""
        return [process.name for process in self.state.processes if process.role == role]

    def signal(self, name: str, number: signal.Signals) -> ProcessState:
        """Send a signal; return the state of the process just before."""
        process = self.process(name)
        os.kill(process.pid, number)
        return process

    @contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        """Stop a process (SIGSTOP) for the time of the `with` block."""
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[ClusterSession]:
        """Yield connections for one test."""
        state = self.state
        async with (
            grpc.aio.insecure_channel(state.grpc_address) as public,
            grpc.aio.insecure_channel(state.operator_address) as private,
        ):
            yield ClusterSession(self, public, private)


class ClusterSession(Caller):
    """Calls to a running cluster, for the time of one test."""

    def __init__(self, cluster: ProcessCluster, public: grpc.aio.Channel, private: grpc.aio.Channel) -> None:
        self.cluster = cluster
        self.channel = public
        self._operator = operator_pb2_grpc.OperatorStub(private)

    async def status(self) -> ClusterStatus:
        """Return the status of the cluster as its router sees it.

        A router that ends cancels the calls at its operator port; then its successor is asked. Raises TimeoutError.
        """
        async with asyncio.timeout(BOUND_S):
            while True:
                try:
                    return CLUSTER_STATUS.from_pb(
                        await self._operator.GetStatus(operator_pb2.GetStatusRequest(), wait_for_ready=True)
                    )
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.CANCELLED:
                        raise

    async def wait_for_status(self, condition: Callable[[ClusterStatus], bool]) -> ClusterStatus:
        """Ask the router for the status until the condition holds; return that status."""
        found = await self.status()
        async with asyncio.timeout(BOUND_S):
            while not condition(found):
                await asyncio.sleep(_PAUSE_S)
                found = await self.status()
        return found

    async def wait_until_whole(self) -> ClusterStatus:
        """Wait until the router uses every process that the supervisor runs."""

        def is_whole(status: ClusterStatus) -> bool:
            processes = self.cluster.state.processes
            wanted = {p.incarnation for p in processes if p.role != "redis" and p.status == "Ready"}
            ready = {node.incarnation for node in status.nodes if node.status == "Ready"}
            return status.health == "ok" and ready == wanted and all(p.status == "Ready" for p in processes)

        return await self.wait_for_status(is_whole)

    async def wait_until_replaced(self, before: ProcessState) -> ProcessState:
        """Wait until a killed process is replaced and the cluster is whole; return the new process."""

        def is_replaced(_: ClusterStatus) -> bool:
            now = self.cluster.process(before.name)
            return now.pid not in (0, before.pid) and now.status == "Ready"

        await self.wait_for_status(is_replaced)
        await self.wait_until_whole()
        now = self.cluster.process(before.name)
        assert now.restarts > before.restarts
        return now

    async def trace(self, name: str, request_id: str = "") -> list[TraceEvent]:
        """Return the events that a node keeps, oldest first; only those of one request if it is given."""
        client = NodeClient(self.cluster.process(name).address)
        try:
            events = await client.trace()
        finally:
            await client.close()
        return [event for event in events if request_id in ("", event.attempt.request_id)]

    async def wait_for_event(self, role: str, event: str, request_id: str, count: int = 1) -> str:
        """Wait until a node of the role has recorded the event `count` times; return the name of the node."""
        watches = [
            asyncio.create_task(self._watch(name, event, request_id, count), name=name)
            for name in self.cluster.nodes(role)
        ]
        try:
            async with asyncio.timeout(BOUND_S):
                done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, name: str, event: str, request_id: str, count: int) -> str:
        client = NodeClient(self.cluster.process(name).address)
        last, found = 0, 0
        try:
            while found < count:
                for one in await client.trace(last):
                    last = one.seq
                    found += one.name == event and one.attempt.request_id == request_id
                await asyncio.sleep(_PAUSE_S)
            return name
        finally:
            await client.close()

    async def wait_until_idle(self, *names: str) -> None:
        """Wait until these nodes (default: all) run nothing and lease, quarantine and use no block."""
        async with asyncio.timeout(BOUND_S):
            for name in names or (*self.cluster.nodes("prefill"), *self.cluster.nodes("decode")):
                while True:
                    if await self._has_become_idle(name):
                        break
                    await asyncio.sleep(_PAUSE_S)

    async def _has_become_idle(self, name: str) -> bool:
        """Wait until a node is idle. False if it is gone: a node killed a moment ago still counts as ready."""
        client = NodeClient(self.cluster.process(name).address)
        try:
            stream = QueuedReports(await client.attach("test-watch"))
            try:
                async for report in stream:
                    if is_idle(report.load):
                        return True
            finally:
                await stream.close()
        except (NodeLost, Unreachable):
            pass
        finally:
            await client.close()
        return False


def is_idle(load: LoadReport) -> bool:
    """Whether every block is free (or only cached) and nothing runs or waits."""
    busy = load.running or load.waiting or load.waiting_for_remote_kvs
    return not busy and load.free_blocks == load.total_blocks and not (load.leased_blocks or load.quarantined_blocks)


@contextmanager
def process_cluster(
    run_dir: Path,
    model: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    as_program: bool = False,
) -> Iterator[ProcessCluster]:
    """Run `baton up` with these flags; on exit stop everything and check that no log has a traceback."""
    cluster = ProcessCluster(run_dir, environment or {})
    words = ("--grpc-port", "0", "--http-port", "0", "--model", str(model), *flags)
    with cluster.running(*words, as_program=as_program):
        yield cluster
    found = cluster.tracebacks()
    assert not found, "\n\n".join(f"{name}: {text}" for name, text in found.items())


def wait_until_ended(pids: Sequence[int], act: Callable[[], None]) -> None:
    """Call `act` and return once all these processes have ended, whatever their parent."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        act()
        for pid, descriptor in zip(pids, descriptors, strict=True):
            readable, _, _ = select.select([descriptor], [], [], BOUND_S)
            assert readable, f"process {pid} lives on"
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a signal that was sent to a process is still pending."""
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool((int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)) >> (number - 1) & 1)
