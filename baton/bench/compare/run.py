"""Starts every arrangement on the same cores, puts the same load on one after the other, and compares.

All clusters run the whole time: one that has nothing to do sleeps, so who is measured has the cores to itself, and
taking turns costs nothing. What the machine does meanwhile hits all of them alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from baton.bench.arrangement import Arrangement
from baton.bench.compare.turns import CompareConfig, Measured, Note, Turns, default_slo
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
"""Of the time that there is: for stopping everything, and for writing the result."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it."""

    slo: Slo
    undisturbed: Summary
    """Single requests on the first arrangement."""
    measured: Sequence[Measured]
    failure: BatonError | None = None
    """What ended it early: Cancelled by Ctrl-C, or an arrangement went away. What was measured before is there."""


def compare(config: CompareConfig, say: Note) -> Comparison:
    """Measure; raises BatonError before there is anything to keep."""
    clock = SystemClock()
    deadline_s = clock.monotonic() + config.budget_s - _STOP_S
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        measured, targets, clusters = [], [], []
        for arrangement in config.arrangements:
            say(f"starting {arrangement}")
            cluster = stack.enter_context(_cluster(config, arrangement))
            clusters.append(FoundCluster(cluster.grpc_address, cluster.nodes()))
            measured.append(Measured(arrangement, pin_nodes(clusters[-1].nodes, cores)))
            targets.append(probe(Target("baton", cluster.grpc_address, connections=2)).target)
        turns = Turns(
            *(config, measured, targets, say, deadline_s, clock),
            lambda number, plan: run_watched(clusters[number], plan),
        )
        undisturbed = turns.calibrate()
        slo = config.slo or default_slo(undisturbed, config.ttft_factor)
        say(f"SLO {', '.join(f'{name} {value:.1f}' for name, value in slo.to_json().items())}")
        failure = turns.search_all(slo, undisturbed)
    return Comparison(slo, undisturbed, measured, failure)


@contextmanager
def _cluster(config: CompareConfig, arrangement: Arrangement) -> Iterator[LiveCluster]:
    words = [*model_flags(config.model_dir, config.dtype), "--threads", "1", *arrangement_flags(arrangement)]
    with live_cluster(*words, *config.up_flags) as cluster:
        yield cluster
