"""Summarizes a run with the names and the definitions of `vllm bench serve`.

Two things differ on purpose. Latencies count from a request's planned time, not from when the generator sent it:
otherwise a late generator would make the system look fast (coordinated omission). And attainment is a share of all
offered requests, failed ones included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.bench.results.gaps import Gaps
from baton.bench.results.outcome import Outcomes
from baton.errors import InvalidRequest

# Service level objectives (SLOs): the latency limits that a request must keep to count as good.


Values = NDArray[np.float64]
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
        kept = self.is_kept(outcomes.ttft_s * 1e3, outcomes.tpot_s * 1e3, outcomes.e2el_s * 1e3)
        return outcomes.is_complete & kept

    def is_kept(self, ttft_ms: Values, tpot_ms: Values, e2el_ms: Values) -> NDArray[np.bool_]:
        """Which requests with these latencies kept all limits."""
        kept = np.ones(len(e2el_ms), dtype=bool)
        for took, limit in ((ttft_ms, self.ttft_ms), (tpot_ms, self.tpot_ms), (e2el_ms, self.e2el_ms)):
            if limit is not None:
                kept &= took <= limit
        return kept


def limit_text(ms: float) -> str:
    """A limit with all its digits: `250`, `45.6`."""
    return str(ms).removesuffix(".0")


Summary = dict[str, Any]
"""JSON values by vLLM's keys."""


def summarize(
    outcomes: Outcomes,
    duration_s: float,
    slo: Slo | None = None,
    percentiles: Sequence[float] = (99.0,),
    offered: int | None = None,
) -> Summary:
    """Summarizes a run of `duration_s`. `offered`: how many requests were sent, if some of them have no outcome."""
    complete = outcomes.is_complete
    completed = int(complete.sum())
    num_offered = len(outcomes) if offered is None else offered
    input_tokens = int(outcomes.input_length[complete].sum())
    output_tokens = int(outcomes.output_length[complete].sum())
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    summary: Summary = {
        "duration": duration_s,
        "offered": num_offered,
        "completed": completed,
        "failed": len(outcomes) - completed,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "total_cached_tokens": int(outcomes.cached_tokens[complete].sum()),
        "request_throughput": completed * per_s,
        "output_throughput": output_tokens * per_s,
        "total_token_throughput": (input_tokens + output_tokens) * per_s,
    }
    if slo:
        good = int(slo.is_met(outcomes).sum())
        summary["request_goodput"] = good * per_s
        summary["attainment"] = good / num_offered if num_offered else 0.0
        summary["goodput_slo"] = slo.to_json()
    else:
        summary["request_goodput"] = None
    several = complete & (outcomes.output_length > 1)
    summary |= _times("ttft", outcomes.ttft_s[complete], percentiles)
    summary |= _times("tpot", outcomes.tpot_s[several], percentiles)
    summary |= _gap_times(outcomes, percentiles)
    summary |= _times("e2el", outcomes.e2el_s[complete], percentiles)
    summary |= _times("largest_gap", outcomes.largest_gap_s[several], percentiles)
    if outcomes.errors:
        summary["errors"] = dict(sorted(outcomes.errors.items(), key=lambda item: -item[1])[:20])
    return summary


SLO_SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Multiples of the SLO for which a report shows attainment."""


def distributions(outcomes: Outcomes, summary: Summary) -> dict[str, Any]:
    """Histograms of requests and tokens for a report: a few kilobytes, however many there were.

    TTFT and ITL have `edges_s` and `counts`. With an SLO there are also pairs of a scale and the attainment with all
    limits multiplied by it.
    """
    first_tokens = Gaps()
    first_tokens.add(outcomes.ttft_s[outcomes.is_complete])
    drawn: dict[str, Any] = {
        "ttft_histogram": first_tokens.histogram(bins_per_decade=40),
        "itl_histogram": outcomes.gaps.histogram(bins_per_decade=40),
    }
    if limits := summary.get("goodput_slo"):
        slo, offered = Slo(**limits), max(1, summary["offered"])
        drawn["attainment_by_scale"] = [
            [scale, float(slo.scaled(scale).is_met(outcomes).sum()) / offered] for scale in SLO_SCALES
        ]
    return drawn


def measurement(rate: object, outcomes: Outcomes, summary: Summary, more: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of `rates` in a result file: the summary of a run, what a report draws of it, and more fields."""
    return {
        "rate": rate,
        "summary": summary,
        **distributions(outcomes, summary),
        "ttft_parts": ttft_parts(outcomes),
        **more,
    }


def ttft_parts(outcomes: Outcomes) -> dict[str, float] | None:
    """The mean time to first token in parts, in milliseconds: queue, prefill, and the rest (generator, wire, router).

    None if the endpoint reported no durations.
    """
    complete = outcomes.is_complete
    queue_s, prefill_s = outcomes.queue_s[complete], outcomes.prefill_s[complete]
    if not len(queue_s) or not prefill_s.any():
        return None
    rest_s = outcomes.ttft_s[complete] - queue_s - prefill_s
    parts = {"queue": queue_s, "prefill": prefill_s, "rest": rest_s}
    return {name: float(seconds.mean()) * 1e3 for name, seconds in parts.items()}


def _times(name: str, seconds: NDArray[np.float64], percentiles: Sequence[float]) -> Summary:
    ms = seconds * 1e3
    values = {
        f"mean_{name}_ms": float(ms.mean()) if len(ms) else 0.0,
        f"median_{name}_ms": float(np.median(ms)) if len(ms) else 0.0,
        f"std_{name}_ms": float(ms.std()) if len(ms) else 0.0,
    }
    for percent in percentiles:
        values[f"p{percent:g}_{name}_ms"] = float(np.percentile(ms, percent)) if len(ms) else 0.0
    return values


def _gap_times(outcomes: Outcomes, percentiles: Sequence[float]) -> Summary:
    gaps = outcomes.gaps
    values = {
        "mean_itl_ms": gaps.mean() * 1e3,
        "median_itl_ms": gaps.percentile(50) * 1e3,
        "std_itl_ms": gaps.std() * 1e3,
    }
    return values | {f"p{percent:g}_itl_ms": gaps.percentile(percent) * 1e3 for percent in percentiles}
