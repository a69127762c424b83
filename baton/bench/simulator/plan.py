"""The plan of `baton simulate` and its result: one run for each arrangement, policy and rate."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from baton.bench.arrangement import Arrangement
from baton.bench.results.goodput import Goodput, find_goodput
from baton.bench.results.result_file import Result, new_result
from baton.bench.results.summary import Slo, measurement, summarize
from baton.bench.results.tenants import TenantRun, tenants_result
from baton.bench.simulator.cells import simulate_cells
from baton.bench.simulator.config import NodeSizes, PlannerMode, SimulationConfig
from baton.bench.simulator.events import TimelineEntry
from baton.bench.simulator.shapes import RankFigures
from baton.bench.simulator.simulation import Simulated
from baton.bench.simulator.step_times import FormulaTimes
from baton.bench.workloads.spec import WorkloadSpec
from baton.bench.workloads.tenants import TenantsWorkload
from baton.messages.node import Role
from router.admission.limits import DispatchLimits


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """What to simulate. All runs differ only in arrangement, policy and rate."""

    workload: WorkloadSpec
    config: SimulationConfig
    arrangements: Sequence[Arrangement]
    policies: Sequence[str] = ("cost",)
    slo: Slo = field(default_factory=Slo)
    finds_goodput: bool = False
    attainment: float = 0.9
    """Share of the requests that must keep the SLO at a rate that counts as goodput."""
    percentiles: Sequence[float] = (99.0,)
    keeps_outcomes: bool = False
    ranks: RankFigures = field(default_factory=RankFigures)
    """What a division into ranks costs; the sizes in `config` are of nodes that are divided already."""

    def tenants_workload(self) -> TenantsWorkload | None:
        """The requests of the tenants, which send at their own rates; None: there are none. Raises InvalidRequest."""
        return TenantsWorkload(self.config.tenants, self.workload) if self.config.tenants else None

    def workload_json(self) -> dict[str, Any]:
        """The workload as a result file has it."""
        values, tenants = self.workload.to_json(), self.tenants_workload()
        if tenants is not None:
            values |= {"num_prompts": len(tenants), "request_rate": tenants.rate, "tenants": tenants.to_json()}
        return values


def run_plan(plan: SimulationPlan, created: str, progress: Callable[[str, int], None] = lambda name, n: None) -> Result:
    """Simulates all runs. `progress` is called with a run's name and the number of its requests that have ended."""
    arrangements = []
    for arrangement in plan.arrangements:
        for policy in plan.policies:
            name = str(arrangement) if len(plan.policies) == 1 else f"{arrangement} {policy}"
            config = replace(plan.config, arrangement=arrangement, policy=policy)
            arrangements.append(_arrangement(plan, config, name, progress))
    result = new_result("simulate", plan.workload_json(), arrangements, plan.config.seed, created)
    result["max_concurrency"] = plan.config.max_concurrency
    if plan.finds_goodput:
        result |= _compared(arrangements)
    return result


def _arrangement(
    plan: SimulationPlan, config: SimulationConfig, name: str, progress: Callable[[str, int], None]
) -> dict[str, Any]:
    rates: dict[float, dict[str, Any]] = {}

    def run_at(rate: float) -> dict[str, Any]:
        if rate not in rates:
            rates[rate] = _rate(plan, config, rate, lambda ended: progress(f"{name} at {rate:g}/s", ended))
        return rates[rate]

    goodput: Goodput | None = None
    if plan.finds_goodput:
        start = config.arrangement.num_nodes * 1.0
        goodput = find_goodput(lambda rate: float(run_at(rate)["summary"]["attainment"]), start, plan.attainment)
    else:
        tenants = plan.tenants_workload()
        run_at(plan.workload.request_rate if tenants is None else tenants.rate)
    values: dict[str, Any] = {
        "name": name,
        "policy": config.policy,
        "gpus": config.num_ranks,
        "shapes": _shapes(config),
        "cores": None,
        "rates": [rates[rate] for rate in sorted(rates)],
    }
    if goodput is not None:
        values["goodput"] = {
            "rate": goodput.rate,
            "next_rate": goodput.next_rate,
            "per_gpu": goodput.rate / config.num_ranks,
            "attainment": goodput.attainment,
            "target": plan.attainment,
        }
    return values


def _shapes(config: SimulationConfig) -> dict[str, str]:
    """The shapes of the nodes of each role that there are."""
    counts = {Role.PREFILL: config.arrangement.prefill, Role.DECODE: config.arrangement.decode}
    return {role.value: str(config.sizes_of(role).shape) for role, count in counts.items() if count}


def _rate(
    plan: SimulationPlan, config: SimulationConfig, rate: float, progress: Callable[[int], None]
) -> dict[str, Any]:
    tenants = plan.tenants_workload()
    workload = tenants or replace(plan.workload, request_rate=rate).build()
    started = _cpu_s()
    done = simulate_cells(workload, config, progress)
    took_s = _cpu_s() - started
    summary = summarize(done.outcomes, done.duration_s, plan.slo, plan.percentiles)
    more: dict[str, Any] = {"ttft_parts": done.parts.means_ms(), "simulator": _simulator(done, took_s, config.cells)}
    if tenants is not None:
        more["tenants"] = _tenants(tenants, config, done)
    if config.planner is not PlannerMode.OFF:
        more["moves"] = done.moves
    if plan.keeps_outcomes:
        more["outcomes"] = done.outcomes.columns()
    if done.timeline is not None:
        more["timeline"] = timeline_rows(done)
    return measurement(None if rate == float("inf") else rate, done.outcomes, summary, more)


def _tenants(workload: TenantsWorkload, config: SimulationConfig, done: Simulated) -> dict[str, Any]:
    """The figures by tenant of a simulation of these requests."""
    numbers, arrivals_s = workload.tenant_numbers, workload.arrivals_s
    of_outcome = numbers[done.outcomes.index]
    runs = [
        TenantRun(
            name=load.name,
            weight=load.weight,
            service_class=load.service_class,
            begin_s=load.begin_s,
            end_s=load.end_s,
            arrivals_s=arrivals_s[numbers == number],
            outcomes=done.outcomes,
            is_own=of_outcome == number,
        )
        for number, load in enumerate(config.tenants)
    ]
    return tenants_result(runs, (config.limits or DispatchLimits()).fair_output_weight)


def _cpu_s() -> float:
    """CPU time of this process and of its children that have ended, seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _simulator(done: Simulated, took_s: float, cells: int) -> dict[str, Any]:
    drafts = done.drafts
    speculation = {} if drafts is None else asdict(drafts) | {"tokens_per_step": drafts.tokens_per_step}
    images = {} if done.encoders is None else {"encoders": done.encoders}
    return {
        **speculation,
        **images,
        "cells": cells,
        "steps": done.num_steps,
        "preemptions": done.num_preemptions,
        "node_failures": done.num_failures,
        "retries": done.num_retries,
        "bytes_moved": done.bytes_moved,
        "mean_transfer_ms": done.parts.transfer_s / max(1, done.parts.count) * 1e3,
        "cpu_s": took_s,
        "cpu_us_per_request": took_s / max(1, len(done.outcomes)) * 1e6,
    }


def timeline_rows(done: Simulated) -> dict[str, list[list[Any]]]:
    """The timelines of a result file; empty if the simulation kept none."""
    return {node: list(map(_entry, entries)) for node, entries in (done.timeline or {}).items()}


def _entry(entry: TimelineEntry) -> list[Any]:
    return [round(entry.start_s, 6), round(entry.end_s, 6), entry.kind, entry.tokens]


def _compared(arrangements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Goodput per GPU, and the ratio of the best other arrangement to the colocated one."""
    per_gpu = {arrangement["name"]: arrangement["goodput"]["per_gpu"] for arrangement in arrangements}
    best = max((name for name in per_gpu if not name.startswith("colocated")), key=per_gpu.__getitem__, default=None)
    colocated = max((rate for name, rate in per_gpu.items() if name.startswith("colocated")), default=0.0)
    return {
        "goodput": per_gpu,
        "best_split": best,
        "goodput_ratio": per_gpu[best] / colocated if best is not None and colocated else None,
    }


# Simulations of published experiments, with published coefficients where there are any.


def preset_plan(name: str, trace: str | None, seed: int) -> SimulationPlan:
    """Makes the plan of a `Preset`; raises KeyError for other names."""
    match name:
        case "mooncake":
            return mooncake(trace, seed)
        case "day":
            return day(trace, seed)
    return {"distserve": distserve, "fleet": fleet}[name](seed)


def distserve(seed: int = 0) -> SimulationPlan:
    """DistServe's chatbot on OPT-13B (Zhong et al., OSDI 2024, table 1 and figure 8), with every split of four A100.

    The GPUs are linked by NVLink with 300 GB/s in each direction; 26 of 80 GB are weights.
    """
    return SimulationPlan(
        WorkloadSpec(dataset="sharegpt-like", num_prompts=2000, seed=seed),
        SimulationConfig(Arrangement(0, 4), NodeSizes(max_model_len=2048), nic_bytes_per_s=300e9, seed=seed),
        Arrangement.splits(4),
        slo=Slo(250, 100),
        finds_goodput=True,
    )


LLAMA2_70B_ON_8_A800 = FormulaTimes(
    prefill_ms=30.0,
    prefill_token_ms=0.112,
    prefill_square_ms=1.05e-6,
    decode_ms=20.0,
    decode_context_ms=2.0e-5,
    decode_sequence_ms=0.05,
)
"""Our estimate: half of 8 x 312 TFLOPS for 140 GFLOP per token and 1.3 MFLOP per squared token in attention; a step
reads 140 GB of weights at 7 TB/s, and 328 kB of keys and values for each token at 16 TB/s."""


def mooncake(trace: str | None, seed: int = 0) -> SimulationPlan:
    """Mooncake's conversation trace on 8 prefill and 8 decode nodes, with its policies (FAST 2025, figure 8)."""
    sizes = NodeSizes(
        times=LLAMA2_70B_ON_8_A800,
        block_size=512,
        cache_tokens=3_000_000,
        kv_bytes_per_token=327_680,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
    )
    arrangement = Arrangement(8, 8)
    return SimulationPlan(
        WorkloadSpec(dataset="mooncake", dataset_path=trace or "", time_scale=MOONCAKE_SPEED, seed=seed),
        SimulationConfig(arrangement, sizes, nic_bytes_per_s=100e9, seed=seed),
        [arrangement],
        ("random", "load-balanced", "local-cache", "global-cache"),
        ranks=RankFigures(weight_bytes=140e9),
    )


MOONCAKE_SPEED = 1.4
"""Speed at which the trace is replayed. Prefill nodes are then about as busy as in the paper, judged by the queueing
time with random placement: the paper does not give their utilisation."""


def day(folder: str | None, seed: int = 0) -> SimulationPlan:
    """A day with lengths of Azure's traces of 2023 on six nodes: each fixed division of them fails in a part of it."""
    arrangement, slo = Arrangement(3, 3), Slo(2000, 80)
    config = SimulationConfig(arrangement, target_ttft_ms=2000, target_tpot_ms=80, seed=seed)
    workload = WorkloadSpec(dataset="azure_day", dataset_path=folder or "", seed=seed)
    return SimulationPlan(workload, config, [arrangement], slo=slo)


def fleet(seed: int = 0) -> SimulationPlan:
    """A million requests on 512 nodes, to measure the simulator itself. Two routers have half of the nodes each."""
    sizes = replace(NodeSizes(), block_size=64)
    arrangement = Arrangement(256, 256)
    workload = WorkloadSpec(
        dataset="random",
        num_prompts=1_000_000,
        request_rate=1500,
        random_input_len=512,
        random_output_len=128,
        random_range_ratio=0.5,
        seed=seed,
    )
    config = SimulationConfig(arrangement, sizes, choices=8, cells=2, seed=seed)
    return SimulationPlan(workload, config, [arrangement], ("cost",))
