"""How long runs may be, so that a comparison ends in time whatever its machine is like. Pure: time is an argument.

What is left of the time is shared among the runs that are still to come. A run has its arrivals, and then waits only as
long as a request that keeps the service level can take: who is not answered by then has broken it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AROUND_S = 3.0
"""What a run takes beside its load: starting its generator, and reading what that wrote down."""
_LEAST_PROMPTS = 4
"""Fewer say nothing: then there are rather fewer runs."""


@dataclass(frozen=True, slots=True)
class RunLength:
    """One run's load, and the seconds after which it ends in any case."""

    prompts: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Of a whole comparison."""

    run_s: float
    """Seconds of arrivals of a run, if there is time for them."""
    least_prompts: int
    """Of a run, however low its rate, if there is time for them."""
    tail_s: float
    """From a request's arrival to when it has ended, if it keeps the service level."""
    deadline_s: float = math.inf
    """When the last run has to be over."""

    def length(self, rate: float, now_s: float, runs_left: int, *, looks_at_all: bool = False) -> RunLength | None:
        """Of the next one of so many runs. `looks_at_all`: the slow requests matter too, so they are waited for.

        None: there is no time left for one that says anything.
        """
        share_s = (self.deadline_s - now_s) / runs_left - AROUND_S
        wanted = max(self.least_prompts, round(rate * self.run_s))
        prompts = wanted
        if prompts / rate + self.tail_s > share_s:
            prompts = math.floor(rate * (share_s - self.tail_s))
        if prompts < min(wanted, _LEAST_PROMPTS):
            return None
        tail_s = max(self.tail_s, 0.5 * prompts / rate + 2) if looks_at_all else self.tail_s
        return RunLength(prompts, min(prompts / rate + tail_s, share_s))
