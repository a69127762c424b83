"""Starts every arrangement on the same cores, puts the same load on each in turn, and compares them.

First the steps of the arrangements are tuned, one cluster after the other (`baton.bench.compare.tuning`). Then all
clusters run the whole time. A cluster without requests sleeps, so the measured one has the cores to itself, and
switching between clusters costs nothing. Disturbances of the machine affect all of them alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from baton.bench.arrangement import Arrangement
from baton.bench.compare.interleaved import CompareConfig, InterleavedRuns, MeasuredArrangement, Report, default_slo
from baton.bench.compare.tuning import FIRST_SIZE, RunningArrangement, StartArrangement, Tuned, tune
from baton.bench.live_cluster import arrangement_flags, live_cluster, model_flags
from baton.bench.load.endpoint import Target
from baton.bench.load.probe import probe
from baton.bench.nodes.find import FoundCluster
from baton.bench.nodes.run import run_watched
from baton.bench.pinning import pin_nodes
from baton.bench.results.slo import Slo
from baton.bench.results.summary import Summary
from baton.clock import Clock, SystemClock
from baton.errors import BatonError

_STOP_S = 30.0
"""Part of the time budget that is kept for stopping everything and writing the result."""
_TUNING_SHARE = 0.4
"""Largest share of the time budget for tuning."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All measurements of a comparison."""

    slo: Slo
    undisturbed: Summary
    """Summary of single requests on the first arrangement."""
    measured: Sequence[MeasuredArrangement]
    failure: BatonError | None = None
    """What ended it early: Cancelled by Ctrl-C, or an arrangement went away. Earlier measurements are kept."""
    tuned: Sequence[Tuned] = ()
    """The arrangements whose steps were tuned."""


def compare(config: CompareConfig, report: Report) -> Comparison:
    """Measures all arrangements; raises BatonError if that fails before anything was measured."""
    clock = SystemClock()
    deadline_s = clock.monotonic() + config.budget_s - _STOP_S
    cores = sorted(os.sched_getaffinity(0))

    @contextmanager
    def start(arrangement: Arrangement, size: int) -> Iterator[RunningArrangement]:
        with _running(config, arrangement, size, cores) as running:
            yield running

    tuned = tune_all(config, report, clock, clock.monotonic() + config.budget_s * _TUNING_SHARE, start)
    with ExitStack() as stack:
        measured, running = [], []
        for arrangement in config.arrangements:
            report(f"starting {arrangement}")
            best = next((one.best for one in tuned if one.arrangement == arrangement), None)
            size = best.max_num_batched_tokens if best else config.max_num_batched_tokens or FIRST_SIZE
            running.append(stack.enter_context(start(arrangement, size)))
            measured.append(
                MeasuredArrangement(arrangement, running[-1].cores, size, first_rate=best.goodput if best else 0.0)
            )
        runs = InterleavedRuns(
            *(config, measured, [one.target for one in running], report, deadline_s, clock),
            lambda number, plan: running[number].run_load(plan),
        )
        undisturbed = runs.calibrate()
        slo = config.slo or next((one.slo for one in tuned if one.slo), default_slo(undisturbed, config.ttft_factor))
        report(f"SLO {', '.join(f'{name} {limit}' for name, limit in slo.texts().items())}")
        failure = runs.search_all(slo, undisturbed)
    return Comparison(slo, undisturbed, measured, failure, tuned)


def tune_all(
    config: CompareConfig, report: Report, clock: Clock, deadline_s: float, start: StartArrangement
) -> list[Tuned]:
    """Tunes the arrangements that are to be tuned, all for the same SLO."""
    if config.max_num_batched_tokens is not None:
        return []
    chosen = [one for one in config.arrangements if one.is_colocated or not config.is_baseline_tuned_alone]
    tuned: list[Tuned] = []
    for number, arrangement in enumerate(chosen):
        slo = config.slo or next((one.slo for one in tuned if one.slo), None)
        share_s = (deadline_s - clock.monotonic()) / (len(chosen) - number)
        tuned.append(tune(config, arrangement, slo, report, clock, clock.monotonic() + share_s, start))
    return tuned


@contextmanager
def _running(
    config: CompareConfig, arrangement: Arrangement, size: int, cores: Sequence[int]
) -> Iterator[RunningArrangement]:
    words = [*model_flags(config.model, config.dtype), "--threads", "1", *arrangement_flags(arrangement)]
    with live_cluster(*words, "--max-num-batched-tokens", str(size), *config.up_flags) as cluster:
        found = FoundCluster(cluster.grpc_address, cluster.nodes())
        pinned: Mapping[str, int] = pin_nodes(found.nodes, cores)
        target = probe(Target("baton", cluster.grpc_address, connections=2)).target
        yield RunningArrangement(target, pinned, lambda plan: run_watched(found, plan))
