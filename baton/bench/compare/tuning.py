"""Tunes the number of tokens of a step for the SLO, before arrangements are compared.

A comparison at one fixed size flatters one of the arrangements: colocated nodes pause their streams for a whole step of
prompt tokens, disaggregated ones don't. So each arrangement is first measured with several sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from baton.bench.arrangement import Arrangement
from baton.bench.compare.chunk_size import ChunkSizeSearch, TriedSize
from baton.bench.compare.interleaved import (
    CompareConfig,
    InterleavedRuns,
    MeasuredArrangement,
    Report,
    RunLoad,
    default_slo,
)
from baton.bench.load.endpoint import Target
from baton.bench.load.run import LoadPlan
from baton.bench.nodes.run import NodesRun
from baton.bench.results.slo import Slo
from baton.clock import Clock
from baton.errors import BatonError, Cancelled

FIRST_SIZE = 512
"""The default of --max-num-batched-tokens."""


@dataclass(frozen=True, slots=True)
class RunningArrangement:
    """A started arrangement, ready for load."""

    target: Target
    cores: Mapping[str, int]
    """The core of each node."""
    run_load: Callable[[LoadPlan], NodesRun]


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
    """None: nothing was measured from which one follows."""


def tune(
    config: CompareConfig,
    arrangement: Arrangement,
    slo: Slo | None,
    report: Report,
    clock: Clock,
    deadline_s: float,
    start: StartArrangement,
) -> Tuned:
    """Measures the goodput of an arrangement with several sizes, one after the other.

    `slo`: None: from the latency of single requests, as in `default_slo`. `deadline_s`: when the last run must have
    ended, on the clock. Raises Cancelled.
    """
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
                one = MeasuredArrangement(arrangement, running.cores, size, first_rate=known)
                runs = InterleavedRuns(
                    replace(config, arrangements=[arrangement], max_tries=config.tune_tries),
                    *([one], [running.target], lambda _: None, since_s + share_s, clock),
                    _run_load_of(running),
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


def _run_load_of(running: RunningArrangement) -> RunLoad:
    """Runs all loads on this arrangement."""
    return lambda _, plan: running.run_load(plan)
