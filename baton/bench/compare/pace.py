"""Chooses the length of each run, so that a comparison ends in time, however fast its machine is.

The time that is left is shared among the runs that are left. After its last arrival, a run waits only as long as a
request that keeps the SLO can take: a request without an answer by then has broken it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
