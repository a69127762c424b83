"""Starts a cluster of real processes for a benchmark: `baton up` in a temporary run directory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from baton.bench.arrangement import Arrangement
from baton.client import OperatorClient
from baton.errors import BatonError, ConfigError, Unreachable
from baton.messages.node import NodeDescription
from baton.messages.node_report import TraceEvent
from baton.messages.operator import NodeStatus
from baton.models.resolve import FoundModel
from baton.processes.ends import ending_with_us
from baton.processes.process_stat import PROC, process_stat
from baton.registry.connection import with_authority
from baton.registry.registry import Registry
from baton.security.access import default_access
from baton.wire.clients.node_client import NodeClient

_ANY_PROMPT = str(1 << 30)
_DRAIN_S = 60.0
"""The longest time that a cluster may take to end after a benchmark."""
_AT_ONCE_S = 3.0
"""The same after a benchmark that failed or was interrupted: whoever interrupted it may soon kill it."""


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """Addresses of a running cluster, and what it says of its nodes."""

    grpc_address: str
    operator_address: str
    http_address: str = ""
    logs: Mapping[str, Path] = field(default_factory=dict)
    """The logs of its processes by their names; gone when the cluster has ended."""

    def nodes(self) -> Sequence[NodeStatus]:
        """Lists prefill and decode nodes."""
        return [process for process in self.processes() if process.role != "router"]

    def processes(self) -> Sequence[NodeStatus]:
        """Lists nodes and routers."""
        client = OperatorClient(self.operator_address)
        try:
            return client.status().nodes
        finally:
            client.close()

    def describe(self, node: NodeStatus) -> NodeDescription:
        """Asks the node for its description."""
        return asyncio.run(_describe(node.address))

    def trace(self, node: NodeStatus) -> Sequence[TraceEvent]:
        """Asks the node for its latest trace events."""
        return asyncio.run(_trace(node.address))


async def _describe(address: str) -> NodeDescription:
    client = NodeClient(address)
    try:
        return (await client.describe()).node
    finally:
        await client.close()


async def _trace(address: str) -> Sequence[TraceEvent]:
    client = NodeClient(address)
    try:
        return await client.trace()
    finally:
        await client.close()


@contextmanager
def live_cluster(*flags: str, environment: Mapping[str, str] | None = None) -> Iterator[LiveCluster]:
    """Runs `baton up` with these flags on free ports; on exit all its processes have ended. Raises ConfigError.

    `environment`: environment variables for settings that `baton up` has no flags for.
    """
    with live_clusters(flags, environment=environment) as (cluster,):
        yield cluster


@contextmanager
def live_clusters(
    *flags: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[Sequence[LiveCluster]]:
    """Runs a cluster for each of these lists of flags, as `live_cluster` does; all of them start at the same time.

    A supervisor is killed when this process ends, also during its start. It is in a process group of its own: a Ctrl-C
    ends the benchmark, which may still ask its nodes. Must be called on the main thread, whose end the kernel watches.
    """
    ups: list[_Up] = []
    at_once = True
    with ExitStack() as folders:
        try:
            for some in flags:
                folder = tempfile.TemporaryDirectory(prefix="baton-bench-", ignore_cleanup_errors=True)
                ups.append(_start(folders.enter_context(folder), some, environment or {}))
            yield [_await_ready(up) for up in ups]
            at_once = False
        finally:
            _end(ups, at_once=at_once)


class _Up(NamedTuple):
    """A `baton up` in the foreground, and the file of what it writes to stderr."""

    process: subprocess.Popen[str]
    errors: IO[str]


def _start(run_dir: str, flags: Sequence[str], environment: Mapping[str, str]) -> _Up:
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (`_end` closes it)
    # Benchmarks measure the way over both nodes, also where one node alone would be cheaper.
    command = [sys.executable, "-P", "-m", "baton.cli.main", "up", "--run-dir", run_dir, "-o", "json"]
    command += ["--grpc-port", "0", "--http-port", "0", "--placement", "least-loaded", *flags]
    process = subprocess.Popen(
        ending_with_us(command),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        process_group=0,
    )
    return _Up(process, errors)


def _await_ready(up: _Up) -> LiveCluster:
    """Wait for the document that `baton up` prints when the cluster is ready. Raises ConfigError if it ends first."""
    document = ""
    assert up.process.stdout is not None
    for line in up.process.stdout:
        document += line
        with suppress(ValueError):  # its last line has not been read yet
            state: dict[str, Any] = json.loads(document)
            logs = {process["name"]: Path(process["log"]) for process in state["processes"]}
            return LiveCluster(state["grpc_address"], state["operator_address"], state["http_address"], logs)
    up.errors.seek(0)
    # Notes on the start come before the reason.
    reason = re.split(r"^baton: ", up.errors.read(), flags=re.MULTILINE)[-1]
    raise ConfigError(f"baton up failed: {reason.strip()}")


def _end(ups: Sequence[_Up], *, at_once: bool) -> None:
    """End clusters, `at_once` also if requests run. With a supervisor that is killed as too slow its processes die."""
    # Two different signals, since the kernel merges pending signals with the same number.
    numbers = (signal.SIGTERM, signal.SIGINT) if at_once else (signal.SIGTERM,)
    deadline = time.monotonic() + (_AT_ONCE_S if at_once else _DRAIN_S)
    try:
        for up in ups:
            for number in numbers:
                up.process.send_signal(number)
        for up in ups:
            with suppress(subprocess.TimeoutExpired):
                up.process.wait(max(deadline - time.monotonic(), 0.0))
    finally:
        for up in ups:
            up.process.kill()
            up.process.wait()
            assert up.process.stdout is not None
            up.process.stdout.close()
            up.errors.close()


def arrangement_flags(arrangement: Arrangement) -> list[str]:
    """The flags with which `baton up` starts an arrangement."""
    flags = ["--prefill", str(arrangement.prefill), "--decode", str(arrangement.decode), "--placement", "cost"]
    if arrangement.is_disaggregated:
        return [*flags, "--require-disaggregation", "on"]
    return [*flags, "--max-local-prefill-tokens", _ANY_PROMPT]


def model_flags(model: FoundModel, dtype: str) -> list[str]:
    """The flags with which `baton up` serves a model as it would by the name that a person gave."""
    flags = ["--model", str(model.directory), "--dtype", dtype]
    return [*flags, "--dequantize"] if model.dequantize else flags


# Pins node processes to cores, with the processes of a node's other ranks.


def pin_nodes(nodes: Sequence[NodeStatus], cores: Sequence[int], per_node: int = 1) -> dict[str, int]:
    """Pins each node to `per_node` of the cores, in turn, so that every arrangement has the same cores.

    Returns the first core of each node, by the node's name.
    """
    placed = {}
    for number, node in enumerate(sorted(nodes, key=lambda node: node.name)):
        own = [cores[position % len(cores)] for position in range(number * per_node, (number + 1) * per_node)]
        for pid in processes_of([node.pid]):
            _pin(pid, own)
        placed[node.name] = own[0]
    return placed


def processes_of(pids: Collection[int]) -> list[int]:
    """These processes and all that they have started, directly or not: the ranks of nodes, say."""
    children: dict[int, list[int]] = defaultdict(list)
    for path in PROC.iterdir():
        if path.name.isdigit():
            with suppress(OSError):  # it has ended
                children[process_stat(int(path.name)).parent].append(int(path.name))
    processes: dict[int, None] = {}
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in processes:
            processes[pid] = None
            waiting += children[pid]
    return list(processes)


def _pin(pid: int, cores: Collection[int]) -> None:
    """Pins all threads of a process; threads that start later inherit it."""
    pinned: set[str] = set()
    while True:
        try:
            tasks = {path.name for path in (PROC / str(pid) / "task").iterdir()}
        except FileNotFoundError:  # it has ended
            return
        if tasks <= pinned:
            return
        for task in tasks - pinned:
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task), cores)
        pinned |= tasks


# Finds a running cluster by a router's operator port, or in the registry that its hosts share.


@dataclass(frozen=True, slots=True)
class FoundCluster:
    """A running cluster that a load can be put on."""

    grpc_address: str
    """Address of a router."""
    nodes: Sequence[NodeStatus]


def find_by_operator(grpc_address: str, operator_address: str) -> FoundCluster:
    """The cluster as a router sees it; raises Unreachable."""
    with closing(OperatorClient(operator_address)) as client:
        return FoundCluster(grpc_address, [node for node in client.status().nodes if node.role != "router"])


def find_in_registry(url: str, cluster: str) -> FoundCluster:
    """The first router of the registry that answers, and all nodes on all hosts; raises Unreachable."""
    routers = asyncio.run(_routers(with_authority(url, default_access.get().tls_ca), cluster))
    for grpc_address, operator_address in routers:
        try:
            return find_by_operator(grpc_address, operator_address)
        except BatonError:
            continue
    raise Unreachable(f"no router of cluster {cluster!r} answers; the registry lists {len(routers)}")


async def _routers(url: str, cluster: str) -> list[tuple[str, str]]:
    registry = Registry.connect(url, cluster)
    try:
        await registry.ping()
        snapshot = await registry.read()
    finally:
        await registry.close()
    records = [record for record in snapshot.values() if record.role == "router" and record.operator_address]
    return [(record.address, record.operator_address) for record in sorted(records, key=lambda record: record.name)]


@dataclass(frozen=True, slots=True)
class PinnedCluster(FoundCluster):
    """A cluster that was started on this machine, with each node on cores of its own while there are enough."""

    live: LiveCluster
    cores: Mapping[str, int]
    """The first core of each node."""


@contextmanager
def pinned_cluster(
    arrangement: Arrangement, model: FoundModel, dtype: str, *flags: str, threads: int = 1
) -> Iterator[PinnedCluster]:
    """Starts the arrangement, with as many threads and cores for each node; `flags`: more of `baton up`."""
    words = [*model_flags(model, dtype), "--threads", str(threads), *arrangement_flags(arrangement), *flags]
    with live_cluster(*words) as live:
        nodes = live.nodes()
        cores = pin_nodes(nodes, sorted(os.sched_getaffinity(0)), threads)
        yield PinnedCluster(live.grpc_address, nodes, live, cores)
