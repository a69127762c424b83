"""The result file and the printed lines of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from baton.bench.compare.interleaved import MeasuredArrangement, RateRun
from baton.bench.compare.run import Comparison
from baton.bench.compare.verdict import Contender, Trial, decide
from baton.bench.config import CompareConfig
from baton.bench.results.result_file import Result, new_result
from baton.bench.results.spread import Spread
from baton.bench.results.summary import Slo, measurement

_P99_GAP = "p99_largest_gap_ms"


def contender(arrangement: MeasuredArrangement) -> Contender:
    """The measurements of an arrangement, as the verdict takes them."""
    trials = []
    for run in [*arrangement.runs, *arrangement.common]:
        offered = run.summary["offered"]
        trials.append(Trial(run.repeat, run.rate, round(run.summary["attainment"] * offered), offered, run.is_met))
    return Contender(arrangement.name, arrangement.goodputs, trials)


def ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratios of values that were measured in turn, pair by pair; undefined and infinite ratios are left out."""
    return [own / other for own, other in zip(mine, others, strict=False) if other > 0 and math.isfinite(own)]


def best_disaggregated(measured: Sequence[MeasuredArrangement]) -> MeasuredArrangement | None:
    """The arrangement with the highest goodput among those with prefill and decode nodes."""
    disaggregated = [
        arrangement for arrangement in measured if arrangement.arrangement.is_disaggregated and arrangement.goodputs
    ]
    return max(disaggregated, key=lambda arrangement: median(arrangement.goodputs), default=None)


def compare_result(config: CompareConfig, comparison: Comparison, created: str) -> Result:
    """The result file's content."""
    measured = comparison.measured
    workload = config.workload
    arrangements = [_arrangement(arrangement, comparison.slo) for arrangement in measured]
    result = new_result("compare", workload.to_json(), arrangements, workload.seed, created)
    base = next((arrangement for arrangement in measured if arrangement.arrangement.is_colocated), None)
    best = best_disaggregated(measured)
    found_verdict = decide(contender(best), contender(base)) if base is not None and best is not None else None
    is_settled = found_verdict is not None and found_verdict.is_settled
    result |= {
        "max_concurrency": None,
        "slo": comparison.slo.to_json(),
        "attainment": config.attainment,
        "undisturbed": comparison.undisturbed,
        "repeats": max((len(arrangement.goodputs) for arrangement in measured), default=0),
        "run_s": config.run_s,
        "tuned": [
            {"name": str(tuned.arrangement), "tried": [asdict(size) for size in tuned.tried]}
            for tuned in comparison.tuned
        ],
        "verdict": asdict(found_verdict) if found_verdict is not None else None,
        "is_complete": comparison.failure is None,
        "notes": _notes(comparison),
        "goodput": {arrangement.name: median(arrangement.goodputs) for arrangement in measured if arrangement.goodputs},
        "goodput_spread": {
            arrangement.name: asdict(Spread.of(arrangement.goodputs))
            for arrangement in measured
            if arrangement.goodputs
        },
        "best_split": str(best.arrangement) if best is not None else None,
        "p99_gap_ms": {arrangement.name: median(_gaps(arrangement)) for arrangement in measured if arrangement.common},
        "common_rate": _median_or_none([run.rate for run in measured[0].common]) if measured else None,
    }
    for name, values in _ratios_to_colocated(base, best, is_settled=is_settled).items():
        result[name] = median(values) if values else None
        result[f"{name}_spread"] = asdict(Spread.of(values)) if values else None
    return result


def _notes(comparison: Comparison) -> list[str]:
    """Says why the comparison ended early, if it did."""
    if comparison.failure is None:
        return []
    so_far = "" if comparison.measured and comparison.measured[0].common else "; goodputs are what was found until then"
    return [f"ended early: {comparison.failure}{so_far}"]


def _ratios_to_colocated(
    base: MeasuredArrangement | None, best: MeasuredArrangement | None, *, is_settled: bool
) -> dict[str, list[float]]:
    """Ratios of the best disaggregated arrangement to the colocated one, as far as they mean something.

    There is no ratio of goodputs if it is not settled which is higher, and none of gaps at a rate at which one of the
    two broke the SLO.
    """
    if base is None or best is None:
        return {"goodput_ratio": [], "p99_gap_ratio": []}
    kept = [
        (mine, other) for mine, other in zip(best.common, base.common, strict=False) if mine.is_met and other.is_met
    ]
    return {
        "goodput_ratio": [ratio for ratio in ratios(best.goodputs, base.goodputs) if ratio > 0] if is_settled else [],
        "p99_gap_ratio": ratios([_gap(mine) for mine, _ in kept], [_gap(other) for _, other in kept]),
    }


def limited_by(arrangement: MeasuredArrangement, slo: Slo) -> dict[str, Any] | None:
    """The share of offered requests that kept each limit alone, at the lowest rate above its goodput that failed."""
    above = median(arrangement.goodputs) if arrangement.goodputs else math.inf
    broken = [run for run in arrangement.runs if run.rate > above and not run.is_met]
    if not broken:
        return None
    run = min(broken, key=lambda run: run.rate)
    kept = {
        name: float(Slo(**{name: limit}).is_met(run.watched.run.outcomes).sum()) / max(1, run.summary["offered"])
        for name, limit in slo.to_json().items()
    }
    busy = {name: sum(shares.values()) for name, shares in run.watched.busy_shares().items()}
    return {"rate": run.rate, "attainment": run.summary["attainment"], "kept": kept, "busy": busy}


def _gap(run: RateRun) -> float:
    return float(run.summary[_P99_GAP])


def _gaps(arrangement: MeasuredArrangement) -> list[float]:
    return [_gap(run) for run in arrangement.common]


def _median_or_none(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _arrangement(arrangement: MeasuredArrangement, slo: Slo) -> dict[str, Any]:
    return {
        "name": arrangement.name,
        "prefill": arrangement.arrangement.prefill,
        "decode": arrangement.arrangement.decode,
        "cores": len(set(arrangement.cores.values())),
        "gpus": 0,
        "pinned": dict(arrangement.cores),
        "max_num_batched_tokens": arrangement.max_num_batched_tokens,
        "goodput": {
            "rates": arrangement.goodputs,
            "per_node": [rate / arrangement.arrangement.num_nodes for rate in arrangement.goodputs],
        },
        "limited_by": limited_by(arrangement, slo),
        "rates": [_rate(run, is_common=False) for run in arrangement.runs]
        + [_rate(run, is_common=True) for run in arrangement.common],
    }


def _rate(run: RateRun, *, is_common: bool) -> dict[str, Any]:
    outcomes = run.watched.run.outcomes
    more = {
        "repeat": run.repeat,
        "is_common": is_common,
        "generator": run.watched.run.load.to_json(),
        "busy": run.watched.busy_shares(),
        "outcomes": outcomes.columns(),
    }
    if is_common:
        more["timeline"] = run.watched.timeline_rows()
    return measurement(run.rate, outcomes, run.summary, more)


def rows(comparison: Comparison) -> list[list[str]]:
    """Table rows, one for each arrangement."""
    lines = []
    for arrangement in comparison.measured:
        if not arrangement.goodputs:
            lines.append([arrangement.name, str(arrangement.max_num_batched_tokens), *"-----"])
            continue
        spread = Spread.of(arrangement.goodputs)
        lines.append(
            [
                arrangement.name,
                str(arrangement.max_num_batched_tokens),
                f"{spread.median:.2f} [{spread.p10:.2f}, {spread.p90:.2f}]",
                f"{spread.median / arrangement.arrangement.num_nodes:.2f}",
                _common(arrangement, "p99_ttft_ms"),
                _common(arrangement, "p99_tpot_ms"),
                _common(arrangement, _P99_GAP),
            ]
        )
    return lines


def _common(arrangement: MeasuredArrangement, key: str) -> str:
    return f"{median(float(run.summary[key]) for run in arrangement.common):.1f}" if arrangement.common else "-"


def verdict(result: Result) -> list[str]:
    """The conclusions as sentences."""
    lines = [*result["notes"], *_tuned_lines(result)]
    base = next((arrangement["name"] for arrangement in result["arrangements"] if not arrangement["prefill"]), "")
    if result["verdict"] is not None:
        lines.append(_decision_line(result, base))
    if result["p99_gap_ratio"] is not None:
        spread = result["p99_gap_ratio_spread"]
        lines.append(
            f"The P99 largest gap of {result['best_split']} is {result['p99_gap_ratio']:.2f} [{spread['p10']:.2f}, "
            f"{spread['p90']:.2f}] times that of {base}, at {result['common_rate']:.2f} requests/s"
        )
    elif result["verdict"] is not None and result["common_rate"] is not None:
        lines.append(f"Gaps are not compared: at {result['common_rate']:.2f} requests/s not both kept the SLO")
    for arrangement in result["arrangements"]:
        limit = arrangement["limited_by"]
        if limit is not None:
            kept = ", ".join(f"{name.removesuffix('_ms').upper()} {share:.0%}" for name, share in limit["kept"].items())
            busy = ", ".join(f"{name} {share:.0%}" for name, share in limit["busy"].items())
            lines.append(
                f"{arrangement['name']} at {limit['rate']:.2f}/s: {kept} of the requests kept it"
                f"{f'; busy computing: {busy} of the time' if busy else ''}"
            )
        reasons = {rate["generator"]["bottleneck"] for rate in arrangement["rates"]} - {""}
        if reasons:
            lines.append(f"{arrangement['name']}: in some runs the generator was late: {sorted(reasons)[-1]}")
    return lines


def _tuned_lines(result: Result) -> list[str]:
    """The sizes of steps that were tried for each arrangement, with the goodput of each."""
    lines = []
    for tuned in result["tuned"]:
        sizes = sorted(tuned["tried"], key=lambda size: size["max_num_batched_tokens"])
        tried = ", ".join(f"{size['max_num_batched_tokens']}: {size['goodput']:.2f}/s" for size in sizes)
        lines.append(f"Steps of {tuned['name']} were tuned for the SLO; goodput by tokens of a step: {tried}")
    return lines


def _decision_line(result: Result, base: str) -> str:
    decision = result["verdict"]
    leader, follower = decision["leader"], decision["follower"]
    goodputs = f"{result['goodput'].get(leader, 0):.2f} against {result['goodput'].get(follower, 0):.2f} requests/s"
    if not decision["is_settled"]:
        return (
            f"Not settled whether {leader} or {follower} has the higher goodput ({goodputs}): {decision['finding']}. "
            f"What would settle it: {decision['remedy']}"
        )
    if result["goodput_ratio"] is None:
        return f"{leader} has the higher goodput ({goodputs}); {follower} kept the SLO at no rate that was tried"
    spread = result["goodput_ratio_spread"]
    return (
        f"{result['best_split']} has {result['goodput_ratio']:.2f} [{spread['p10']:.2f}, {spread['p90']:.2f}] times "
        f"the goodput of {base}: {decision['finding']}"
    )
