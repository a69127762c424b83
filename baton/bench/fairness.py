"""Measures whether a tenant that asks for little is served beside a flood of another one's requests, on real processes.

A pair of simulated nodes with a small capacity serves two tenants without quotas. First the capacity and the time per
token of a full batch are measured with a closed loop. Then the light tenant sends a fifth of the capacity in an open
loop, at first alone, and after a while beside the flood, which sends several times as much as it. Both can be repeated
with the router's order of waiting requests turned off, at the same rates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from baton.bench.config import OverloadConfig
from baton.bench.load.endpoint import Target
from baton.bench.load.run import LoadPlan, LoadRun, run_concurrently
from baton.bench.overload import ClosedLoop, closed_loop, overload_cluster, overload_workload
from baton.bench.results.outcome import Outcomes
from baton.bench.results.result_file import Result, new_result
from baton.bench.results.summary import measurement, summarize
from baton.bench.results.tenants import TenantRun, tenants_result
from router.admission.limits import DispatchLimits

LIGHT, FLOOD = "light", "flood"
TARGET_TTFT_RATIO = 4.0
TARGET_TPOT_RATIO = 1.1
TARGET_THROUGHPUT_RATIO = 0.98
_LIGHT_SHARE = 0.2
"""The light tenant's part of the capacity, less than a half, which is its share beside one other tenant."""


@dataclass(frozen=True, slots=True)
class Beside:
    """The light tenant alone and beside the flood, with one order of waiting requests. Times are milliseconds."""

    alone: Mapping[str, Any]
    beside: Mapping[str, Any]
    """A tenant's figures in a period, see `baton.bench.results.tenants`."""
    throughput: float
    """Tokens per second of both tenants during the flood."""

    @staticmethod
    def of(figures: Mapping[str, Any]) -> Beside:
        """Reads the field `tenants` of a result of this benchmark."""
        # Before the flood, and during it.
        alone, beside = ({row["name"]: row for row in period["tenants"]} for period in figures["periods"])
        throughput = sum(row["total_token_throughput"] for row in beside.values())
        return Beside(alone[LIGHT], beside[LIGHT], throughput)

    def ratio(self, name: str) -> float | None:
        """A figure beside the flood over the one alone; None: one of them is missing."""
        alone, beside = self.alone[name], self.beside[name]
        return beside / alone if alone and beside is not None else None


def checks(fair: Beside, full_batch_tpot_ms: float, fcfs: Beside | None) -> list[tuple[str, str, bool]]:
    """What is required, what was measured, and whether it passed. `fcfs`: with the order turned off, if measured."""
    rows = []
    for name, text in (("median_ttft_ms", "median"), ("p99_ttft_ms", "p99")):
        ratio = fair.ratio(name)
        seen = (
            "not measured" if ratio is None else f"{fair.alone[name]:.0f} ms, {fair.beside[name]:.0f} ms: {ratio:.2f}"
        )
        rows.append(
            (
                f"{LIGHT}'s {text} time to first token is at most {TARGET_TTFT_RATIO:g} times that alone",
                seen,
                ratio is not None and ratio <= TARGET_TTFT_RATIO,
            )
        )
    lost = fair.beside["refused"] + fair.beside["failed"]
    rows.append((f"no request of {LIGHT} is refused or fails", f"{lost} of {fair.beside['offered']}", not lost))
    tpot_ms = fair.beside["median_tpot_ms"]
    rows.append(
        (
            f"{LIGHT}'s time per token is at most {TARGET_TPOT_RATIO:g} times that of a full batch",
            "not measured" if tpot_ms is None else f"{tpot_ms:.1f} ms, {full_batch_tpot_ms:.1f} ms",
            tpot_ms is not None and tpot_ms <= full_batch_tpot_ms * TARGET_TPOT_RATIO,
        )
    )
    if fcfs is not None:
        share = fair.throughput / fcfs.throughput if fcfs.throughput else 0.0
        rows.append(
            (
                f"tokens per second are at least {TARGET_THROUGHPUT_RATIO:g} times those with --fairness off",
                f"{fair.throughput:.0f}/s, {fcfs.throughput:.0f}/s: {share:.3f}",
                share >= TARGET_THROUGHPUT_RATIO,
            )
        )
    return rows


def run(config: OverloadConfig, created: str, *, with_fcfs: bool = False) -> Result:
    """Starts the clusters and puts the loads on them; `with_fcfs`: also with `--fairness off`. Raises BatonError."""
    quotas = {LIGHT: None, FLOOD: None}
    with overload_cluster(config, quotas, "--fairness", "tokens") as targets:
        full = closed_loop(config, targets[FLOOD], config.max_num_seqs)
        measured = {"tokens": _measure(config, targets, full)}
    if with_fcfs:
        with overload_cluster(config, quotas, "--fairness", "off") as targets:
            measured["off"] = _measure(config, targets, full)
    return result_of(config, full, measured, created)


def result_of(config: OverloadConfig, full: ClosedLoop, measured: Mapping[str, Any], created: str) -> Result:
    """The result file. `measured`: what `evaluate` returned, by the setting of `--fairness`, `tokens` first."""
    arrangements = [
        {"name": f"--fairness {fairness}", "gpus": None, "cores": None, "rates": [rate]}
        for fairness, rate in measured.items()
    ]
    beside = {fairness: Beside.of(rate["tenants"]) for fairness, rate in measured.items()}
    result = new_result("overload", _workload(config, full), arrangements, config.seed, created)
    result["full_batch"] = {"request_throughput": full.rate, "median_tpot_ms": full.median_tpot_ms}
    result["checks"] = [
        {"promise": what, "seen": seen, "passed": ok}
        for what, seen, ok in checks(beside["tokens"], full.median_tpot_ms, beside.get("off"))
    ]
    return result


def alone_s(config: OverloadConfig) -> float:
    """How long the light tenant sends alone, in seconds."""
    return config.overload_s / 2


def _rates(config: OverloadConfig, full: ClosedLoop) -> dict[str, float]:
    light = full.rate * _LIGHT_SHARE
    return {LIGHT: light, FLOOD: light * config.factor}


def _workload(config: OverloadConfig, full: ClosedLoop) -> dict[str, Any]:
    """The workload as a result file has it."""
    begins = {LIGHT: 0.0, FLOOD: alone_s(config)}
    end_s = alone_s(config) + config.overload_s
    return {
        "input_len": config.input_len,
        "output_len": config.output_len,
        "tenants": [
            {"name": name, "rate": rate, "begin_s": begins[name], "end_s": end_s}
            for name, rate in _rates(config, full).items()
        ],
    }


def _measure(config: OverloadConfig, targets: Mapping[str, Target], full: ClosedLoop) -> dict[str, Any]:
    """Puts both loads on a cluster; returns the measurement as a result file has it."""
    before_s, end_s = alone_s(config), alone_s(config) + config.overload_s
    plans = {}
    for number, (name, rate) in enumerate(_rates(config, full).items(), start=2):
        begin_s = 0.0 if name == LIGHT else before_s
        plans[name] = LoadPlan(
            replace(targets[name], ttft_slo_ms=None),
            overload_workload(config, rate, round(rate * (end_s - begin_s)), number),
            delay_s=begin_s,
        )
    # What waits of the flood when the light tenant has all answers is not waited for.
    done = asyncio.run(run_concurrently(list(plans.values()), as_long_as_first=True))
    runs = dict(zip(plans, done, strict=True))
    for load in runs.values():
        load.check("the cluster does not answer any more")
    return evaluate(config, plans, runs)


def evaluate(config: OverloadConfig, plans: Mapping[str, LoadPlan], runs: Mapping[str, LoadRun]) -> dict[str, Any]:
    """Computes the measurement of one cluster from the outcomes of the loads."""
    end_s, start_s = alone_s(config) + config.overload_s, runs[LIGHT].began_s
    tenants, together = [], Outcomes()
    for name, load in runs.items():
        offset_s = load.began_s - start_s
        tenants.append(
            TenantRun(
                name=name,
                weight=1.0,
                service_class="normal",
                begin_s=plans[name].delay_s,
                end_s=end_s,
                arrivals_s=np.array([request.arrival_s for request in plans[name].workload.build()]) + offset_s,
                outcomes=load.outcomes,
                is_own=np.ones(len(load.outcomes), dtype=bool),
                offset_s=offset_s,
            )
        )
        together.extend(load.outcomes)
    offered = sum(len(tenant.arrivals_s) for tenant in tenants)
    latest = max((load.load for load in runs.values()), key=lambda load: load.lag_p99_ms)
    more = {
        "generator": latest.to_json(),
        "tenants": tenants_result(tenants, DispatchLimits().fair_output_weight),
    }
    return measurement(offered / end_s, together, summarize(together, end_s, offered=offered), more)
