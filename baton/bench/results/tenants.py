"""What each of several tenants got, in the periods of a run and over time.

The service that a tenant gets is counted as the router counts it (`router.admission.ledger`): the tokens of prompts
that were not cached, and those that were generated, each of which counts for several. A prompt counts when its first
token arrives, and generated tokens evenly from then on until the request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.bench.results.outcome import Outcomes

Times = NDArray[np.float64]
_SETTLING_S = 20.0
"""The figures of a period leave out so much of its begin, but at most half of the period: until then requests run that
came before."""
_MOST_WINDOWS = 60
_WINDOWS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


@dataclass(frozen=True, slots=True)
class TenantRun:
    """One tenant's part of a run. All times are seconds from the run's start."""

    name: str
    weight: float
    service_class: str
    begin_s: float
    """When it began to send, and when it ended to."""
    end_s: float
    arrivals_s: Times
    """When its requests were due, in rising order, those among them that have no outcome because the run was ended."""
    outcomes: Outcomes
    is_own: NDArray[np.bool_]
    """Which of the outcomes are this tenant's."""
    offset_s: float = 0.0
    """When the clock of the outcomes began."""

    def columns(self, output_weight: float) -> _Columns:
        """Its outcomes as columns."""
        own, outcomes = self.is_own, self.outcomes
        has_token = ~np.isnan(outcomes.first_token_s)
        is_complete = outcomes.is_complete[own]
        uncached = np.maximum(outcomes.input_length - outcomes.cached_tokens, 0) * has_token
        return _Columns(
            planned_s=outcomes.planned_s[own] + self.offset_s,
            first_s=outcomes.first_token_s[own] + self.offset_s,
            finished_s=outcomes.finished_s[own] + self.offset_s,
            prompt=uncached[own].astype(np.float64),
            output=outcomes.output_length[own].astype(np.float64),
            tpot_s=outcomes.tpot_s[own],
            is_complete=is_complete,
            is_refused=~is_complete & ~has_token[own],
            output_weight=output_weight,
        )


@dataclass(frozen=True, slots=True)
class _Columns:
    """The outcomes of a tenant as columns of equal lengths."""

    planned_s: Times
    first_s: Times
    """NaN where no token came."""
    finished_s: Times
    prompt: Times
    """Tokens of the prompt that were computed; 0 where no token came."""
    output: Times
    tpot_s: Times
    is_complete: NDArray[np.bool_]
    is_refused: NDArray[np.bool_]
    """Where the request failed before its first token."""
    output_weight: float

    def tokens_until(self, at_s: float) -> tuple[float, float]:
        """The computed tokens of prompts, and the generated tokens, until a time."""
        begun = self.first_s <= at_s
        length_s = np.maximum(self.finished_s - self.first_s, 1e-9)
        share = np.clip((at_s - self.first_s) / length_s, 0.0, 1.0)
        return float(self.prompt[begun].sum()), float((self.output * share)[begun].sum())


def tenants_result(runs: Sequence[TenantRun], output_weight: float) -> dict[str, Any]:
    """The figures of each tenant in each period, and over time, as the field `tenants` of a result file has them.

    `output_weight`: for how many tokens of a prompt a generated token counts, as the router was told.

    A period lasts as long as the same tenants send. What ends after all of them have ended is in no period.
    """
    columns = [run.columns(output_weight) for run in runs]
    edges = sorted({edge for run in runs for edge in (run.begin_s, run.end_s)})
    end_s = edges[-1]
    window_s = next((each for each in _WINDOWS_S if end_s / each <= _MOST_WINDOWS), _WINDOWS_S[-1])
    starts = np.arange(max(1, round(end_s / window_s)), dtype=np.float64) * window_s
    periods = []
    for begin, end in pairwise(edges):
        counted_from = begin + min(_SETTLING_S, (end - begin) / 2)
        rows = [_row(run, column, counted_from, end) for run, column in zip(runs, columns, strict=True)]
        total = sum(row["service_tokens_per_s"] for row in rows)
        for row in rows:
            row["service_share"] = row["service_tokens_per_s"] / total if total else 0.0
            row["service_share_per_weight"] = row["service_share"] / row["weight"]
        periods.append({"begin_s": begin, "end_s": end, "counted_from_s": counted_from, "tenants": rows})
    return {
        "output_weight": output_weight,
        "periods": periods,
        "window_s": window_s,
        "windows_from_s": starts.tolist(),
        "over_time": [
            {"name": run.name, **_over_time(column, starts, window_s)}
            for run, column in zip(runs, columns, strict=True)
        ],
    }


def _row(run: TenantRun, columns: _Columns, begin_s: float, end_s: float) -> dict[str, Any]:
    """A tenant's figures of the requests that were due in a time, and of the tokens in that time."""
    due = (columns.planned_s >= begin_s) & (columns.planned_s < end_s)
    ok = due & columns.is_complete
    ttft_ms = (columns.first_s - columns.planned_s)[ok] * 1e3
    tpot_ms = columns.tpot_s[ok & (columns.output > 1)] * 1e3
    (prompt, output), (prompt_before, output_before) = columns.tokens_until(end_s), columns.tokens_until(begin_s)
    length_s = end_s - begin_s
    return {
        "name": run.name,
        "weight": run.weight,
        "class": run.service_class,
        "offered": int(((run.arrivals_s >= begin_s) & (run.arrivals_s < end_s)).sum()),
        "completed": int(ok.sum()),
        "refused": int((due & columns.is_refused).sum()),
        "failed": int((due & ~columns.is_complete & ~columns.is_refused).sum()),
        "median_ttft_ms": _percentile(ttft_ms, 50),
        "p99_ttft_ms": _percentile(ttft_ms, 99),
        "median_tpot_ms": _percentile(tpot_ms, 50),
        "p99_tpot_ms": _percentile(tpot_ms, 99),
        "total_token_throughput": (prompt - prompt_before + output - output_before) / length_s,
        "output_throughput": (output - output_before) / length_s,
        "service_tokens_per_s": (prompt - prompt_before + columns.output_weight * (output - output_before)) / length_s,
    }


def _over_time(columns: _Columns, starts: Times, window_s: float) -> dict[str, list[float | None]]:
    """The service in each window in tokens per second, and the median time to first token of the requests due in it."""
    edges = np.append(starts, starts[-1] + window_s)
    until = np.array([prompt + columns.output_weight * output for prompt, output in map(columns.tokens_until, edges)])
    planned_s = columns.planned_s[columns.is_complete]
    ttft_ms = (columns.first_s - columns.planned_s)[columns.is_complete] * 1e3
    medians = [_percentile(ttft_ms[(planned_s >= start) & (planned_s < start + window_s)], 50) for start in starts]
    return {"service_tokens_per_s": (np.diff(until) / window_s).tolist(), "median_ttft_ms": medians}


def _percentile(values: Times, percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None
