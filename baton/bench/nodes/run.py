"""A load on a cluster that this process starts or finds, with its nodes watched."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.bench.compare.arrangement import Arrangement
from baton.bench.compare.pinning import pin_nodes
from baton.bench.live_cluster import live_cluster
from baton.bench.nodes.find import FoundCluster
from baton.bench.nodes.samples import NodeSamples, impossible_spans
from baton.bench.nodes.watch import NodeWatch
from baton.bench.result_file import Result
from baton.bench.serve.report import serve_result
from baton.bench.serve.run import LoadPlan, LoadRun, OnProgress, run_load
from baton.bench.slo import Slo


@dataclass(frozen=True, slots=True)
class NodesRun:
    """What came of it."""

    run: LoadRun
    samples: Mapping[str, NodeSamples]
    impossible_spans: int


@contextmanager
def started(arrangement: Arrangement, model_dir: Path, dtype: str) -> Iterator[FoundCluster]:
    """The arrangement on this machine, every node on a core of its own while there are enough."""
    words = ["--model", str(model_dir), "--dtype", dtype, "--threads", "1", *arrangement.words()]
    with live_cluster(*words) as cluster:
        nodes = cluster.nodes()
        pin_nodes(nodes, sorted(os.sched_getaffinity(0)))
        yield FoundCluster(cluster.grpc_address, nodes)


def run_watched(cluster: FoundCluster, plan: LoadPlan, on_progress: OnProgress) -> NodesRun:
    """Run the load; raises BatonError and Unreachable."""
    with NodeWatch(cluster.nodes) as watch:
        run = run_load(plan, on_progress)
    return NodesRun(run, watch.samples, impossible_spans(run.outcomes))


def nodes_result(
    plan: LoadPlan, ran: NodesRun, slo: Slo | None, percentiles: Sequence[float], label: str, created: str
) -> Result:
    """The file's content: that of `baton bench serve`, with the nodes."""
    result = serve_result(plan, ran.run, slo, percentiles, label, created)
    measured = result["arrangements"][0]["rates"][0]
    measured["node_metrics"] = {name: one.to_json(ran.run.began_s) for name, one in ran.samples.items()}
    return result | {"kind": "nodes", "impossible_spans": ran.impossible_spans}
