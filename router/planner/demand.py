"""What clients ask for and get, over several windows of time, and what is to be expected next. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from baton.values import value
from router.attainment import Kept

WINDOWS_S = (10.0, 60.0, 600.0)
"""The windows that operators see, in seconds."""
_BIN_S = 1.0
_NUM_BINS = int(WINDOWS_S[-1] / _BIN_S) + 1
_USUAL_OUTPUT = 128.0
"""The tokens of an output that are assumed before any request has ended."""


@value(frozen=True, slots=True)
class OfferedLoad:
    """What clients ask for: requests per second, and the mean tokens of each."""

    requests_per_s: float = 0.0
    prompt_tokens: float = 0.0
    uncached_tokens: float = 0.0
    """Of the prompt, without those that are usually found in a cache."""
    output_tokens: float = _USUAL_OUTPUT
    context_tokens: float = 0.0
    """Before a token of an output, over all of these: long outputs count more than short ones."""


@value(frozen=True, slots=True)
class Attained:
    """Of the requests that have targets: how many ended, how many kept all, and how many missed which."""

    num_requests: int = 0
    num_good: int = 0
    num_late: int = 0
    """Their first token came late."""
    num_slow: int = 0
    """Their tokens came slowly."""

    @property
    def share(self) -> float:
        """The share that kept its targets; 1 without requests."""
        return self.num_good / self.num_requests if self.num_requests else 1.0


@dataclass(slots=True)
class _Bin:
    """Sums over the requests that arrived in a second, and over those that ended in it."""

    number: int
    arrived: int = 0
    elsewhere: int = 0
    """Arrived at other routers."""
    prompt_tokens: int = 0
    ended: int = 0
    ended_prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    """The sum over all tokens of outputs of those before them."""
    num_with_targets: int = 0
    num_good: int = 0
    num_late: int = 0
    num_slow: int = 0


class DemandMeter:
    """Counts requests as they arrive and end, in bins of a second. Seconds on the caller's clock."""

    def __init__(self) -> None:
        self._bins: deque[_Bin] = deque(maxlen=_NUM_BINS)
        self._began_at: float | None = None
        """When the first request was seen: before, there was no load of which a window could tell."""

    def arrived(self, prompt_tokens: int, now: float) -> None:
        """A request has arrived."""
        last = self._bin(now)
        last.arrived += 1
        last.prompt_tokens += prompt_tokens

    def arrived_elsewhere(self, count: int, now: float) -> None:
        """So many requests have arrived at other routers: they are assumed to be like those that arrive here."""
        self._bin(now).elsewhere += count

    def ended(self, prompt_tokens: int, cached_tokens: int, output_tokens: int, now: float) -> None:
        """A request has ended well. `cached_tokens`: of its prompt, which were not computed for it."""
        last = self._bin(now)
        last.ended += 1
        last.ended_prompt_tokens += prompt_tokens
        last.cached_tokens += cached_tokens
        last.output_tokens += output_tokens
        last.context_tokens += output_tokens * (prompt_tokens + output_tokens // 2)

    def kept(self, kept: Kept, now: float) -> None:
        """A request with targets has ended that its client did not cancel."""
        last = self._bin(now)
        last.num_with_targets += 1
        last.num_good += kept is Kept.GOOD
        last.num_late += kept.is_late
        last.num_slow += kept.is_slow

    def attained(self, window_s: float, now: float) -> Attained:
        """What the requests attained that ended within the window."""
        bins = self._within(now - window_s, now)
        return Attained(
            sum(one.num_with_targets for one in bins),
            sum(one.num_good for one in bins),
            sum(one.num_late for one in bins),
            sum(one.num_slow for one in bins),
        )

    def load(self, window_s: float, now: float) -> OfferedLoad:
        """The load of the window that ends now. Where no request ended in it, outputs are as usual."""
        begin = max(now - window_s, now if self._began_at is None else self._began_at)
        span_s = max(now - begin, _BIN_S)
        bins = self._within(begin, now)
        ends = bins if any(one.ended for one in bins) else self._bins
        arrived, ended = sum(one.arrived for one in bins), sum(one.ended for one in ends)
        elsewhere = sum(one.elsewhere for one in bins)
        arrivals = bins if arrived else self._bins
        prompt = sum(one.prompt_tokens for one in arrivals) / max(1, sum(one.arrived for one in arrivals))
        share_cached = sum(one.cached_tokens for one in ends) / max(1, sum(one.ended_prompt_tokens for one in ends))
        num_outputs = sum(one.output_tokens for one in ends)
        output = num_outputs / ended if ended else _USUAL_OUTPUT
        context = sum(one.context_tokens for one in ends) / num_outputs if num_outputs else prompt + output / 2
        return OfferedLoad(
            (arrived + elsewhere) / span_s, prompt, prompt * (1.0 - min(1.0, share_cached)), output, context
        )

    def _within(self, begin: float, end: float) -> list[_Bin]:
        return [one for one in self._bins if begin / _BIN_S - 1.0 < one.number <= end / _BIN_S]

    def _bin(self, now: float) -> _Bin:
        number = int(now / _BIN_S)
        if self._began_at is None:
            self._began_at = now
        if not self._bins or self._bins[-1].number < number:
            self._bins.append(_Bin(number))
        return self._bins[-1]


Forecast: TypeAlias = Callable[[DemandMeter, float], OfferedLoad]
"""The load that is to be expected, from what was metered until a time."""
_USUAL_S, _SUDDEN_S = 30.0, 10.0
_BY_CHANCE = 2.0
"""Standard deviations by which the rate of a short window may be higher by chance."""


def latest(meter: DemandMeter, now: float) -> OfferedLoad:
    """The load of the last half minute, or of the last ten seconds if more came than chance explains."""
    usual, sudden = meter.load(_USUAL_S, now), meter.load(_SUDDEN_S, now)
    by_chance = _BY_CHANCE * math.sqrt(sudden.requests_per_s / _SUDDEN_S)
    return sudden if sudden.requests_per_s - by_chance > usual.requests_per_s else usual
