"""Decides which of two arrangements has the higher goodput, or that the measurements do not settle it. Does no I/O.

1. An arrangement leads a repetition if it kept the SLO at a rate that is not below one at which the other broke it.
2. The arrangement that leads every repetition has the higher goodput, if two of its runs show more than chance does: a
   run of the leader that kept the SLO, and a run of the follower that broke it at no higher rate (Fisher's exact test
   of the requests that kept it, one-sided, times the number of such pairs, below 5%).
3. Otherwise it is not settled, and the verdict says what would settle it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

_CHANCE = 0.05
"""Probability of the difference by chance, below which it counts as real."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of one arrangement at one rate."""

    repeat: int
    rate: float
    kept: int
    """Requests that kept the SLO."""
    offered: int
    is_met: bool
    """Whether enough of them did."""


@dataclass(frozen=True, slots=True)
class Contender:
    """The measurements of one arrangement."""

    name: str
    goodputs: Sequence[float]
    """The goodput of each repetition in requests per second; 0 if it kept the SLO at no rate."""
    trials: Sequence[Trial]

    @property
    def goodput(self) -> float:
        """The median goodput."""
        return median(self.goodputs) if self.goodputs else 0.0

    def broken_rate(self, repeat: int) -> float:
        """The lowest rate above the goodput of a repetition at which it broke the SLO; infinity if there is none."""
        goodput = self.goodputs[repeat]
        broken = (trial.rate for trial in self.trials if trial.repeat == repeat and not trial.is_met)
        return min((rate for rate in broken if rate > goodput), default=math.inf)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which of two arrangements has the higher goodput, as far as that is known."""

    leader: str
    """The arrangement with the higher median goodput."""
    follower: str
    is_settled: bool
    finding: str
    """Why it is settled or not, as a sentence without a full stop."""
    remedy: str
    """What would settle it; empty if it is settled."""


def decide(first: Contender, other: Contender) -> Verdict:
    """Compares two arrangements that were measured in turn."""
    leader, follower = (first, other) if first.goodput >= other.goodput else (other, first)

    def unsettled(finding: str, remedy: str) -> Verdict:
        return Verdict(leader.name, follower.name, False, finding, remedy)

    num_repeats = min(len(leader.goodputs), len(follower.goodputs))
    if not num_repeats:
        return unsettled("not both of them were measured", "a comparison that does not end early")
    if not leader.goodput:
        return unsettled(
            "neither kept the SLO at any rate of its search", "lower rates (--tries), or wider limits (--goodput)"
        )
    leads = sum(_leads(leader, follower, repeat) for repeat in range(num_repeats))
    if leads < num_repeats:
        never_broke = [
            contender.name
            for contender in (leader, follower)
            if math.isinf(max(map(contender.broken_rate, range(num_repeats))))
        ]
        if follower.name in never_broke:
            return unsettled(f"{' and '.join(never_broke)} kept the SLO at every rate that was tried", _HIGHER_RATES)
        if leads or any(_leads(follower, leader, repeat) for repeat in range(num_repeats)):
            return unsettled(
                f"{leader.name} leads in {leads} of {num_repeats} repetitions",
                "more repetitions (--repeats) with more requests (--run-s)",
            )
        return unsettled(
            "their goodputs are nearer to each other than the rates that were tried",
            "more rates (--tries) with more requests (--run-s)",
        )
    chance = _chance(leader, follower)
    if chance >= _CHANCE:
        num_requests = median([trial.offered for contender in (leader, follower) for trial in contender.trials])
        return unsettled(
            f"runs of {num_requests:g} requests differ as much by chance (probability {chance:.2g})",
            "more requests at each rate (--run-s)",
        )
    finding = f"{leader.name} leads in every repetition; the probability of that by chance is {chance:.1g}"
    if math.isinf(max(map(leader.broken_rate, range(num_repeats)))):
        finding += f", and {leader.name} may serve more, since it kept the SLO at the highest rate that was tried"
    return Verdict(leader.name, follower.name, True, finding, "")


_HIGHER_RATES = "higher rates (--tries)"


def _leads(mine: Contender, other: Contender, repeat: int) -> bool:
    return 0 < mine.goodputs[repeat] >= other.broken_rate(repeat)


def _chance(leader: Contender, follower: Contender) -> float:
    """The probability that runs of equal arrangements differ as much as the most different pair of runs."""
    pairs = [
        (kept, broken)
        for kept, broken in product(leader.trials, follower.trials)
        if kept.is_met and not broken.is_met and kept.rate >= broken.rate
    ]
    chances = [more_by_chance(kept.kept, kept.offered, broken.kept, broken.offered) for kept, broken in pairs]
    return min(1.0, min(chances, default=1.0) * len(pairs))


def more_by_chance(kept: int, offered: int, other_kept: int, other_offered: int) -> float:
    """Fisher's exact test, one-sided (R. A. Fisher, The Design of Experiments, 1935).

    The probability that at least `kept` of `offered` requests keep the SLO, if `kept + other_kept` of all requests do
    and chance alone decides in which of the two runs they are.
    """
    total, total_kept = offered + other_offered, kept + other_kept
    ways = _log_ways(total, total_kept)
    logs = [
        _log_ways(offered, count) + _log_ways(other_offered, total_kept - count) - ways
        for count in range(kept, min(offered, total_kept) + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))


def _log_ways(total: int, chosen: int) -> float:
    """The logarithm of the number of ways to choose some of all."""
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)
