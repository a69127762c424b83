"""Runs a load on a cluster and watches the nodes meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from baton.bench.live_cluster import FoundCluster
from baton.bench.load.report import serve_result
from baton.bench.load.run import LoadPlan, LoadRun, OnProgress, run_load
from baton.bench.nodes.timeline import NodeSamples, NodeTimeline, impossible_spans
from baton.bench.results.result_file import Result
from baton.bench.results.summary import Slo
from baton.errors import BatonError
from baton.messages.operator import NodeStatus
from baton.security.access import default_access
from baton.wire.clients.node_client import NodeClient
from baton.wire.credentials import Dialer

# Polls every node for its load and its latest steps, on a thread of its own.


_PERIOD_S = 0.5
_TIMEOUT_S = 2.0


class NodeWatch:
    """A context manager that polls nodes until it exits; `samples` and `timelines` are by node name."""

    def __init__(self, nodes: Sequence[NodeStatus]) -> None:
        self.samples: Mapping[str, NodeSamples] = {node.name: NodeSamples(node.role) for node in nodes}
        self.timelines: Mapping[str, NodeTimeline] = {node.name: NodeTimeline() for node in nodes}
        self._addresses = {node.name: node.address for node in nodes}
        # The thread does not inherit context variables, so the credentials are read here.
        self._dialer = Dialer.to_nodes(default_access.get())
        self._is_watching = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def __enter__(self) -> NodeWatch:
        self._thread.start()
        self._is_watching.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._watch())
        finally:
            self._is_watching.set()

    async def _watch(self) -> None:
        is_over = False
        clients = {name: NodeClient(address, self._dialer) for name, address in self._addresses.items()}
        try:
            await asyncio.gather(*(self._skip_earlier_steps(name, client) for name, client in clients.items()))
            self._is_watching.set()
            while True:
                await asyncio.gather(*(self._poll(name, client) for name, client in clients.items()))
                if is_over:
                    return
                is_over = await asyncio.to_thread(self._stop.wait, _PERIOD_S)
        finally:
            for client in clients.values():
                await client.close()

    async def _poll(self, name: str, client: NodeClient) -> None:
        timeline, samples = self.timelines[name], self.samples[name]
        try:
            report = await client.describe(_TIMEOUT_S)
            if samples.incarnations and report.node.incarnation != samples.incarnations[-1]:
                timeline.restart()
            samples.add(time.monotonic(), report)
            trace = await client.trace_steps(timeline.after, timeline.steps_after, _TIMEOUT_S)
        except BatonError:
            samples.misses += 1
            return
        timeline.add(time.monotonic(), trace)

    async def _skip_earlier_steps(self, name: str, client: NodeClient) -> None:
        with suppress(BatonError):
            self.timelines[name].skip(await client.trace_steps(0, 0, _TIMEOUT_S))


@dataclass(frozen=True, slots=True)
class NodesRun:
    """The outcomes of a load, and what the nodes did meanwhile."""

    run: LoadRun
    samples: Mapping[str, NodeSamples]
    timelines: Mapping[str, NodeTimeline]
    impossible_spans: int

    def busy_shares(self) -> dict[str, dict[str, float]]:
        """For each node, the share of the run that went into each kind of step."""
        began_s = self.run.began_s
        return {
            name: timeline.busy_shares(began_s, began_s + self.run.duration_s)
            for name, timeline in self.timelines.items()
        }

    def timeline_rows(self) -> dict[str, list[list[Any]]]:
        """The timelines of a result file; times count from the workload's start."""
        return {name: timeline.rows(self.run.began_s) for name, timeline in self.timelines.items()}


def run_watched(cluster: FoundCluster, plan: LoadPlan, on_progress: OnProgress = lambda _: None) -> NodesRun:
    """Runs the load; raises BatonError and Unreachable."""
    with NodeWatch(cluster.nodes) as watch:
        run = run_load(plan, on_progress)
    return NodesRun(run, watch.samples, watch.timelines, impossible_spans(run.outcomes))


def nodes_result(
    plan: LoadPlan, ran: NodesRun, slo: Slo | None, percentiles: Sequence[float], label: str, created: str
) -> Result:
    """The result file's content: that of `baton bench serve`, with the nodes' metrics and timelines."""
    result = serve_result(plan, ran.run, slo, percentiles, label, created)
    measured = result["arrangements"][0]["rates"][0]
    measured["node_metrics"] = {name: samples.to_json(ran.run.began_s) for name, samples in ran.samples.items()}
    measured["timeline"] = ran.timeline_rows()
    return result | {"kind": "nodes", "impossible_spans": ran.impossible_spans}
