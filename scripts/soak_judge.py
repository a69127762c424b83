"""Judges the readings of a soak run: whether a process grew.

Only readings of quiet moments count: all streams have ended, and the processes' garbage collectors have run. For a
process that was never killed, the median of the first readings after the warm-up is compared with the median of the
last ones. A process that was killed starts anew each time, so its runs (lives) are compared: the last complete one with
the first complete one, with the same number of readings after the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

WINDOW_SHARE = 0.2
"""Each of the two compared windows has this share of the readings after the warm-up."""
COUNTS = ("descriptors", "threads", "tasks")
SETTLED_READINGS = 2
"""A restarted process is judged from its second reading on: by then its peers have connected to it again."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One process in one quiet moment. `at_s`: seconds since the start of the run."""

    at_s: float
    pid: int
    memory: int
    """Resident bytes."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Descriptors, threads, tasks, or Redis keys by kind; figures that the process does not report are absent."""


@dataclass(frozen=True, slots=True)
class Line:
    """One judged figure of one process."""

    process: str
    figure: str
    before: float
    after: float
    limit: float
    """The largest allowed growth, as a share."""
    basis: str
    """What was compared, or why nothing could be compared."""
    is_judged: bool = True

    @property
    def growth(self) -> float:
        """The growth as a share; negative if the figure shrank."""
        if not self.before:
            return float(self.after > 0)
        return self.after / self.before - 1

    @property
    def passed(self) -> bool:
        return not self.is_judged or self.growth <= self.limit

    @property
    def verdict(self) -> str:
        if not self.is_judged:
            return "-"
        return "PASS" if self.passed else "FAIL"


def judge(
    process: str, readings: Sequence[Reading], warm_up_s: float, growth: float, restarted_growth: float
) -> list[Line]:
    """Judges every figure of a process. `growth`: limit of its memory; `restarted_growth`: the limit between lives."""
    if len({reading.pid for reading in readings}) > 1:
        return _judge_lives(process, readings, restarted_growth)
    after = [reading for reading in readings if reading.at_s >= warm_up_s]
    size = max(1, round(len(after) * WINDOW_SHARE))
    if len(after) < 2 * size:
        return [_unjudged(process, f"{len(after)} readings after the warm-up: too few")]
    basis = f"median of {size} readings from {after[0].at_s / 60:.0f} min on and of the last {size}"
    return _compare(process, after[:size], after[-size:], growth, basis)


def lives_of(readings: Sequence[Reading]) -> list[list[Reading]]:
    """The readings of each life of a process that was killed and restarted, in order."""
    lives: list[list[Reading]] = []
    for reading in readings:
        if not lives or lives[-1][-1].pid != reading.pid:
            lives.append([])
        lives[-1].append(reading)
    return lives


def _judge_lives(process: str, readings: Sequence[Reading], limit: float) -> list[Line]:
    # The first life is left out: it includes the start of the cluster and the first requests.
    lives = [life for life in lives_of(readings)[1:] if len(life) > SETTLED_READINGS - 1]
    if len(lives) < 2:
        return [_unjudged(process, f"{len(lives)} lives that were long enough after the first kill: too few")]
    size = min(len(lives[0]), len(lives[-1]))
    first, last = lives[0][SETTLED_READINGS - 1 : size], lives[-1][SETTLED_READINGS - 1 : size]
    basis = f"readings {SETTLED_READINGS} to {size} of the first and the last of {len(lives)} lives"
    return _compare(process, first, last, limit, basis)


def _compare(
    process: str, before: Sequence[Reading], after: Sequence[Reading], growth: float, basis: str
) -> list[Line]:
    lines = [Line(process, "memory", _median_of(before, _memory), _median_of(after, _memory), growth, basis)]
    for name in sorted({name for reading in (*before, *after) for name in reading.counts}):

        def count(reading: Reading, name: str = name) -> int:
            return reading.counts.get(name, 0)

        lines.append(Line(process, name, _median_of(before, count), _median_of(after, count), 0.0, basis))
    return lines


def _median_of(readings: Sequence[Reading], of: Callable[[Reading], float]) -> float:
    return float(median(of(reading) for reading in readings))


def _memory(reading: Reading) -> float:
    return reading.memory


def _unjudged(process: str, why: str) -> Line:
    return Line(process, "memory", 0, 0, 0, why, is_judged=False)


def minimum_counts(several: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The minimum of each count over several readings of one moment: what disappears within a second is not a leak."""
    names = {name for counts in several for name in counts}
    return {name: min(counts.get(name, 0) for counts in several) for name in sorted(names)}
