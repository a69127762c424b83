"""Runs loads on real nodes in interleaved segments, and simulates the same loads.

The speed of a machine changes over time: memory is slow for a minute, or other processes compute. Therefore each load
is measured in several segments, with single requests and the other loads in between, so that all loads see the same
changes. A segment starts when other processes are idle, if that happens soon. A segment that other processes disturbed
is measured again while there is time, and left out if there is another one.
Arrivals and lengths are the same, live and simulated; `predict` says what else the simulator knows.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from baton.bench.config import ValidateConfig
from baton.bench.experiment import Experiment
from baton.bench.live_cluster import pinned_cluster, processes_of
from baton.bench.load.endpoint import Target
from baton.bench.load.probe import probe
from baton.bench.load.run import LoadPlan
from baton.bench.nodes.run import NodesRun, run_watched
from baton.bench.results.outcome import Outcomes
from baton.bench.simulator.config import SimulatedSpeculation
from baton.bench.validate.fit import Fitted
from baton.bench.validate.predict import MAX_BACKGROUND_SHARE, LoadPair, Means, Predictor, Segment, speculation_of
from baton.bench.workloads.spec import WorkloadSpec
from baton.errors import BatonError, Cancelled, DeadlineExceeded
from baton.messages.node import NodeDescription
from baton.processes.process_stat import PROC, TICKS_PER_S, ProcessStat

# Measures how much of this machine's cores other processes use during a measurement.


_MOMENT_S = 0.5


class BackgroundLoad(Protocol):
    """CPU use of all processes that are neither the cluster's nor this one."""

    def mark(self) -> None:
        """Starts counting."""
        ...

    def share(self) -> float:
        """Share of the cores' time since `mark`, 0 to 1."""
        ...

    def watch(self) -> float:
        """Waits for a moment without a measurement, and returns the share of the cores' time in it."""
        ...


class ProcBackgroundLoad:
    """Reads /proc: the time that all cores were busy, minus that of the cluster and of this process."""

    def __init__(self, pids: Sequence[int], cores: Collection[int], read: Callable[[str], str] | None = None) -> None:
        """`pids`: the cluster's processes. `read`: reads a file under /proc. This process and its children that have
        ended are not background load either."""
        self._pids = [*pids, os.getpid()]
        self._cores = cores
        self._read = read or (lambda name: (PROC / name).read_text(encoding="utf-8"))
        self._marked = (0.0, 0, 0)
        self.mark()

    def mark(self) -> None:
        self._marked = self._now()

    def share(self) -> float:
        (then_s, busy_then, own_then), (now_s, busy, own) = self._marked, self._now()
        ticks = max(1.0, (now_s - then_s) * TICKS_PER_S) * len(self._cores)
        return min(1.0, max(0.0, (busy - busy_then) - (own - own_then)) / ticks)

    def watch(self) -> float:
        self.mark()
        time.sleep(_MOMENT_S)
        return self.share()

    def _now(self) -> tuple[float, int, int]:
        own = 0
        for pid in self._pids:
            with suppress(OSError):
                own += ProcessStat.parse(self._read(f"{pid}/stat")).cpu_ticks_with_children
        return time.monotonic(), busy_ticks(self._read("stat"), self._cores), own


def busy_ticks(stat: str, cores: Collection[int]) -> int:
    """Ticks that these cores were busy, from /proc/stat; with time that a hypervisor gave to other guests."""
    busy = 0
    for line in stat.splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _waiting, interrupts, soft_interrupts, stolen = map(int, values[:8])
            busy += user + nice + system + interrupts + soft_interrupts + stolen
    return busy


_SINGLE_REQUESTS = 4
"""Requests in a segment of single requests."""
_WARM_UPS = 3
_OVERHEAD_S = 1.5
"""Time of a segment beside its arrivals and its last answers: starting its generator."""
_MAX_LOOKS = 30
"""How often the machine is looked at before a segment starts although other processes compute."""
_WAIT_SHARE = 0.02
"""Largest share of the time left that is spent waiting for other processes to become idle."""
_MAX_TRIES = 3
"""How often a segment is measured."""
_SIMULATING_S = 15.0
_STOP_S = 8.0
"""Time that stopping a cluster takes."""
_MIN_PROMPTS = 4
_MAX_PROMPTS = 600
"""Largest number of requests of a load. More do not change the means, and other models need the time."""
_CAPACITY_S = 8.0
"""Shortest run that measures the capacity, in seconds,"""
_CAPACITY_SINGLES = 4
"""and in times of a single request."""
_CAPACITY_OPEN = 8
"""Open requests while the capacity is measured."""
_CAPACITY_PROMPTS = 100_000
_PREPARATION_SHARE = 0.25
"""Largest share of the time left for each run before the loads."""


@dataclass(frozen=True, slots=True)
class Validated:
    """The validation of one model."""

    config: ValidateConfig
    single: Means
    steps: Fitted
    """Step times fitted to all loads."""
    drafts: SimulatedSpeculation | None
    """The drafts of all loads; None: nodes drafted nothing."""
    pairs: Sequence[LoadPair]
    failure: BatonError | None = None
    """What ended it early."""
    shapes: Mapping[str, str] = field(default_factory=dict)
    """The shapes of the nodes, by role."""


def validate(config: ValidateConfig, experiment: Experiment) -> Validated:
    """Measures and simulates until the deadline; raises BatonError if that fails before anything was measured."""
    experiment.report(f"{config.name}: starting {config.arrangement}")
    with pinned_cluster(
        config.arrangement, config.model, config.dtype, *config.up_flags, threads=config.threads_per_node
    ) as cluster:
        pids = processes_of([process.pid for process in cluster.live.processes()])
        background = ProcBackgroundLoad(pids, sorted(os.sched_getaffinity(0)))
        descriptions = {node.role: cluster.live.describe(node) for node in cluster.nodes}
        target = probe(Target("baton", cluster.grpc_address, connections=2)).target
        load = partial(run_watched, cluster)
        time_left = replace(experiment, deadline_s=experiment.deadline_s - _STOP_S)
        return Validation(config, descriptions, target, load, background, time_left).run()


class Validation:
    """Measures one model's cluster. `load` runs a load on it, like `run_watched`."""

    def __init__(
        self,
        config: ValidateConfig,
        descriptions: Mapping[str, NodeDescription],
        target: Target,
        load: Callable[[LoadPlan], NodesRun],
        background: BackgroundLoad,
        experiment: Experiment,
    ) -> None:
        self._config = config
        self._descriptions = descriptions
        self._target = target
        self._run_load = load
        self._background = background
        self._report = experiment.report
        self._clock = experiment.clock
        self._deadline_s = experiment.deadline_s - _SIMULATING_S
        self._num_runs = 0
        self._singles: list[Segment] = []
        self._by_rate: dict[float, list[Segment]] = {}

    def run(self) -> Validated:
        """Measures all loads, then simulates them; raises BatonError if that fails before anything was measured."""
        config = self._config
        self._single(num_warmups=_WARM_UPS)
        failure: BatonError | None = None
        try:
            self._measure_loads(answered_per_s(self._closed_loop().outcomes))
        except BatonError as error:
            if not self._by_rate:
                raise
            failure = error
        except KeyboardInterrupt:
            failure = Cancelled("interrupted")
        predictor = Predictor(config.arrangement, self._descriptions, self._singles)
        pairs = predictor.pairs(self._by_rate)
        shapes = {role: str(node.shape) for role, node in self._descriptions.items()}
        alone = Means.of(*(segment.outcomes for segment in self._singles))
        drafts = speculation_of([segment for segments in self._by_rate.values() for segment in segments])
        return Validated(config, alone, predictor.fit_all(self._by_rate), drafts, pairs, failure, shapes)

    def _measure_loads(self, capacity: float) -> None:
        config = self._config
        rates = [share * capacity for share in config.loads]
        # Each round starts with another load.
        turns = [[*rates[first:], *rates[:first]] for first in (number % len(rates) for number in range(config.rounds))]
        while turns:
            try:
                self._round(turns)
            except DeadlineExceeded as error:
                if len(self._by_rate) < len(rates):
                    raise
                self._report(f"out of time; using what was measured: {error}")
                return
            del turns[0]
        self._repeat_disturbed(rates)

    def _round(self, turns: Sequence[list[float]]) -> None:
        """Measures the first of the rounds that are left."""
        self._single()
        while turns[0]:
            rate = turns[0][0]
            self._segment(rate, self._arrivals_s(rate, turns))
            del turns[0][0]

    def _repeat_disturbed(self, rates: Sequence[float]) -> None:
        """Measures disturbed segments again while there is time, the loads in turn."""
        for _ in range((_MAX_TRIES - 1) * self._config.rounds):
            for rate in rates:
                segments = self._by_rate[rate]
                arrivals_s = (segments[-1].workload.num_prompts or 0) / rate
                has_time = self._clock.monotonic() + arrivals_s + _OVERHEAD_S + self._tail_s() <= self._deadline_s
                if has_time and sum(segment.is_undisturbed for segment in segments) < self._config.rounds:
                    self._segment(rate, arrivals_s)

    def _arrivals_s(self, rate: float, turns: Sequence[Sequence[float]]) -> float:
        """Seconds of arrivals for the next segment. A low load gets more, since it has fewer requests per second."""
        left = [rate_left for turn in turns for rate_left in turn]
        singles_s = (len(turns) - 1) * (_SINGLE_REQUESTS * self._single_s() + _OVERHEAD_S)
        overhead_s = len(left) * (_OVERHEAD_S + self._tail_s())
        left_s = self._deadline_s - self._clock.monotonic() - singles_s - overhead_s
        return min(
            self._config.run_s / self._config.rounds,
            left_s / math.sqrt(rate) / sum(1 / math.sqrt(rate_left) for rate_left in left),
        )

    def _segment(self, rate: float, arrivals_s: float) -> None:
        config = self._config
        count = min(round(rate * arrivals_s), _MAX_PROMPTS // config.rounds)
        if count < _MIN_PROMPTS:
            raise DeadlineExceeded(f"{config.name}: {arrivals_s:.0f} s are too short a run at {rate:.2f} requests/s")
        workload = replace(config.workload, request_rate=rate, num_prompts=count)
        segment = self._measured(workload, limit_s=2 * arrivals_s + 4 * self._tail_s())
        self._by_rate.setdefault(rate, []).append(segment)
        means = Means.of(segment.outcomes)
        self._report(
            f"{config.name} at {rate:.2f}/s: {len(segment.outcomes)} of {count} requests, "
            f"mean TTFT {means.ttft_ms:.1f} ms, TPOT {means.tpot_ms:.2f} ms"
            + (
                ""
                if segment.is_undisturbed
                else f"; other processes used {segment.background_share:.0%} of the machine"
            )
        )

    def _single(self, num_warmups: int = 0) -> None:
        workload = replace(self._config.workload, num_prompts=_SINGLE_REQUESTS, request_rate=float("inf"))
        self._singles.append(
            self._measured(workload, max_concurrency=1, num_warmups=num_warmups, limit_s=self._preparation_s())
        )

    def _closed_loop(self) -> Segment:
        """Measures the capacity."""
        limit_s = min(max(_CAPACITY_S, _CAPACITY_SINGLES * self._single_s()), self._preparation_s())
        workload = replace(self._config.workload, num_prompts=_CAPACITY_PROMPTS, request_rate=float("inf"))
        return self._measured(workload, max_concurrency=_CAPACITY_OPEN, limit_s=limit_s)

    def _single_s(self) -> float:
        """Latency of a single request."""
        run = self._singles[0].live.run
        return run.duration_s / max(1, len(run.outcomes))

    def _tail_s(self) -> float:
        """Time that a segment may take after its last arrival."""
        return 2 * self._single_s()

    def _preparation_s(self) -> float:
        """Time that a run before the loads may take."""
        return max(1.0, _PREPARATION_SHARE * (self._deadline_s - self._clock.monotonic()))

    def _measured(
        self, workload: WorkloadSpec, limit_s: float, max_concurrency: int | None = None, num_warmups: int = 0
    ) -> Segment:
        workload = replace(workload, seed=workload.seed + self._num_runs)
        self._num_runs += 1
        plan = LoadPlan(
            self._target, workload, max_concurrency=max_concurrency, num_warmups=num_warmups, limit_s=limit_s
        )
        self._wait_until_others_are_idle()
        self._background.mark()
        ran = self._run_load(plan)
        ran.run.check(f"{self._config.arrangement} went away during a run")
        return Segment(workload, ran, self._background.share(), max_concurrency)

    def _wait_until_others_are_idle(self) -> None:
        now_s = self._clock.monotonic()
        until_s = now_s + _WAIT_SHARE * (self._deadline_s - now_s)
        for _ in range(_MAX_LOOKS):
            if self._background.watch() <= MAX_BACKGROUND_SHARE or self._clock.monotonic() >= until_s:
                return


def answered_per_s(outcomes: Outcomes) -> float:
    """Answers per second of a closed loop, from its first answer on; raises BatonError if there are fewer than two."""
    ended_s = outcomes.finished_s[outcomes.is_complete]
    if len(ended_s) < 2:
        raise BatonError(f"{len(ended_s)} requests were answered: {next(iter(outcomes.errors), 'too slow')}")
    return float((len(ended_s) - 1) / max(1e-3, ended_s.max() - ended_s.min()))
