"""A load on a cluster that this process starts or finds, with its nodes watched."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.arrangement import Arrangement
from baton.bench.live_cluster import arrangement_flags, live_cluster
from baton.bench.load.report import serve_result
from baton.bench.load.run import LoadPlan, LoadRun, OnProgress, run_load
from baton.bench.nodes.find import FoundCluster
from baton.bench.nodes.samples import NodeSamples, impossible_spans
from baton.bench.nodes.timeline import NodeTimeline
from baton.bench.nodes.watch import NodeWatch
from baton.bench.pinning import pin_nodes
from baton.bench.results.result_file import Result
from baton.bench.results.slo import Slo


@dataclass(frozen=True, slots=True)
class NodesRun:
    """What came of it."""

    run: LoadRun
    samples: Mapping[str, NodeSamples]
    timelines: Mapping[str, NodeTimeline]
    impossible_spans: int

    def busy(self) -> dict[str, dict[str, float]]:
        """Of each node, the share of the run that went into each kind of step."""
        began_s = self.run.began_s
        return {name: one.busy(began_s, began_s + self.run.duration_s) for name, one in self.timelines.items()}

    def timeline_rows(self) -> dict[str, list[list[Any]]]:
        """For a result file, with times from the workload's begin on."""
        return {name: one.rows(self.run.began_s) for name, one in self.timelines.items()}


@contextmanager
def started(arrangement: Arrangement, model_dir: Path, dtype: str) -> Iterator[FoundCluster]:
    """The arrangement on this machine, every node on a core of its own while there are enough."""
    words = ["--model", str(model_dir), "--dtype", dtype, "--threads", "1", *arrangement_flags(arrangement)]
    with live_cluster(*words) as cluster:
        nodes = cluster.nodes()
        pin_nodes(nodes, sorted(os.sched_getaffinity(0)))
        yield FoundCluster(cluster.grpc_address, nodes)


def run_watched(cluster: FoundCluster, plan: LoadPlan, on_progress: OnProgress = lambda _: None) -> NodesRun:
    """Run the load; raises BatonError and Unreachable."""
    with NodeWatch(cluster.nodes) as watch:
        run = run_load(plan, on_progress)
    return NodesRun(run, watch.samples, watch.timelines, impossible_spans(run.outcomes))


def nodes_result(
    plan: LoadPlan, ran: NodesRun, slo: Slo | None, percentiles: Sequence[float], label: str, created: str
) -> Result:
    """The file's content: that of `baton bench serve`, with the nodes."""
    result = serve_result(plan, ran.run, slo, percentiles, label, created)
    measured = result["arrangements"][0]["rates"][0]
    measured["node_metrics"] = {name: one.to_json(ran.run.began_s) for name, one in ran.samples.items()}
    measured["timeline"] = ran.timeline_rows()
    return result | {"kind": "nodes", "impossible_spans": ran.impossible_spans}
