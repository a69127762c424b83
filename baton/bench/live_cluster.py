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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from baton.bench.arrangement import Arrangement
from baton.client import OperatorClient
from baton.errors import ConfigError
from baton.messages.node import NodeDescription
from baton.messages.node_report import TraceEvent
from baton.messages.operator import NodeStatus
from baton.models.resolve import FoundModel
from baton.wire.clients.node_client import NodeClient

_ANY_PROMPT = str(1 << 30)
_UP = """
import runpy, sys
from baton.processes.parent import die_with
die_with(int(sys.argv.pop(1)))
runpy.run_module("baton.cli.main", run_name="__main__", alter_sys=True)
"""
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
    command = [sys.executable, "-c", _UP, str(os.getpid()), "up", "--run-dir", run_dir, "-o", "json"]
    command += ["--grpc-port", "0", "--http-port", "0", "--placement", "least-loaded", *flags]
    process = subprocess.Popen(
        command,
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
