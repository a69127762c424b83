"""Starts every arrangement on the same cores, puts the same load on each in turn, and compares them.

All clusters run the whole time. A cluster without requests sleeps, so the measured one has the cores to itself, and
switching between clusters costs nothing. Disturbances of the machine affect all of them alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from baton.bench.arrangement import Arrangement
from baton.bench.compare.interleaved import CompareConfig, InterleavedRuns, MeasuredArrangement, Report, default_slo
from baton.bench.live_cluster import LiveCluster, arrangement_flags, live_cluster, model_flags
from baton.bench.load.endpoint import Target
from baton.bench.load.probe import probe
from baton.bench.nodes.find import FoundCluster
from baton.bench.nodes.run import run_watched
from baton.bench.pinning import pin_nodes
from baton.bench.results.slo import Slo
from baton.bench.results.summary import Summary
from baton.clock import SystemClock
from baton.errors import BatonError

_STOP_S = 30.0
"""Part of the time budget that is kept for stopping everything and writing the result."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All measurements of a comparison."""

    slo: Slo
    undisturbed: Summary
    """Summary of single requests on the first arrangement."""
    measured: Sequence[MeasuredArrangement]
    failure: BatonError | None = None
    """What ended it early: Cancelled by Ctrl-C, or an arrangement went away. Earlier measurements are kept."""


def compare(config: CompareConfig, report: Report) -> Comparison:
    """Measures all arrangements; raises BatonError if that fails before anything was measured."""
    clock = SystemClock()
    deadline_s = clock.monotonic() + config.budget_s - _STOP_S
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        measured, targets, clusters = [], [], []
        for arrangement in config.arrangements:
            report(f"starting {arrangement}")
            cluster = stack.enter_context(_cluster(config, arrangement))
            clusters.append(FoundCluster(cluster.grpc_address, cluster.nodes()))
            measured.append(MeasuredArrangement(arrangement, pin_nodes(clusters[-1].nodes, cores)))
            targets.append(probe(Target("baton", cluster.grpc_address, connections=2)).target)
        runs = InterleavedRuns(
            *(config, measured, targets, report, deadline_s, clock),
            lambda number, plan: run_watched(clusters[number], plan),
        )
        undisturbed = runs.calibrate()
        slo = config.slo or default_slo(undisturbed, config.ttft_factor)
        report(f"SLO {', '.join(f'{name} {value:.1f}' for name, value in slo.to_json().items())}")
        failure = runs.search_all(slo, undisturbed)
    return Comparison(slo, undisturbed, measured, failure)


@contextmanager
def _cluster(config: CompareConfig, arrangement: Arrangement) -> Iterator[LiveCluster]:
    words = [*model_flags(config.model_dir, config.dtype), "--threads", "1", *arrangement_flags(arrangement)]
    with live_cluster(*words, *config.up_flags) as cluster:
        yield cluster
