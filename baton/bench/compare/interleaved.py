"""Runs loads on arrangements in turn, and searches the goodput of each. Clock and runner are arguments.

All arrangements get the same load: they share no cache, so the same prompts are new to each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from baton.bench.arrangement import Arrangement
from baton.bench.config import CompareConfig
from baton.bench.experiment import Experiment
from baton.bench.load.endpoint import Target
from baton.bench.load.run import LoadPlan, LoadRun
from baton.bench.nodes.run import NodesRun
from baton.bench.results.goodput import GoodputSearch
from baton.bench.results.summary import Slo, Summary, summarize
from baton.errors import BatonError, Cancelled, DeadlineExceeded

# Chooses the length of each run, so that a comparison ends in time, however fast its machine is.
#
# The time that is left is shared among the runs that are left. After its last arrival, a run waits only as long as a
# request that keeps the SLO can take: a request without an answer by then has broken it.


OVERHEAD_S = 3.0
"""Time that a run takes beside its load: starting its generator, and reading the outcomes."""
_MIN_PROMPTS = 4
"""With fewer a run says nothing; then there are fewer runs instead."""


@dataclass(frozen=True, slots=True)
class RunLength:
    """The number of a run's requests, and the seconds after which the run ends in any case."""

    prompts: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """What all runs of a comparison have in common."""

    run_s: float
    """Seconds of arrivals in a run, if there is time for them."""
    min_prompts: int
    """Smallest number of requests in a run, however low its rate, if there is time for them."""
    tail_s: float
    """Longest time from a request's arrival to its end, if it keeps the SLO."""
    deadline_s: float = math.inf
    """When the last run must have ended."""

    def length(self, rate: float, now_s: float, runs_left: int, *, waits_for_slow: bool = False) -> RunLength | None:
        """The length of the next run. `waits_for_slow`: requests that broke the SLO are waited for, too.

        None: too little time is left for a run that says anything.
        """
        share_s = (self.deadline_s - now_s) / runs_left - OVERHEAD_S
        wanted = max(self.min_prompts, round(rate * self.run_s))
        prompts = wanted
        if prompts / rate + self.tail_s > share_s:
            prompts = math.floor(rate * (share_s - self.tail_s))
        if prompts < min(wanted, _MIN_PROMPTS):
            return None
        tail_s = max(self.tail_s, 0.5 * prompts / rate + 2) if waits_for_slow else self.tail_s
        return RunLength(prompts, min(prompts / rate + tail_s, share_s))


_CALIBRATION_REQUESTS = 6
_CALIBRATION_SHARE = 0.2
"""Largest share of the time budget for calibration."""
_WARM_UPS = 2
_TAIL_S = 1.0
"""Added to the longest time that the SLO allows, before a run ends without the requests that broke it."""
_UNLIMITED_TAIL = 3.0
"""Multiple of a single request's time, if the SLO does not limit a request's whole time."""
_KNOWN_STEP = 1.25
"""Step of a search that starts at the goodput of an earlier repetition."""
_MAX_LOADS = 1 << 20
"""Largest number of loads in a comparison: comparisons with different seeds have no load in common."""


@dataclass(frozen=True, slots=True)
class RunningArrangement:
    """A started arrangement, ready for load."""

    target: Target
    cores: Mapping[str, int]
    """The core of each node."""
    run_load: Callable[[LoadPlan], NodesRun]


@dataclass(frozen=True, slots=True)
class RateRun:
    """A run of one arrangement at one rate."""

    repeat: int
    rate: float
    summary: Summary
    watched: NodesRun
    target: float = 0.9
    """Attainment from which the SLO counts as met."""

    @property
    def is_met(self) -> bool:
        """Whether enough of the offered requests kept the SLO."""
        return bool(self.summary["attainment"] >= self.target)


@dataclass(slots=True)
class MeasuredArrangement:
    """All runs of one arrangement."""

    arrangement: Arrangement
    cores: Mapping[str, int]
    max_num_batched_tokens: int = 512
    """Most tokens of a step."""
    first_rate: float = 0.0
    """A rate that is probably near to its goodput, with which the first search begins; 0: none is known."""
    goodputs: list[float] = field(default_factory=list)
    """Goodput of each repetition, requests per second."""
    runs: list[RateRun] = field(default_factory=list)
    common: list[RateRun] = field(default_factory=list)
    """The run of each repetition at the rate at which all arrangements are compared."""

    @property
    def name(self) -> str:
        return str(self.arrangement)


def default_slo(undisturbed: Summary, ttft_factor: float) -> Slo:
    """An SLO from the latency of a single request."""
    # Rounded, so that what is shown is what is applied.
    return Slo(round(undisturbed["median_ttft_ms"] * ttft_factor, 1), round(undisturbed["median_tpot_ms"] * 2, 1))


def first_rate(undisturbed: Summary, nodes: int) -> float:
    """Half of the rate that the nodes could serve one request at a time."""
    return float(0.5 * nodes / max(1e-3, undisturbed["median_e2el_ms"] / 1e3))


def longest_kept_s(slo: Slo, output_length: int, undisturbed: Summary) -> float:
    """The longest time that a request may take within the SLO, in seconds."""
    limits_ms = []
    if slo.e2el_ms is not None:
        limits_ms.append(slo.e2el_ms)
    if slo.ttft_ms is not None and slo.tpot_ms is not None:
        limits_ms.append(slo.ttft_ms + slo.tpot_ms * (output_length - 1))
    return min(limits_ms, default=_UNLIMITED_TAIL * undisturbed["median_e2el_ms"]) / 1e3


def seed_of(comparison: int, load: int) -> int:
    """The seed of a load, from the comparison's seed. A seed used twice would find its prompts in the caches."""
    return comparison * _MAX_LOADS + load


class InterleavedRuns:
    """Runs loads on several arrangements, one at a time."""

    def __init__(
        self,
        config: CompareConfig,
        measured: Sequence[MeasuredArrangement],
        running: Sequence[RunningArrangement],
        experiment: Experiment,
    ) -> None:
        """`measured`: what is measured of the arrangement that has the same position in `running`."""
        self._config = config
        self._measured = measured
        self._running = running
        self._experiment = experiment
        self._report = experiment.report
        self._now_s = experiment.clock.monotonic
        self._pace = Pace(config.run_s, config.min_prompts, 0.0, experiment.deadline_s)
        self._slo = Slo()
        self._num_loads = 0

    def calibrate(self) -> Summary:
        """Measures single requests, one after the other; every arrangement is warm afterwards."""
        summaries = []
        left_s = self._experiment.left_s()
        for number, running in enumerate(self._running):
            count = 1 if number else _CALIBRATION_REQUESTS
            workload = replace(self._config.workload, num_prompts=count, seed=self._next_seed())
            limit_s = None if left_s == float("inf") else max(1.0, left_s * _CALIBRATION_SHARE / len(self._running))
            plan = LoadPlan(running.target, workload, max_concurrency=1, num_warmups=_WARM_UPS, limit_s=limit_s)
            summaries.append(_checked(running.run_load(plan).run))
        return summaries[0]

    def find_goodput(self, slo: Slo, undisturbed: Summary) -> float:
        """Searches the goodput of the first arrangement once. Raises DeadlineExceeded if there is no time for it."""
        self._set_slo(slo, undisturbed)
        self._find_goodputs(0, [self._new_search(self._measured[0], undisturbed)])
        return self._measured[0].goodputs[0]

    def search_all(self, slo: Slo, undisturbed: Summary) -> BatonError | None:
        """Repeats a goodput search on all arrangements, step by step in turn. Returns what ended it early, if any."""
        self._set_slo(slo, undisturbed)
        num_repeats, longest = self._config.repeats, 0.0
        for repeat in range(num_repeats):
            since = self._now_s()
            if repeat and since + longest > self._experiment.deadline_s:
                self._report(f"out of time after {repeat} of {num_repeats} repetitions")
                break
            try:
                self._search(repeat, undisturbed)
            except DeadlineExceeded as error:
                return None if repeat else error
            except BatonError as error:
                return error
            except KeyboardInterrupt:
                return Cancelled("interrupted")
            longest = max(longest, self._now_s() - since)
        return None

    def _set_slo(self, slo: Slo, undisturbed: Summary) -> None:
        config = self._config
        tail_s = longest_kept_s(slo, config.workload.random_output_len, undisturbed) + _TAIL_S
        self._pace = Pace(config.run_s, config.min_prompts, tail_s, self._experiment.deadline_s)
        self._slo = slo

    def _search(self, repeat: int, undisturbed: Summary) -> None:
        searches = [self._new_search(arrangement, undisturbed) for arrangement in self._measured]
        try:
            self._find_goodputs(repeat, searches)
            self._compare_at_one_rate(repeat, searches)
        except BatonError:
            if not repeat:  # better than nothing, and the result says that it is not complete
                for arrangement, search in zip(self._measured, searches, strict=True):
                    if search.goodput and not arrangement.goodputs:
                        arrangement.goodputs.append(search.goodput)
            raise

    def _new_search(self, arrangement: MeasuredArrangement, undisturbed: Summary) -> GoodputSearch:
        if known := median(arrangement.goodputs) if arrangement.goodputs else arrangement.first_rate:
            return GoodputSearch(known, max_tries=self._config.max_tries, step=_KNOWN_STEP)
        return GoodputSearch(
            first_rate(undisturbed, arrangement.arrangement.num_nodes), max_tries=self._config.max_tries
        )

    def _find_goodputs(self, repeat: int, searches: Sequence[GoodputSearch]) -> None:
        """Runs rounds in which every search that has not ended tries its next rate."""
        rounds_left = self._config.max_tries
        while rounds_left and (numbers := [n for n, search in enumerate(searches) if not search.is_over]):
            seed, has_run = self._next_seed(), False
            for position, number in enumerate(numbers):
                search = searches[number]
                length = self._length(search.rate, rounds_left, len(numbers), position)
                if length is None:
                    continue
                ran = self._run(number, repeat, search.rate, length, seed)
                self._measured[number].runs.append(ran)
                search.add_result(ran.is_met)
                has_run = True
            if not has_run:
                break
            rounds_left -= 1
        if not any(search.goodput or search.upper_bound < math.inf for search in searches):
            raise DeadlineExceeded("the time budget ended before anything was measured")
        for arrangement, search in zip(self._measured, searches, strict=True):
            arrangement.goodputs.append(search.goodput)

    def _length(self, rate: float, rounds_left: int, num_searches: int, position: int) -> RunLength | None:
        """The next run's length, with as many rounds left as there is time for beside the runs at the common rate."""
        now_s, num_common = self._now_s(), len(self._measured)
        for rounds in range(rounds_left, 0, -1):
            runs_left = rounds * num_searches - position + num_common
            if (length := self._pace.length(rate, now_s, runs_left)) is not None:
                return length
        return None

    def _compare_at_one_rate(self, repeat: int, searches: Sequence[GoodputSearch]) -> None:
        rate = common_rate([search.goodput for search in searches], min(search.upper_bound for search in searches))
        length = self._pace.length(rate, self._now_s(), len(searches), waits_for_slow=True)
        if length is None:
            self._report(f"no time left for a comparison at {rate:.2f}/s")
            return
        seed = self._next_seed()
        for number, measured in enumerate(self._measured):
            measured.common.append(self._run(number, repeat, rate, length, seed, is_common=True))

    def _run(
        self, number: int, repeat: int, rate: float, length: RunLength, seed: int, *, is_common: bool = False
    ) -> RateRun:
        config, arrangement, running = self._config, self._measured[number].arrangement, self._running[number]
        workload = replace(config.workload, request_rate=rate, num_prompts=length.prompts, seed=seed)
        watched = running.run_load(LoadPlan(running.target, workload, limit_s=length.limit_s))
        run = watched.run
        run.check(f"{arrangement} went away during a run at {rate:.2f} requests/s")
        summary = summarize(run.outcomes, run.duration_s, self._slo, offered=length.prompts)
        self._report(
            f"{repeat + 1}. {arrangement} at {'the common rate, ' if is_common else ''}{rate:.2f}/s: "
            f"{summary['attainment']:.0%} of {length.prompts} kept the SLO, P99 TTFT {summary['p99_ttft_ms']:.0f} ms, "
            f"P99 TPOT {summary['p99_tpot_ms']:.1f} ms, P99 gap {summary['p99_largest_gap_ms']:.0f} ms"
        )
        return RateRun(repeat, rate, summary, watched, config.attainment)

    def _next_seed(self) -> int:
        """The seed of the next load, which all arrangements get."""
        self._num_loads += 1
        return seed_of(self._config.workload.seed, self._num_loads)


def common_rate(goodputs: Sequence[float], lowest_failed: float) -> float:
    """The rate at which all arrangements are compared: the lowest goodput, or if that is 0, a rate that failed."""
    weakest = min(goodputs)
    return weakest or min([lowest_failed, *(goodput for goodput in goodputs if goodput)])


def _checked(run: LoadRun) -> Summary:
    if run.was_interrupted:
        raise KeyboardInterrupt
    summary = summarize(run.outcomes, run.duration_s)
    if not summary["completed"]:
        raise BatonError(f"no request was answered: {next(iter(run.outcomes.errors), 'none ended in time')}")
    return summary
