"""Runs two clusters for a long time under a mixed load with kills, and fails if memory or other figures grow.

One cluster serves the simulated model and the other the bundled one, at the same time. Each has a Redis, two routers,
two prefill nodes and two decode nodes. The run is a sequence of equal cycles. In each cycle clients of several tenants
send requests (see soak_load.py), and one process is killed with SIGKILL and restarted by the supervisor. Then the
clients pause, and at the end of this quiet phase the figures of every process are read. The second router, prefill node
and decode node of both clusters are killed in turn, so the first of each kind lives from start to end. Redis is never
killed. soak_judge.py compares the readings.

Results are one table on standard output and, in the folder of --out, samples.csv (every ten seconds and in every quiet
moment), result.json and memory.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median

from soak_cluster import CLUSTERS, START_S, Cluster, Sample, started_cluster
from soak_judge import COUNTS, Line, Reading, judge, lives_of, minimum_counts
from soak_load import ClientResults, SoakLoad, Tenant, summary

from baton.bench.report.panels import Panel, TimeAxis, draw_panels
from baton.bench.results.host import processor, usable_cores
from baton.security.keys import new_key, write_keys
from baton.security.matrix import CallerRole

ROOT = Path(__file__).parents[1]
LONG_CYCLE_S, SHORT_CYCLE_S = 120.0, 40.0
CYCLES = 6
"""Smallest number of cycles in a short run, if they are not shorter than SHORT_CYCLE_S then."""
KILL_AT = (0.1, 0.4)
"""A process is killed at a random time between these shares of a cycle."""
_LEAST_SPAN = 0.1
"""The axis of a plot covers at least this share of the largest value."""
QUIET_S = 22.0
"""Length of the quiet phase at the end of a cycle: enough for orphans' grace and two runs of the collectors."""
READINGS = 3
"""Readings in a quiet moment, a second apart; the minimum counts."""
SAMPLE_S = 10.0
WARM_UP_S = 600.0
LONG_RUN_MIN = 30.0
GROWTH, SHORT_GROWTH = 0.02, 0.10
"""Allowed growth of memory in a run of at least LONG_RUN_MIN, and in a shorter one, whose warm-up is too short."""
RESTARTED_GROWTH = 0.05
"""Allowed growth between two lives of a process; allocators place data differently after each start."""
_POLL_S = 0.2
VICTIMS = ("router-1", "decode-1", "prefill-1")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line."""

    minutes: float
    out: Path
    seed: int
    first_metrics_port: int
    clusters: Sequence[str]

    @property
    def cycle_s(self) -> float:
        return min(LONG_CYCLE_S, max(SHORT_CYCLE_S, self.minutes * 60 / CYCLES))

    @property
    def warm_up_s(self) -> float:
        return min(WARM_UP_S, self.minutes * 60 / CYCLES)

    @property
    def growth(self) -> float:
        return GROWTH if self.minutes >= LONG_RUN_MIN else SHORT_GROWTH


class Soak:
    """Runs load, kills and readings of all clusters."""

    def __init__(self, options: Options, clusters: Sequence[Cluster], tenants: Sequence[Tenant]) -> None:
        self._options = options
        self._rng = Random(options.seed)
        self._clusters = clusters
        self._loads = {
            cluster.name: SoakLoad(cluster.routers, tenants, CLUSTERS[cluster.name].vocab_size, Random(options.seed))
            for cluster in clusters
        }
        self._started = 0.0
        self.duration_s = 0.0
        self.samples: list[Sample] = []
        self.readings: dict[tuple[str, str], list[Reading]] = {}
        self.kills: list[tuple[float, str, str]] = []
        self.recoveries: list[float] = []
        """Seconds until each killed process was ready again; infinite if it was not within `START_S`."""

    @property
    def results(self) -> dict[str, ClientResults]:
        return {name: load.results for name, load in self._loads.items()}

    async def run(self) -> None:
        for load in self._loads.values():
            await load.record_expected_tokens()
        self._started = time.monotonic()
        sampling = asyncio.create_task(self._sample_repeatedly())
        try:
            victims = [(cluster, name) for name in VICTIMS for cluster in self._clusters]
            number = 0
            # A cycle that would end after the given time is not started.
            while self._now() + self._options.cycle_s <= self._options.minutes * 60 + 1:
                await self._cycle(*victims[number % len(victims)])
                number += 1
                self._print_progress()
        finally:
            self.duration_s = self._now()
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)

    def _now(self) -> float:
        return time.monotonic() - self._started

    async def _cycle(self, victims_cluster: Cluster, victim: str) -> None:
        start_s, cycle_s = self._now(), self._options.cycle_s
        loads = [
            asyncio.create_task(self._loads[cluster.name].run(self._clients(cluster.name)))
            for cluster in self._clusters
        ]
        try:
            await asyncio.sleep(self._rng.uniform(*KILL_AT) * cycle_s)
            await self._kill(victims_cluster, victim)
            await asyncio.sleep(max(0.0, start_s + cycle_s - QUIET_S - self._now()))
            for load in self._loads.values():
                load.pause()
            await asyncio.gather(*loads)
        finally:
            for task in loads:
                task.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
        await asyncio.sleep(max(QUIET_S / 2, start_s + cycle_s - READINGS - self._now()))
        await self._read_all()

    def _clients(self, cluster: str) -> int:
        kind = CLUSTERS[cluster]
        return kind.clients if self._now() >= self._options.warm_up_s else kind.warm_up_clients

    async def _kill(self, cluster: Cluster, name: str) -> None:
        before = cluster.process(name)
        os.kill(before.pid, signal.SIGKILL)
        self.kills.append((self._now(), cluster.name, name))
        killed_at = time.monotonic()
        # Restarts are visible only in the file that the supervisor writes.
        while (now := cluster.process(name)).restarts == before.restarts or now.status != "Ready":
            if time.monotonic() > killed_at + START_S:
                self.recoveries.append(math.inf)
                return
            await asyncio.sleep(_POLL_S)
        self.recoveries.append(time.monotonic() - killed_at)

    async def _sample_repeatedly(self) -> None:
        due = 0.0
        while True:
            await asyncio.sleep(max(0.0, due - self._now()))
            self.samples += await asyncio.to_thread(self._sampled, is_quiet=False)
            due += SAMPLE_S

    def _sampled(self, *, is_quiet: bool) -> list[Sample]:
        return [sample for cluster in self._clusters for sample in cluster.samples(self._now(), is_quiet=is_quiet)]

    async def _read_all(self) -> None:
        several = []
        for number in range(READINGS):
            await asyncio.sleep(1.0 if number else 0.0)
            several.append(await asyncio.to_thread(self._sampled, is_quiet=True))
        self.samples += several[-1]
        keys = {cluster.name: await asyncio.to_thread(cluster.keys) for cluster in self._clusters}
        for sample in several[-1]:
            key = sample.cluster, sample.process
            same = [sample for samples in several for sample in samples if (sample.cluster, sample.process) == key]
            counts = minimum_counts([_counts(sample) for sample in same])
            if sample.process == "redis":
                counts |= keys[sample.cluster]
            memory = sorted(sample.resident for sample in same)[len(same) // 2]
            reading = Reading(sample.at_s, sample.pid, memory, counts)
            self.readings.setdefault(key, []).append(reading)

    def _print_progress(self) -> None:
        line = "; ".join(summary(self.results))
        print(f"{self._now() / 60:5.1f} min: {line}", file=sys.stderr, flush=True)

    def lines(self) -> list[Line]:
        """The judged figures of processes, then of answers and restarts."""
        options = self._options
        report = []
        for (cluster, process), readings in self.readings.items():
            report += judge(f"{cluster} {process}", readings, options.warm_up_s, options.growth, RESTARTED_GROWTH)
        for name, load in self._loads.items():
            results = load.results
            for what, many in (("lost answers", results.lost), ("wrong answers", results.wrong)):
                report.append(Line(f"{name} clients", what, 0, len(many), 0.0, f"of {results.ended.total()}"))
        num_missing = sum(map(math.isinf, self.recoveries))
        back = [seconds for seconds in self.recoveries if seconds < math.inf]
        usually, longest = median(back or [0]), max(back, default=0)
        basis = f"of {len(self.recoveries)} kills; the others were back after {usually:.0f} s, {longest:.0f} s at most"
        report.append(Line("killed processes", "not back", 0, num_missing, 0.0, basis))
        return report


def _counts(sample: Sample) -> dict[str, int]:
    values = zip(COUNTS, (sample.descriptors, sample.threads, sample.tasks), strict=True)
    return {name: value for name, value in values if value is not None}


def main(argv: Sequence[str]) -> int:
    """Runs the soak test; returns 0 if nothing grew and all answers were right, 1 if not, 130 after Ctrl-C."""
    options = _options(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    # SIGTERM ends the clusters, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
            tenants, monitor_key = _keys(home / "keys.json")
            clusters = [
                stack.enter_context(started_cluster(name, home, monitor_key, options.first_metrics_port + 10 * number))
                for number, name in enumerate(options.clusters)
            ]
            soak = Soak(options, clusters, tenants)
            asyncio.run(soak.run())
            tracebacks = [line for cluster in clusters for line in cluster.tracebacks()]
    except KeyboardInterrupt:
        print("scripts/soak: interrupted; all processes that it started have ended", file=sys.stderr)
        return 130
    return _report(soak, options, tracebacks)


def _keys(file: Path) -> tuple[list[Tenant], str]:
    today = datetime.now(UTC).date().isoformat()
    quotas = {"red": None, "green": None, "blue": 1}
    made = {name: new_key(name, CallerRole.CLIENT, today, quota) for name, quota in quotas.items()}
    monitor_key, monitor = new_key("monitor", CallerRole.MONITOR, today)
    write_keys(file, [*(entry for _, entry in made.values()), monitor])
    return [Tenant(name, key, quotas[name] is not None) for name, (key, _) in made.items()], monitor_key


def _report(soak: Soak, options: Options, tracebacks: Sequence[str]) -> int:
    lines = soak.lines()
    failed = sum(not line.passed for line in lines)
    _write(soak, options, lines, tracebacks)
    warm_up = f"{options.warm_up_s / 60:g} min"
    print(f"{options.minutes:g} minutes, {len(soak.kills)} kills, seed {options.seed}; warm-up {warm_up}")
    print(f"limits of growth: memory {options.growth:.0%}, between lives {RESTARTED_GROWTH:.0%}, counts 0%\n")
    print("\n".join(summary(soak.results)) + "\n")
    rows = [("PROCESS", "FIGURE", "BEFORE", "AFTER", "GROWTH", "", "BASIS")]
    rows += [
        (
            line.process,
            line.figure,
            _shown(line.figure, line.before),
            _shown(line.figure, line.after),
            f"{line.growth:+.2%}" if line.before else "",
            line.verdict,
            line.basis,
        )
        for line in lines
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())
    for results in soak.results.values():
        for problem in [*results.lost[:20], *results.wrong[:20]]:
            print(problem)
    for traceback in tracebacks:
        print(f"traceback in a log: {traceback}")
    print(f"\n{'FAIL' if failed else 'PASS'}: {failed} of {len(lines)} lines failed; details are in {options.out}")
    return 1 if failed else 0


def _shown(figure: str, value: float) -> str:
    return f"{value / (1 << 20):.1f} MiB" if figure == "memory" else f"{value:g}"


def _write(soak: Soak, options: Options, lines: Sequence[Line], tracebacks: Sequence[str]) -> None:
    with (options.out / "samples.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(list(Sample.__dataclass_fields__))
        writer.writerows(list(asdict(sample).values()) for sample in soak.samples)
    result = {
        "machine": f"{usable_cores()} cores of {processor()}",
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": {**asdict(options), "out": str(options.out)},
        "duration_s": soak.duration_s,
        "kills": soak.kills,
        "lines": [{**asdict(line), "growth": line.growth, "verdict": line.verdict} for line in lines],
        "clients": {name: results.to_json() for name, results in soak.results.items()},
        "readings": {" ".join(key): [asdict(reading) for reading in many] for key, many in soak.readings.items()},
        "complaints": list(tracebacks),
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    growth = {line.process: line for line in lines if line.figure == "memory"}
    columns: dict[str, list[Panel]] = {}
    for (cluster, process), readings in soak.readings.items():
        line = growth[f"{cluster} {process}"]
        title = f"{process}: {line.growth:+.2%}" if line.is_judged else process
        columns.setdefault(f"{cluster} model", []).append(_panel(soak, cluster, process, title, readings))
    title = f"Memory of every process over {options.minutes:g} minutes, {len(soak.kills)} kills"
    end_s = max(1.0, soak.duration_s)
    labels = {end_s * share: f"{end_s * share / 60:.2g}" for share in (0.0, 0.25, 0.5, 0.75, 1.0)}
    time_axis = TimeAxis(0.0, end_s, labels, (0.0, options.warm_up_s), width=460, height=120)
    legend = "resident MiB over minutes; dots: readings in quiet moments; red: the process was killed; grey: warm-up"
    (options.out / "memory.svg").write_text(draw_panels(title, columns, time_axis, legend))


def _panel(soak: Soak, cluster: str, process: str, title: str, readings: Sequence[Reading]) -> Panel:
    own = [sample for sample in soak.samples if (sample.cluster, sample.process) == (cluster, process)]
    own.sort(key=lambda sample: sample.at_s)
    runs = lives_of([Reading(sample.at_s, sample.pid, sample.resident) for sample in own])
    lines = [[(reading.at_s, float(reading.memory)) for reading in run] for run in runs]
    dots = [(reading.at_s, float(reading.memory)) for reading in readings]
    highest = max((memory for line in lines for _, memory in line), default=1.0)
    # The axis contains all quiet readings, and so much that noise does not look like growth; the steep rise of a start
    # is clipped.
    low = min([highest * (1 - _LEAST_SPAN), *(memory for _, memory in dots)])
    kills = [at_s for at_s, of, name in soak.kills if (of, name) == (cluster, process)]
    high = highest + (highest - low) * 0.08
    return Panel(title, low, high, lambda value: f"{value / (1 << 20):.1f}", lines, dots, moments=kills)


def _options(argv: Sequence[str]) -> Options:
    parser = argparse.ArgumentParser(
        prog="scripts/soak",
        description="Run clusters under a mixed load with kills for a long time; exit 1 if memory or counts grow.",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="length, without start and end (default: 60)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "soak", metavar="DIR", help="folder for results")
    parser.add_argument("--seed", type=int, default=1, help="seed of requests, clients and kills (default: 1)")
    parser.add_argument(
        "--metrics-port", type=int, default=19200, metavar="PORT", help="first of 20 free ports (default: 19200)"
    )
    parser.add_argument(
        "--cluster", choices=CLUSTERS, action="append", help="run only the cluster of this model (default: both)"
    )
    options = parser.parse_args(argv)
    if options.minutes * 60 < 2 * SHORT_CYCLE_S:
        parser.error(f"--minutes must be at least {2 * SHORT_CYCLE_S / 60:.2g}: a cycle takes {SHORT_CYCLE_S:g} s")
    return replace(
        Options(options.minutes, options.out.resolve(), options.seed, options.metrics_port, ()),
        clusters=tuple(options.cluster or CLUSTERS),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
