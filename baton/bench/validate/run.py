"""Runs loads on real nodes in stretches that take turns, and puts beside them what is simulated.

Machines have moods: memory that is slow for a minute, somebody else who computes. So each load is asked for in several
stretches, with single requests and the other loads between them, and all of them see the same moods. Each begins in a
quiet moment, if one comes soon; one in which strangers took more than a little of the cores is measured again while
there is time, and left out if there is another.
Arrivals and lengths are the same, live and simulated; what the simulator is told is said in `predict`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from baton.bench.arrangement import Arrangement
from baton.bench.live_cluster import arrangement_flags, live_cluster, model_flags
from baton.bench.load.endpoint import Target
from baton.bench.load.probe import probe
from baton.bench.load.run import LoadPlan
from baton.bench.nodes.find import FoundCluster
from baton.bench.nodes.run import NodesRun, run_watched
from baton.bench.pinning import pin_nodes
from baton.bench.results.outcome import Outcomes
from baton.bench.validate.fit import Fitted
from baton.bench.validate.predict import QUIET, LoadPair, Means, Predictor, Stretch
from baton.bench.validate.strangers import ProcStrangers, Strangers
from baton.bench.workloads.spec import WorkloadSpec
from baton.clock import Clock
from baton.errors import BatonError, Cancelled, DeadlineExceeded, Unreachable
from baton.messages.node import NodeDescription

_SINGLE_REQUESTS = 4
"""At a time."""
_WARM_UPS = 3
_AROUND_S = 1.5
"""What a stretch takes beside its arrivals and its last answers: starting its generator."""
_LOOKS = 30
"""At the machine, before a stretch begins although others compute..."""
_PATIENCE_SHARE = 0.02
"""... for no more than this share of the time that is left."""
_TRIES = 3
"""For each stretch, at most."""
_SIMULATING_S = 15.0
_STOP_S = 8.0
"""What stopping a cluster takes."""
_LEAST_PROMPTS = 4
_MOST_PROMPTS = 600
"""Of a load. More change no mean; the time is another model's."""
_FULL_S = 8.0
_FULL_SINGLES = 4
_FULL_OPEN = 8
"""How long at least, also in times of a single request, and with how many open, it is asked for all that it can do."""
_FULL_PROMPTS = 100_000
_AHEAD_SHARE = 0.25
"""Of the time that is left, at most, for each run ahead of the loads."""

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ValidateConfig:
    """One model's part."""

    name: str
    model_dir: Path
    dtype: str
    workload: WorkloadSpec
    """Its rate and number of requests are chosen here."""
    arrangement: Arrangement
    loads: Sequence[float]
    """Shares of what the arrangement answers when it always has a few requests."""
    run_s: float
    """Seconds of arrivals at each, if there is time for them."""
    up_flags: Sequence[str] = ()
    rounds: int = 3
    """So many stretches has each load."""


@dataclass(frozen=True, slots=True)
class Validated:
    """One model."""

    config: ValidateConfig
    single: Means
    steps: Fitted
    """Of all loads."""
    pairs: Sequence[LoadPair]
    failure: BatonError | None = None
    """What ended it early."""


def validate(config: ValidateConfig, say: Note, clock: Clock, deadline_s: float) -> Validated:
    """Measure and simulate, until the deadline at most; raises BatonError before there is anything to keep."""
    say(f"{config.name}: starting {config.arrangement}")
    with _started(config) as (cluster, descriptions, strangers):
        target = probe(Target("baton", cluster.grpc_address, connections=2)).target
        load = partial(run_watched, cluster)
        return Bench(config, descriptions, target, load, strangers, say, clock, deadline_s - _STOP_S).run()


@contextmanager
def _started(config: ValidateConfig) -> Iterator[tuple[FoundCluster, Mapping[str, NodeDescription], Strangers]]:
    words = [*model_flags(config.model_dir, config.dtype), "--threads", "1", *arrangement_flags(config.arrangement)]
    with live_cluster(*words, *config.up_flags) as live:
        nodes, cores = live.nodes(), sorted(os.sched_getaffinity(0))
        pin_nodes(nodes, cores)
        strangers = ProcStrangers([process.pid for process in live.processes()], cores)
        yield FoundCluster(live.grpc_address, nodes), {node.role: live.describe(node) for node in nodes}, strangers


class Bench:
    """One model's cluster; `load` runs a load on it, as `run_watched`."""

    def __init__(
        self,
        config: ValidateConfig,
        descriptions: Mapping[str, NodeDescription],
        target: Target,
        load: Callable[[LoadPlan], NodesRun],
        strangers: Strangers,
        say: Note,
        clock: Clock,
        deadline_s: float,
    ) -> None:
        self._config = config
        self._descriptions = descriptions
        self._target = target
        self._run_load = load
        self._strangers = strangers
        self._say = say
        self._clock = clock
        self._deadline_s = deadline_s - _SIMULATING_S
        self._num_runs = 0
        self._singles: list[Stretch] = []
        self._by_rate: dict[float, list[Stretch]] = {}

    def run(self) -> Validated:
        """All loads live, then all of them simulated; raises BatonError before there is anything to keep."""
        config = self._config
        self._single(num_warmups=_WARM_UPS)
        failure: BatonError | None = None
        try:
            self._rounds(answered_per_s(self._full().outcomes))
        except BatonError as error:
            if not self._by_rate:
                raise
            failure = error
        except KeyboardInterrupt:
            failure = Cancelled("interrupted")
        predictor = Predictor(config.arrangement, self._descriptions, self._singles)
        pairs = predictor.pairs(self._by_rate)
        alone = Means.of(*(one.outcomes for one in self._singles))
        return Validated(config, alone, predictor.everything(self._by_rate), pairs, failure)

    # What is measured.

    def _rounds(self, most: float) -> None:
        config = self._config
        rates = [share * most for share in config.loads]
        # Another load comes first each time.
        turns = [[*rates[first:], *rates[:first]] for first in (number % len(rates) for number in range(config.rounds))]
        while turns:
            try:
                self._round(turns)
            except DeadlineExceeded as error:
                if len(self._by_rate) < len(rates):
                    raise
                self._say(f"no time for more than there is: {error}")
                return
            del turns[0]
        self._again(rates)

    def _round(self, turns: Sequence[list[float]]) -> None:
        """The first of those that are left."""
        self._single()
        while turns[0]:
            rate = turns[0][0]
            self._stretch(rate, self._arrivals_s(rate, turns))
            del turns[0][0]

    def _again(self, rates: Sequence[float]) -> None:
        """What strangers disturbed, once more while there is time: each load in its turn."""
        for _ in range((_TRIES - 1) * self._config.rounds):
            for rate in rates:
                stretches = self._by_rate[rate]
                arrivals_s = (stretches[-1].workload.num_prompts or 0) / rate
                has_time = self._clock.monotonic() + arrivals_s + _AROUND_S + self._tail_s() <= self._deadline_s
                if has_time and sum(one.is_quiet for one in stretches) < self._config.rounds:
                    self._stretch(rate, arrivals_s)

    def _arrivals_s(self, rate: float, turns: Sequence[Sequence[float]]) -> float:
        """Seconds of arrivals for the next stretch. A low load has more: fewer come in a second, but they vary less."""
        left = [one for turn in turns for one in turn]
        singles_s = (len(turns) - 1) * (_SINGLE_REQUESTS * self._single_s() + _AROUND_S)
        around_s = len(left) * (_AROUND_S + self._tail_s())
        left_s = self._deadline_s - self._clock.monotonic() - singles_s - around_s
        return min(
            self._config.run_s / self._config.rounds, left_s / math.sqrt(rate) / sum(1 / math.sqrt(one) for one in left)
        )

    def _stretch(self, rate: float, arrivals_s: float) -> None:
        config = self._config
        count = min(round(rate * arrivals_s), _MOST_PROMPTS // config.rounds)
        if count < _LEAST_PROMPTS:
            raise DeadlineExceeded(f"{config.name}: {arrivals_s:.0f} s are too little for {rate:.2f} requests/s")
        workload = replace(config.workload, request_rate=rate, num_prompts=count)
        one = self._measured(workload, limit_s=2 * arrivals_s + 4 * self._tail_s())
        self._by_rate.setdefault(rate, []).append(one)
        means = Means.of(one.outcomes)
        self._say(
            f"{config.name} at {rate:.2f}/s: {len(one.outcomes)} of {count} requests, "
            f"mean TTFT {means.ttft_ms:.1f} ms, TPOT {means.tpot_ms:.2f} ms"
            + ("" if one.is_quiet else f"; others took {one.strangers:.0%} of the machine")
        )

    def _single(self, num_warmups: int = 0) -> None:
        workload = replace(self._config.workload, num_prompts=_SINGLE_REQUESTS, request_rate=float("inf"))
        self._singles.append(
            self._measured(workload, max_concurrency=1, num_warmups=num_warmups, limit_s=self._share_s())
        )

    def _full(self) -> Stretch:
        """A closed loop."""
        limit_s = min(max(_FULL_S, _FULL_SINGLES * self._single_s()), self._share_s())
        workload = replace(self._config.workload, num_prompts=_FULL_PROMPTS, request_rate=float("inf"))
        return self._measured(workload, max_concurrency=_FULL_OPEN, limit_s=limit_s)

    def _single_s(self) -> float:
        """What a request takes that is alone."""
        run = self._singles[0].live.run
        return run.duration_s / max(1, len(run.outcomes))

    def _tail_s(self) -> float:
        """From a stretch's last arrival on."""
        return 2 * self._single_s()

    def _share_s(self) -> float:
        """What a run beside the loads may take."""
        return max(1.0, _AHEAD_SHARE * (self._deadline_s - self._clock.monotonic()))

    def _measured(
        self, workload: WorkloadSpec, limit_s: float, max_concurrency: int | None = None, num_warmups: int = 0
    ) -> Stretch:
        workload = replace(workload, seed=workload.seed + self._num_runs)
        self._num_runs += 1
        plan = LoadPlan(
            self._target, workload, max_concurrency=max_concurrency, num_warmups=num_warmups, limit_s=limit_s
        )
        self._await_quiet()
        self._strangers.mark()
        ran = self._run_load(plan)
        if ran.run.was_interrupted:
            raise Cancelled("interrupted")
        if ran.run.is_unreachable:
            raise Unreachable(f"{self._config.arrangement} went away during a run")
        return Stretch(workload, ran, self._strangers.share(), max_concurrency)

    def _await_quiet(self) -> None:
        now_s = self._clock.monotonic()
        until_s = now_s + _PATIENCE_SHARE * (self._deadline_s - now_s)
        for _ in range(_LOOKS):
            if self._strangers.watch() <= QUIET or self._clock.monotonic() >= until_s:
                return


def answered_per_s(outcomes: Outcomes) -> float:
    """Of a closed loop, from its first answer on; raises BatonError without two of them."""
    ended_s = outcomes.finished_s[outcomes.is_complete]
    if len(ended_s) < 2:
        raise BatonError(f"{len(ended_s)} requests were answered: {next(iter(outcomes.errors), 'too slow')}")
    return float((len(ended_s) - 1) / max(1e-3, ended_s.max() - ended_s.min()))
