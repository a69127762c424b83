"""Service level objectives (SLOs): the latency limits that a request must keep to count as good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.bench.results.outcome import Outcomes
from baton.errors import InvalidRequest

_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @staticmethod
    def parse(words: Sequence[str]) -> Slo:
        """Reads the values of `--goodput`, as in `ttft:250 tpot:100`; raises InvalidRequest."""
        limits: dict[str, float] = {}
        for word in words:
            name, colon, value = word.partition(":")
            if not colon or name not in _NAMES:
                raise InvalidRequest("--goodput", f"{word!r} is not one of {', '.join(f'{n}:MS' for n in _NAMES)}")
            try:
                limits[name] = float(value)
            except ValueError:
                raise InvalidRequest("--goodput", f"{value!r} is not a number of milliseconds") from None
            if not 0 < limits[name] < float("inf"):
                raise InvalidRequest("--goodput", f"{word!r} is not a positive, finite number of milliseconds")
        return Slo(limits.get("ttft"), limits.get("tpot"), limits.get("e2el"))

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft_ms, self.tpot_ms, self.e2el_ms))

    def scaled(self, scale: float) -> Slo:
        """The SLO with all limits multiplied by `scale`."""
        return Slo(*(None if ms is None else ms * scale for ms in (self.ttft_ms, self.tpot_ms, self.e2el_ms)))

    def to_json(self) -> dict[str, float]:
        values = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2el_ms": self.e2el_ms}
        return {name: value for name, value in values.items() if value is not None}

    def texts(self) -> dict[str, str]:
        """Each limit as it was given, `250 ms` or `45.6 ms`, by the name of what it limits, such as TTFT."""
        return {name.removesuffix("_ms").upper(): f"{limit_text(ms)} ms" for name, ms in self.to_json().items()}

    def is_met(self, outcomes: Outcomes) -> NDArray[np.bool_]:
        """Which requests kept all limits; a failed request kept none."""
        good = outcomes.is_complete
        times = ((self.ttft_ms, outcomes.ttft_s), (self.tpot_ms, outcomes.tpot_s), (self.e2el_ms, outcomes.e2el_s))
        for limit_ms, seconds in times:
            if limit_ms is not None:
                good &= seconds * 1e3 <= limit_ms
        return good


def limit_text(ms: float) -> str:
    """A limit with all its digits: `250`, `45.6`."""
    return str(ms).removesuffix(".0")
