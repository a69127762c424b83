"""Starts every arrangement on the same cores, puts the same load on each in turn, and compares them.

First the number of tokens of a step is tuned for the SLO, one cluster after the other. With small steps prompts take
longer, with large ones running streams pause longer; a comparison at one fixed size flatters one of the arrangements:
colocated nodes pause their streams for a whole step of prompt tokens, disaggregated ones don't. So each arrangement is
first measured with several sizes.

Then all clusters run the whole time. A cluster without requests sleeps, so the measured cluster has the cores to
itself, and switching between clusters costs nothing. Disturbances of the machine affect all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from baton.bench.arrangement import Arrangement
from baton.bench.compare.interleaved import (
    InterleavedRuns,
    MeasuredArrangement,
    RunningArrangement,
    default_slo,
)
from baton.bench.config import CompareConfig
from baton.bench.experiment import Experiment, Report
from baton.bench.live_cluster import pinned_cluster
from baton.bench.load.endpoint import Target
from baton.bench.load.probe import probe
from baton.bench.nodes.run import run_watched
from baton.bench.results.summary import Slo, Summary
from baton.clock import SystemClock
from baton.errors import BatonError, Cancelled

SMALLEST = 64
"""A step must have room for a token of each running request, of which a node has 64 by default."""
LARGEST = 8192


@dataclass(frozen=True, slots=True)
class TriedSize:
    """A size and the goodput that was found with it, in requests per second."""

    max_num_batched_tokens: int
    goodput: float


class ChunkSizeSearch:
    """Tries the first size, then half of it, and goes on in the direction in which the goodput rises."""

    def __init__(self, first: int, max_tries: int) -> None:
        self._max_tries = max_tries
        self._factor = 0.5
        self._next: int | None = first
        self.tried: list[TriedSize] = []

    @property
    def size(self) -> int | None:
        """The next size to measure; None if the search is over."""
        return self._next

    @property
    def best(self) -> TriedSize:
        """The size with the highest goodput; of equal ones the one that was tried first."""
        return max(self.tried, key=lambda size: size.goodput)

    def add_result(self, goodput: float) -> None:
        """Says the goodput at `size`, and chooses the next size."""
        size = self._next
        assert size is not None
        self.tried.append(TriedSize(size, goodput))
        if len(self.tried) == 1:
            self._propose(size)
            return
        if self.best.max_num_batched_tokens == size:
            self._propose(size)
        elif self._factor < 1 and len(self.tried) == 2:
            self._factor = 2.0
            self._propose(self.tried[0].max_num_batched_tokens)
        else:
            self._next = None

    def _propose(self, start: int) -> None:
        size = round(start * self._factor)
        if size < SMALLEST and len(self.tried) == 1:
            self._factor = 2.0
            size = start * 2
        is_possible = SMALLEST <= size <= LARGEST and len(self.tried) < self._max_tries
        self._next = size if is_possible else None


_STOP_S = 30.0
"""Part of the time budget that is kept for stopping everything and writing the result."""
_TUNING_SHARE = 0.4
"""Largest share of the time budget for tuning."""
FIRST_SIZE = 512
"""The default of --max-num-batched-tokens."""


StartArrangement = Callable[[Arrangement, int], AbstractContextManager[RunningArrangement]]
"""Starts an arrangement whose steps compute at most this many tokens."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The sizes that were tried for one arrangement, and the SLO that they were tried for."""

    arrangement: Arrangement
    tried: list[TriedSize]
    best: TriedSize
    """The default, with a goodput of 0, if no size could be measured."""
    slo: Slo | None
    """None: nothing was measured from which an SLO follows."""


def tune(
    config: CompareConfig,
    arrangement: Arrangement,
    slo: Slo | None,
    experiment: Experiment,
    start: StartArrangement,
) -> Tuned:
    """Measures the goodput of an arrangement with several sizes, one after the other.

    `slo`: None: from the latency of single requests, as in `default_slo`. Raises Cancelled.
    """
    report, clock, deadline_s = experiment.report, experiment.clock, experiment.deadline_s
    search = ChunkSizeSearch(FIRST_SIZE, config.max_sizes)
    longest_s, known = 0.0, 0.0
    while (size := search.size) is not None:
        since_s = clock.monotonic()
        if search.tried and since_s + longest_s > deadline_s:
            report(f"{arrangement}: no time for steps of {size} tokens")
            break
        share_s = (deadline_s - since_s) / (config.max_sizes - len(search.tried))
        try:
            with start(arrangement, size) as running:
                measured = MeasuredArrangement(arrangement, running.cores, size, first_rate=known)
                runs = InterleavedRuns(
                    replace(config, arrangements=[arrangement], max_tries=config.tune_tries),
                    [measured],
                    [running],
                    Experiment(lambda _: None, clock, since_s + share_s),
                )
                undisturbed = runs.calibrate()
                slo = slo or default_slo(undisturbed, config.ttft_factor)
                goodput = runs.find_goodput(slo, undisturbed)
        except Cancelled:
            raise
        except BatonError as error:
            # Mostly too little time. What is wrong with the arrangement itself is met again when it is compared.
            report(f"{arrangement}: steps of {size} tokens were not measured: {error}")
            break
        known = max(known, goodput)
        longest_s = max(longest_s, clock.monotonic() - since_s)
        report(f"{arrangement} with steps of {size} tokens: goodput {goodput:.2f}/s")
        search.add_result(goodput)
    best = search.best if search.tried else TriedSize(FIRST_SIZE, 0.0)
    report(f"{arrangement} is compared with steps of {best.max_num_batched_tokens} tokens")
    return Tuned(arrangement, search.tried, best, slo)


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
    began_s = clock.monotonic()
    experiment = Experiment(report, clock, began_s + config.budget_s - _STOP_S)

    slo = config.slo

    @contextmanager
    def start(arrangement: Arrangement, size: int) -> Iterator[RunningArrangement]:
        flags = ("--max-num-batched-tokens", str(size), *_target_flags(arrangement, slo), *config.up_flags)
        with pinned_cluster(arrangement, config.model, config.dtype, *flags) as cluster:
            target = probe(Target("baton", cluster.grpc_address, connections=2)).target
            yield RunningArrangement(target, cluster.cores, partial(run_watched, cluster))

    tuned = tune_all(config, replace(experiment, deadline_s=began_s + config.budget_s * _TUNING_SHARE), start)
    slo = config.slo or next((result.slo for result in tuned if result.slo), None)
    with ExitStack() as stack:
        measured, running = [], []
        for arrangement in config.arrangements:
            report(f"starting {arrangement}")
            best = next((result.best for result in tuned if result.arrangement == arrangement), None)
            size = best.max_num_batched_tokens if best else config.max_num_batched_tokens or FIRST_SIZE
            running.append(stack.enter_context(start(arrangement, size)))
            measured.append(
                MeasuredArrangement(arrangement, running[-1].cores, size, first_rate=best.goodput if best else 0.0)
            )
        runs = InterleavedRuns(config, measured, running, experiment)
        undisturbed = runs.calibrate()
        slo = slo or default_slo(undisturbed, config.ttft_factor)
        report(f"SLO {', '.join(f'{name} {limit}' for name, limit in slo.texts().items())}")
        failure = runs.search_all(slo, undisturbed)
    return Comparison(slo, undisturbed, measured, failure, tuned)


def _target_flags(arrangement: Arrangement, slo: Slo | None) -> list[str]:
    """The targets of the router of a conditional arrangement, which chooses ways by them; none are known at first."""
    if slo is None or not arrangement.is_conditional:
        return []
    targets = {"--default-ttft-ms": slo.ttft_ms, "--default-tpot-ms": slo.tpot_ms}
    return [word for flag, limit in targets.items() if limit is not None for word in (flag, str(limit))]


def tune_all(config: CompareConfig, experiment: Experiment, start: StartArrangement) -> list[Tuned]:
    """Tunes the arrangements that are to be tuned, all for the same SLO."""
    if config.max_num_batched_tokens is not None:
        return []
    chosen = [
        arrangement
        for arrangement in config.arrangements
        if arrangement.is_colocated or not config.is_baseline_tuned_alone
    ]
    tuned: list[Tuned] = []
    for number, arrangement in enumerate(chosen):
        slo = config.slo or next((result.slo for result in tuned if result.slo), None)
        share_s = experiment.left_s() / (len(chosen) - number)
        part = replace(experiment, deadline_s=experiment.clock.monotonic() + share_s)
        tuned.append(tune(config, arrangement, slo, part, start))
    return tuned
