"""How busy the load generator itself was, and whether it was the bottleneck of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.bench.results.outcome import Outcomes

_LATE_MS = 10.0
_LATE_SHARE = 0.1
"""Share of the median time to first token: lateness below it changes no conclusion."""
_BUSY = 0.9


@dataclass(frozen=True, slots=True)
class GeneratorLoad:
    """Lateness and CPU use over all processes of a generator."""

    processes: int
    lag_p99_ms: float
    """From a request's planned time until it was sent."""
    cpu_share: float
    """Share of a core that the busiest process used over the whole run."""
    cpu_peak: float
    """Share of a core that the busiest process used in its busiest second."""
    tolerated_ms: float = _LATE_MS
    """Lateness that does not matter beside what was measured."""

    @staticmethod
    def of(outcomes: Outcomes, cpu_shares: Sequence[float], cpu_peaks: Sequence[float]) -> GeneratorLoad:
        lags_ms = (outcomes.sent_s - outcomes.planned_s) * 1e3
        ttfts_ms = outcomes.ttft_s[outcomes.is_complete] * 1e3
        return GeneratorLoad(
            processes=len(cpu_shares),
            lag_p99_ms=float(np.percentile(lags_ms, 99)) if len(lags_ms) else 0.0,
            cpu_share=max(cpu_shares, default=0.0),
            cpu_peak=max(cpu_peaks, default=0.0),
            # Lateness makes first tokens later; that part must not raise the limit.
            tolerated_ms=max(_LATE_MS, _LATE_SHARE * float(np.median(ttfts_ms - lags_ms[outcomes.is_complete])))
            if len(ttfts_ms)
            else _LATE_MS,
        )

    @property
    def bottleneck(self) -> str:
        """Why this run measured the generator more than the endpoint; empty if it did not."""
        if self.lag_p99_ms >= self.tolerated_ms:
            return f"requests were sent up to {self.lag_p99_ms:.0f} ms late (P99)"
        if self.cpu_peak >= _BUSY:
            return f"a generator process used {self.cpu_peak:.0%} of a core"
        return ""

    def to_json(self) -> dict[str, Any]:
        return {
            "processes": self.processes,
            "lag_p99_ms": self.lag_p99_ms,
            "cpu_share": self.cpu_share,
            "cpu_peak": self.cpu_peak,
            "is_bottleneck": bool(self.bottleneck),
            "bottleneck": self.bottleneck,
        }
