"""Starts every arrangement on the same cores, puts the same load on one after the other, and compares.

All clusters run the whole time: one that has nothing to do sleeps, so who is measured has the cores to itself, and
taking turns costs nothing. What the machine does meanwhile hits all of them alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.bench.compare.arrangement import Arrangement
from baton.bench.compare.pinning import pin_nodes
from baton.bench.compare.search import GoodputSearch
from baton.bench.live_cluster import LiveCluster, live_cluster
from baton.bench.serve.endpoint import Target
from baton.bench.serve.probe import probe
from baton.bench.serve.run import LoadPlan, LoadRun, run_load
from baton.bench.slo import Slo
from baton.bench.summary import Summary, summarize
from baton.bench.workloads.spec import WorkloadSpec
from baton.errors import BatonError, Cancelled

_CALIBRATION_REQUESTS = 6
_WARM_UPS = 2
_TAIL_S = 2.0
"""A run may take so much longer than its arrivals, and half as long again: what has no end then was not good."""

_AROUND_S = 3.0
"""What a run takes beside its arrivals: starting its generator, and its last answers."""
_LEAST_ROUNDS = 2
_MOST_RUNS = 1 << 20
"""Of one comparison: two with different seeds have no load in common."""

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CompareConfig:
    """What to compare, and how long."""

    arrangements: Sequence[Arrangement]
    model_dir: Path
    dtype: str
    workload: WorkloadSpec
    """Its rate and number of requests are chosen here."""
    slo: Slo | None
    """None: twice the undisturbed time per output token, and `ttft_factor` times the undisturbed first token."""
    ttft_factor: float = 5.0
    attainment: float = 0.9
    """Share of the offered requests that must keep the SLO."""
    repeats: int = 3
    run_s: float = 10.0
    most_tries: int = 7
    budget_s: float = float("inf")
    """Nothing more is tried that would not end by then; two rates of each arrangement are tried in any case."""
    least_prompts: int = 10
    """Of a run, however low its rate."""
    up_flags: Sequence[str] = ()
    """More flags of `baton up`, for all of them."""


@dataclass(frozen=True, slots=True)
class RateRun:
    """One run at one rate."""

    repeat: int
    rate: float
    summary: Summary
    run: LoadRun
    kept_from: float = 0.9
    """The attainment that was asked for."""


@dataclass(slots=True)
class Measured:
    """All runs of one arrangement."""

    arrangement: Arrangement
    cores: Mapping[str, int]
    goodputs: list[float] = field(default_factory=list)
    """Of each repetition, requests per second."""
    runs: list[RateRun] = field(default_factory=list)
    common: list[RateRun] = field(default_factory=list)
    """Of each repetition, at the rate that all arrangements are compared at."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it."""

    slo: Slo
    undisturbed: Summary
    """Single requests on the first arrangement."""
    measured: Sequence[Measured]
    was_interrupted: bool


def compare(config: CompareConfig, say: Note) -> Comparison:
    """Measure; raises BatonError."""
    began = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        measured, targets = [], []
        for arrangement in config.arrangements:
            say(f"starting {arrangement.name}")
            cluster = stack.enter_context(_cluster(config, arrangement))
            measured.append(Measured(arrangement, pin_nodes(cluster.nodes(), cores)))
            targets.append(probe(Target("baton", cluster.grpc_address, connections=2)).target)
        bench = _Bench(config, measured, targets, say, began)
        undisturbed = bench.calibrate()
        slo = config.slo or default_slo(undisturbed, config.ttft_factor)
        say(f"SLO {', '.join(f'{name} {value:.1f}' for name, value in slo.to_json().items())}")
        was_interrupted = bench.search_all(slo, undisturbed)
    return Comparison(slo, undisturbed, measured, was_interrupted)


def default_slo(undisturbed: Summary, ttft_factor: float) -> Slo:
    """From what a single request takes."""
    return Slo(undisturbed["median_ttft_ms"] * ttft_factor, undisturbed["median_tpot_ms"] * 2)


def first_rate(undisturbed: Summary, nodes: int) -> float:
    """Half of what the nodes could do if requests did not disturb each other, and shared nothing."""
    return float(0.5 * nodes / max(1e-3, undisturbed["median_e2el_ms"] / 1e3))


def prompts_of(rate: float, run_s: float, least: int) -> int:
    """Requests of a run: enough for a share of them to mean something, also at a low rate."""
    return max(least, round(rate * run_s))


def seed_of(comparison: int, run: int) -> int:
    """Of a run's load, from the comparison's seed. The same twice would ask for prompts that caches know by now."""
    return comparison * _MOST_RUNS + run


def expected_s(rates: Sequence[float], run_s: float, least: int) -> float:
    """What runs at these rates take, one after the other."""
    return sum(prompts_of(rate, run_s, least) / rate + _AROUND_S for rate in rates)


@contextmanager
def _cluster(config: CompareConfig, arrangement: Arrangement) -> Iterator[LiveCluster]:
    words = ["--model", str(config.model_dir), "--dtype", config.dtype, "--threads", "1", *arrangement.words()]
    with live_cluster(*words, *config.up_flags) as cluster:
        yield cluster


class _Bench:
    """Runs loads, one at a time."""

    def __init__(
        self, config: CompareConfig, measured: Sequence[Measured], targets: Sequence[Target], say: Note, began: float
    ) -> None:
        self._config = config
        self._measured = measured
        self._targets = targets
        self._say = say
        self._began = began
        """On the monotonic clock."""
        self._num_runs = 0

    def calibrate(self) -> Summary:
        """Single requests, one after the other; every arrangement is warm afterwards."""
        summaries = []
        for number, target in enumerate(self._targets):
            count = 1 if number else _CALIBRATION_REQUESTS
            workload = replace(self._config.workload, num_prompts=count, seed=self._next_seed())
            plan = LoadPlan(target, workload, max_concurrency=1, num_warmups=_WARM_UPS)
            summaries.append(_checked(run_load(plan)))
        return summaries[0]

    def search_all(self, slo: Slo, undisturbed: Summary) -> bool:
        """Repetitions, each a search on every arrangement, step by step in turn. True if Ctrl-C ended it."""
        longest = 0.0
        for repeat in range(self._config.repeats):
            since = time.monotonic()
            if repeat and since + longest - self._began > self._config.budget_s:
                self._say(f"out of time after {repeat} of {self._config.repeats} repetitions")
                break
            try:
                self._search(repeat, slo, undisturbed)
            except Cancelled:
                return True
            longest = max(longest, time.monotonic() - since)
        return False

    def _search(self, repeat: int, slo: Slo, undisturbed: Summary) -> None:
        config, measured = self._config, self._measured
        searches = []
        for one in measured:
            known = sorted(one.goodputs)[len(one.goodputs) // 2] if one.goodputs else 0.0
            rate = known or first_rate(undisturbed, one.arrangement.nodes)
            searches.append(GoodputSearch(rate, most_tries=config.most_tries))
        rounds = 0
        while any(not search.is_over for search in searches) and (
            rounds < _LEAST_ROUNDS or self._has_time_for(searches)
        ):
            rounds += 1
            for number, search in enumerate(searches):
                if not search.is_over:
                    ran = self._run(number, repeat, search.rate, slo)
                    measured[number].runs.append(ran)
                    search.tried(ran.summary["attainment"] >= config.attainment)
        for one, search in zip(measured, searches, strict=True):
            one.goodputs.append(search.goodput)
        rate = common_rate([search.goodput for search in searches], searches[0].bound)
        for number, one in enumerate(measured):
            one.common.append(self._run(number, repeat, rate, slo))

    def _has_time_for(self, searches: Sequence[GoodputSearch]) -> bool:
        """For one more round of them, and for the runs at one common rate that follow."""
        config = self._config
        rates = [search.rate for search in searches if not search.is_over]
        common = [common_rate([search.goodput for search in searches], searches[0].bound)] * len(searches)
        takes_s = expected_s([*rates, *common], config.run_s, config.least_prompts)
        return time.monotonic() + takes_s <= self._began + config.budget_s

    def _run(self, number: int, repeat: int, rate: float, slo: Slo) -> RateRun:
        config = self._config
        count = prompts_of(rate, config.run_s, config.least_prompts)
        workload = replace(config.workload, request_rate=rate, num_prompts=count, seed=self._next_seed())
        limit_s = 1.5 * count / rate + _TAIL_S
        run = run_load(LoadPlan(self._targets[number], workload, limit_s=limit_s))
        if run.was_interrupted:
            raise Cancelled("interrupted")
        if run.is_unreachable:
            raise BatonError(f"{self._measured[number].arrangement.name} went away during a run")
        summary = summarize(run.outcomes, run.duration_s, slo, offered=count)
        self._say(
            f"{repeat + 1}. {self._measured[number].arrangement.name} at {rate:.2f}/s: "
            f"{summary['attainment']:.0%} kept it, P99 TTFT {summary['p99_ttft_ms']:.0f} ms, "
            f"P99 TPOT {summary['p99_tpot_ms']:.1f} ms, P99 gap {summary['p99_largest_gap_ms']:.0f} ms"
        )
        return RateRun(repeat, rate, summary, run, config.attainment)

    def _next_seed(self) -> int:
        self._num_runs += 1
        return seed_of(self._config.workload.seed, self._num_runs)


def common_rate(goodputs: Sequence[float], lowest_broken: float) -> float:
    """Where all are compared: what the weakest keeps, or if that is nothing, what it did not keep."""
    weakest = min(goodputs)
    return weakest or min([lowest_broken, *(goodput for goodput in goodputs if goodput)])


def _checked(run: LoadRun) -> Summary:
    if run.was_interrupted:
        raise KeyboardInterrupt
    summary = summarize(run.outcomes, run.duration_s)
    if not summary["completed"]:
        raise BatonError(f"no request was answered: {next(iter(run.outcomes.errors), 'no error either')}")
    return summary
