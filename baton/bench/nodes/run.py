"""Runs a load on a cluster and watches the nodes meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from baton.bench.arrangement import Arrangement
from baton.bench.live_cluster import arrangement_flags, live_cluster, model_flags
from baton.bench.load.report import serve_result
from baton.bench.load.run import LoadPlan, LoadRun, OnProgress, run_load
from baton.bench.nodes.find import FoundCluster
from baton.bench.nodes.samples import NodeSamples, impossible_spans
from baton.bench.nodes.timeline import NodeTimeline
from baton.bench.nodes.watch import NodeWatch
from baton.bench.pinning import pin_nodes
from baton.bench.results.result_file import Result
from baton.bench.results.slo import Slo
from baton.models.resolve import FoundModel


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
        return {name: one.busy_shares(began_s, began_s + self.run.duration_s) for name, one in self.timelines.items()}

    def timeline_rows(self) -> dict[str, list[list[Any]]]:
        """The timelines of a result file; times count from the workload's start."""
        return {name: one.rows(self.run.began_s) for name, one in self.timelines.items()}


@contextmanager
def pinned_cluster(arrangement: Arrangement, model: FoundModel, dtype: str) -> Iterator[FoundCluster]:
    """Starts the arrangement on this machine, and pins each node to its own core while there are enough."""
    named = [*model_flags(model, dtype), "--model-name", model.name]
    words = [*named, "--threads", "1", *arrangement_flags(arrangement)]
    with live_cluster(*words) as cluster:
        nodes = cluster.nodes()
        pin_nodes(nodes, sorted(os.sched_getaffinity(0)))
        yield FoundCluster(cluster.grpc_address, nodes)


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
    measured["node_metrics"] = {name: one.to_json(ran.run.began_s) for name, one in ran.samples.items()}
    measured["timeline"] = ran.timeline_rows()
    return result | {"kind": "nodes", "impossible_spans": ran.impossible_spans}
