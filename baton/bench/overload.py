"""Offers a cluster ten times its capacity: what it still serves, how it refuses, and how soon it recovers.

The cluster has simulated nodes with a small capacity, so that ten times as much is little work for the load generator.
The capacity is measured with a closed loop first. Then three open loops run at the same time: the probe, with a tenth
of the capacity, from before the overload until well after it; and two tenants during the overload. One of them, the
greedy one, sends nine tenths of the load; its quota is half of the requests that may run at once.

Each request names its limit for the time to first token; the same limit decides what counts as good.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.bench.config import OverloadConfig
from baton.bench.live_cluster import LiveCluster, live_cluster
from baton.bench.load.endpoint import Target
from baton.bench.load.probe import probe
from baton.bench.load.run import LoadPlan, LoadRun, run_concurrently, run_load
from baton.bench.report.panels import Panel, Points, TimeAxis
from baton.bench.results.outcome import Outcomes
from baton.bench.results.result_file import machine, versions
from baton.bench.results.summary import Slo
from baton.bench.workloads.spec import WorkloadSpec
from baton.errors import BatonError
from baton.security.keys import new_key, write_keys
from baton.security.matrix import CallerRole

TARGET_GOODPUT = 0.8
TARGET_REFUSAL_S = 0.05
TARGET_RECOVERY_S = 30.0
WINDOW_S = 10.0
"""Goodput is counted in windows of this length, from the start of the overload."""
NORMAL_FACTOR = 1.25
"""Latency is normal if a window's median is at most this multiple of the median before the overload."""
NORMAL_WINDOW_S = 5.0
GREEDY, MODEST, PROBE = "greedy", "modest", "probe"
_GREEDY_SHARE = 0.9
_PROBE_SHARE = 0.1
_TYPED = ("RESOURCE_EXHAUSTED:", "UNAVAILABLE:", "HTTP 429:", "HTTP 503:")
_CAPACITY_WARM_UP_S = 3.0


@dataclass(frozen=True, slots=True)
class Refusals:
    """Requests that were refused, all tenants together."""

    count: int
    typed: int
    """Refusals with RESOURCE_EXHAUSTED or UNAVAILABLE, 429 or 503."""
    with_retry_after: int
    p50_s: float
    p99_s: float
    max_s: float
    """Times count from the planned time of a request."""


@dataclass(frozen=True, slots=True)
class OverloadReport:
    """The result of a run. Rates are requests per second."""

    config: OverloadConfig
    capacity: float
    offered: float
    windows: Sequence[float]
    """Goodput of each window of the overload."""
    tenants: Mapping[str, Mapping[str, float]]
    refusals: Refusals
    failed: Mapping[str, int]
    """Requests that failed without being refused, by error."""
    normal_ttft_s: float
    recovery_s: float | None
    """Time from the end of the overload until latency was normal; None: it was not while watched."""
    probe: Sequence[tuple[float, float]]
    """For the plot: planned time of each probe request, from the start of the overload, and its time to first token."""
    generator_late_ms: float
    """How late the latest of the generators sent its requests, 99th percentile."""

    @property
    def peak(self) -> float:
        """The highest goodput of all windows and of the capacity run."""
        return max(self.capacity, *self.windows)

    @property
    def lowest_share(self) -> float:
        """The goodput of the worst window, as a share of the peak."""
        return min(self.windows) / self.peak

    def checks(self) -> list[tuple[str, str, bool]]:
        """The checks: what is required, what was measured, and whether it passed."""
        refused, recovery = self.refusals, self.recovery_s
        bad = refused.count - min(refused.typed, refused.with_retry_after)
        return [
            (
                f"goodput in every {WINDOW_S:g} s is at least {TARGET_GOODPUT:.0%} of its peak",
                f"{self.lowest_share:.0%}",
                self.lowest_share >= TARGET_GOODPUT,
            ),
            ("every refusal is typed and has Retry-After", f"{bad} of {refused.count} have not", not bad),
            ("nothing fails otherwise", f"{sum(self.failed.values())}", not self.failed),
            (
                f"p99 of a refusal is within {TARGET_REFUSAL_S * 1e3:.0f} ms",
                f"{refused.p99_s * 1e3:.1f} ms",
                refused.p99_s <= TARGET_REFUSAL_S,
            ),
            (
                f"latency is normal again within {TARGET_RECOVERY_S:.0f} s",
                "not while watched" if recovery is None else f"{recovery:.1f} s",
                recovery is not None and recovery <= TARGET_RECOVERY_S,
            ),
        ]

    def panels(self) -> tuple[str, Mapping[str, Sequence[Panel]], TimeAxis]:
        """Goodput and the probe's latency over time, as `draw_panels` takes them."""
        config = self.config
        begin, end = -config.before_s, config.overload_s + config.after_s
        step = 20 if end - begin > 60 else 5
        seconds = range(int(begin // step + 1) * step, int(end) + 1, step)
        labels = {float(second): str(second) for second in seconds}
        time = TimeAxis(begin, end, labels, (0.0, config.overload_s), width=760, height=180)
        goods = [(WINDOW_S * (number + 0.5), rate) for number, rate in enumerate(self.windows)]
        late = [(at, took_s * 1e3) for at, took_s in self.probe]
        levels = (self.peak, self.peak * TARGET_GOODPUT)
        normal_ms = self.normal_ttft_s * 1e3
        title = (
            f"{config.factor:g} times the capacity of {self.capacity:.1f} requests/s from 0 to {config.overload_s:g} s"
        )
        panels = [
            _panel(f"good requests per second, in windows of {WINDOW_S:g} s", goods, levels, [goods]),
            _panel("the probe: milliseconds to the first token", late, (normal_ms,), []),
        ]
        return title, {"": panels}, time

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            **asdict(self),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "peak": self.peak,
            "lowest_share": self.lowest_share,
            "checks": [{"promise": what, "seen": seen, "passed": ok} for what, seen, ok in self.checks()],
        }


def _panel(title: str, points: Points, levels: Sequence[float], lines: Sequence[Points]) -> Panel:
    high = max([*levels, *(value for _, value in points)], default=1.0) * 1.1 or 1.0
    return Panel(
        title, 0.0, high, lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}", lines, points, levels
    )


def run(config: OverloadConfig) -> OverloadReport:
    """Starts the cluster and puts the loads on it. Raises BatonError."""
    quotas = {GREEDY: config.run_at_once // 2, MODEST: None, PROBE: None}
    with overload_cluster(config, quotas) as targets:
        capacity = closed_loop(config, targets[PROBE], config.run_at_once).rate
        return _overloaded(config, targets, capacity)


@contextmanager
def overload_cluster(
    config: OverloadConfig, quotas: Mapping[str, int | None], *flags: str
) -> Iterator[Mapping[str, Target]]:
    """Runs a small cluster with API keys of these tenants, and yields what the requests of each are sent to.

    `quotas`: how many requests of a tenant may run at once; None: any number. `flags`: more of `baton up`.
    """
    with tempfile.TemporaryDirectory(prefix="baton-overload-") as home:
        keys_file = Path(home) / "keys.json"
        keys = _keys(keys_file, quotas)
        words = ("--runner", "simulated", "--prefill", "1", "--decode", "1", "--api-keys", str(keys_file))
        bounds = ("--max-num-seqs", str(config.max_num_seqs), "--kv-cache-memory", "16MiB")
        step = {"BATON_SIMULATED_STEP_MS": f"{config.step_ms:g}"}
        with live_cluster(*words, *bounds, *flags, environment=step) as cluster:
            yield {tenant: _target(config, cluster, key) for tenant, key in keys.items()}


def _keys(file: Path, quotas: Mapping[str, int | None]) -> dict[str, str]:
    today = datetime.now(UTC).date().isoformat()
    made = {tenant: new_key(tenant, CallerRole.CLIENT, today, quota) for tenant, quota in quotas.items()}
    write_keys(file, [entry for _, entry in made.values()])
    return {tenant: key for tenant, (key, _) in made.items()}


def _target(config: OverloadConfig, cluster: LiveCluster, key: str) -> Target:
    over_http = config.backend != "baton"
    asked = Target(
        config.backend,
        cluster.http_address if over_http else cluster.grpc_address,
        path="/v1/completions" if over_http else "",
        api_key=key,
        ttft_slo_ms=config.ttft_slo_ms,
    )
    return probe(asked).target


def overload_workload(config: OverloadConfig, rate: float, count: int, seed: int) -> WorkloadSpec:
    """Requests of the configuration's lengths at a rate. `seed`: another one, other requests."""
    return WorkloadSpec(
        num_prompts=max(1, count),
        request_rate=rate,
        random_input_len=config.input_len,
        random_output_len=config.output_len,
        seed=config.seed * 10 + seed,
    )


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """What a closed loop measured."""

    rate: float
    """Requests per second that ended well."""
    median_tpot_ms: float


def closed_loop(config: OverloadConfig, target: Target, max_concurrency: int) -> ClosedLoop:
    """Keeps so many requests open for `capacity_s`, after a warm-up. Raises BatonError if none ends well."""
    workload = overload_workload(config, float("inf"), 1_000_000, 1)
    end_s = _CAPACITY_WARM_UP_S + config.capacity_s
    # There are only as many requests as fit, so they need no limit for the first token.
    plan = LoadPlan(replace(target, ttft_slo_ms=None), workload, max_concurrency=max_concurrency, limit_s=end_s)
    outcomes = run_load(plan).outcomes
    finished = outcomes.finished_s
    is_counted = outcomes.is_complete & (finished >= _CAPACITY_WARM_UP_S) & (finished < end_s)
    if not is_counted.any():
        raise BatonError(
            f"the capacity can't be measured: no request ended in {config.capacity_s:g} s of a closed loop; errors: "
            f"{outcomes.errors or 'none'}"
        )
    return ClosedLoop(float(is_counted.sum()) / config.capacity_s, float(np.median(outcomes.tpot_s[is_counted])) * 1e3)


def _overloaded(config: OverloadConfig, targets: Mapping[str, Target], capacity: float) -> OverloadReport:
    offered = capacity * config.factor
    rates = {
        GREEDY: offered * _GREEDY_SHARE,
        MODEST: offered * (1 - _GREEDY_SHARE),
        PROBE: capacity * _PROBE_SHARE,
    }
    watched_s = config.before_s + config.overload_s + config.after_s
    plans = []
    for number, (name, rate) in enumerate(rates.items(), start=2):
        length_s = watched_s if name == PROBE else config.overload_s
        workload = overload_workload(config, rate, round(rate * length_s), number)
        delay_s = 0.0 if name == PROBE else config.before_s
        plans.append(LoadPlan(targets[name], workload, delay_s=delay_s))
    runs = dict(zip(rates, asyncio.run(run_concurrently(plans)), strict=True))
    start_s = runs[GREEDY].began_s
    return evaluate(config, capacity, offered, {name: _shifted(load, start_s) for name, load in runs.items()})


@dataclass(frozen=True, slots=True)
class Shifted:
    """One load whose times count from the start of the overload."""

    outcomes: Outcomes
    offset_s: float
    late_ms: float

    @property
    def planned_s(self) -> NDArray[np.float64]:
        return self.outcomes.planned_s + self.offset_s

    @property
    def finished_s(self) -> NDArray[np.float64]:
        return self.outcomes.finished_s + self.offset_s


def _shifted(run: LoadRun, start_s: float) -> Shifted:
    late = run.outcomes.sent_s - run.outcomes.planned_s
    return Shifted(run.outcomes, run.began_s - start_s, float(np.percentile(late, 99)) * 1e3 if len(late) else 0.0)


def evaluate(config: OverloadConfig, capacity: float, offered: float, loads: Mapping[str, Shifted]) -> OverloadReport:
    """Computes the report from the outcomes of the loads."""
    good = {name: Slo(config.ttft_slo_ms, config.tpot_slo_ms).is_met(load.outcomes) for name, load in loads.items()}
    ends = np.concatenate([load.finished_s[good[name]] for name, load in loads.items()])
    edges = np.arange(0.0, config.overload_s + WINDOW_S / 2, WINDOW_S)
    counts, _ = np.histogram(ends, edges)
    refusals, failed = _refusals(loads)
    probed, is_complete = loads[PROBE], loads[PROBE].outcomes.is_complete
    ttft = probed.outcomes.ttft_s
    before = ttft[is_complete & (probed.planned_s < 0)]
    normal_s = float(np.median(before)) if len(before) else float("nan")
    return OverloadReport(
        config,
        capacity,
        offered,
        [float(count) / WINDOW_S for count in counts],
        {name: _tenant(config, load, good[name]) for name, load in loads.items()},
        refusals,
        failed,
        normal_s,
        recovery_s(probed.planned_s, np.where(is_complete, ttft, np.inf), normal_s, config.overload_s, config.after_s),
        [
            (round(float(at), 3), round(float(took), 4))
            for at, took in zip(probed.planned_s[is_complete], ttft[is_complete], strict=True)
        ],
        max(load.late_ms for load in loads.values()),
    )


def _tenant(config: OverloadConfig, load: Shifted, good: NDArray[np.bool_]) -> dict[str, float]:
    """One tenant's requests per second during the overload."""
    during = (load.planned_s >= 0) & (load.planned_s < config.overload_s)
    return {
        "offered": float(np.sum(during)) / config.overload_s,
        "completed": float(np.sum(during & load.outcomes.is_complete)) / config.overload_s,
        "good": float(np.sum(during & good)) / config.overload_s,
    }


def _refusals(loads: Mapping[str, Shifted]) -> tuple[Refusals, dict[str, int]]:
    """Refused requests, and the number of other failures by error."""
    took: list[float] = []
    typed = with_retry_after = 0
    failed: dict[str, int] = {}
    for load in loads.values():
        outcomes = load.outcomes
        columns = zip(
            outcomes.error_texts(), outcomes.first_token_s, outcomes.e2el_s, outcomes.retry_after_s, strict=True
        )
        for error, first_s, e2el_s, retry_after_s in columns:
            if error is None:
                continue
            has_retry_after = bool(retry_after_s == retry_after_s)
            if first_s == first_s or not (has_retry_after or error.startswith(_TYPED)):
                failed[error] = failed.get(error, 0) + 1
                continue
            took.append(float(e2el_s))
            typed += int(error.startswith(_TYPED))
            with_retry_after += int(has_retry_after)
    p50, p99, largest = (float(np.percentile(took, share)) if took else 0.0 for share in (50, 99, 100))
    return Refusals(len(took), typed, with_retry_after, p50, p99, largest), failed


def recovery_s(
    planned_s: NDArray[np.float64],
    ttft_s: NDArray[np.float64],
    normal_s: float,
    overload_s: float,
    after_s: float,
) -> float | None:
    """Time from the end of the overload until latency is normal and stays so; None: it does not become normal.

    Latency is compared in windows of NORMAL_WINDOW_S; a window without requests counts as normal. `ttft_s` of failed
    requests is infinite.
    """
    recovered: float | None = None
    for number in range(round(after_s / NORMAL_WINDOW_S)):
        begin = overload_s + number * NORMAL_WINDOW_S
        inside = ttft_s[(planned_s >= begin) & (planned_s < begin + NORMAL_WINDOW_S)]
        is_normal = not len(inside) or float(np.median(inside)) <= normal_s * NORMAL_FACTOR
        if not is_normal:
            recovered = None
        elif recovered is None:
            recovered = begin - overload_s
    return recovered
