"""Starts a cluster of real processes for a benchmark: `baton up` in a temporary run directory."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.bench.arrangement import Arrangement
from baton.client import OperatorClient
from baton.errors import ConfigError
from baton.messages.cluster import NodeStatus
from baton.messages.node import NodeDescription
from baton.messages.node_report import TraceEvent
from baton.models.resolve import FoundModel
from baton.wire.clients.node_client import NodeClient

_ANY_PROMPT = str(1 << 30)


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
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as run_dir:
        ports = ("--grpc-port", "0", "--http-port", "0")
        # Benchmarks measure the way over both nodes, also where one node alone would be cheaper.
        words = (*ports, "--placement", "least-loaded", *flags)
        up = _baton("up", "--detach", "--run-dir", run_dir, "-o", "json", *words, environment=environment)
        if up.returncode:
            raise ConfigError(f"baton up failed: {up.stderr.strip().removeprefix('baton: ')}")
        state: dict[str, Any] = json.loads(up.stdout)
        try:
            logs = {process["name"]: Path(process["log"]) for process in state["processes"]}
            yield LiveCluster(state["grpc_address"], state["operator_address"], state["http_address"], logs)
        finally:
            _baton("down", "--run-dir", run_dir)


def _baton(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.cli.main", *arguments]
    settings = {**os.environ, **(environment or {})}
    return subprocess.run(command, env=settings, capture_output=True, text=True, check=False)


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
