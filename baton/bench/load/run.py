"""Runs a load from several generator processes, and merges their outcomes."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from baton.bench.load.endpoint import Target
from baton.bench.load.generator import Progress
from baton.bench.results.outcome import Outcomes
from baton.bench.workloads.spec import WorkloadSpec
from baton.errors import BatonError, Cancelled, Unreachable

# How busy the load generator itself was, and whether it was the bottleneck of a measurement.


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


_MODULE = "baton.bench.load.generator_process"
_MAX_LINE = 1 << 20
_STOP_S = 20.0
"""A generator process that has not ended this long after it was told to stop is killed."""

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send, to which target, from how many processes."""

    target: Target
    """The target as `probe` completed it."""
    workload: WorkloadSpec
    processes: int = 1
    max_concurrency: int | None = None
    request_timeout_s: float | None = None
    num_warmups: int = 0
    delay_s: float = 0.0
    """Seconds to wait once all processes are ready."""
    limit_s: float | None = None
    """Seconds from the workload's start after which the run ends, with the outcomes until then."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The outcomes of a load."""

    outcomes: Outcomes
    """Times are seconds from the workload's start."""
    duration_s: float
    offered: int
    """Requests that were sent, ended or not."""
    load: GeneratorLoad
    was_interrupted: bool
    is_unreachable: bool
    """No connection could be made any more, so the run was ended."""
    began_s: float = 0.0
    """About the workload's start on this process's monotonic clock, for comparison with what this process saw."""

    def check(self, unreachable: str) -> None:
        """Raises Cancelled if Ctrl-C ended the run, and Unreachable with this text if the endpoint went away."""
        if self.was_interrupted:
            raise Cancelled("interrupted")
        if self.is_unreachable:
            raise Unreachable(unreachable)


def run_load(plan: LoadPlan, on_progress: OnProgress = lambda _: None) -> LoadRun:
    """Runs the load; Ctrl-C ends it early, with the outcomes until then. Raises BatonError and Unreachable."""
    return asyncio.run(_run_alone(_Run(plan, on_progress)))


async def _run_alone(run: _Run) -> LoadRun:
    with _on_interrupt(run.interrupt):
        return await run.run()


@contextmanager
def _on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C calls `act` instead of raising KeyboardInterrupt."""
    loop = asyncio.get_running_loop()
    with suppress(ValueError, RuntimeError):  # only the main thread receives signals
        loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        with suppress(ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)


async def run_concurrently(plans: Sequence[LoadPlan], *, as_long_as_first: bool = False) -> list[LoadRun]:
    """Runs several loads at once, each after its `delay_s`; Ctrl-C ends them. Raises BatonError and Unreachable.

    `as_long_as_first`: when the first load has ended, the others end with the outcomes until then.
    """
    runs = [_Run(plan, lambda _: None) for plan in plans]
    tasks = [asyncio.create_task(run.run()) for run in runs]
    if as_long_as_first:
        tasks[0].add_done_callback(lambda _: _stop_all(runs[1:]))

    def interrupt() -> None:
        for run in runs:
            run.interrupt()

    try:
        with _on_interrupt(interrupt):
            return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stop_all(runs: Sequence[_Run]) -> None:
    for run in runs:
        run.stop()


def shares(max_concurrency: int | None, processes: int) -> list[int | None]:
    """How many requests each process may have open. Processes that would get none are left out."""
    if max_concurrency is None:
        return [None] * processes
    whole, more = divmod(max_concurrency, processes)
    return [share for number in range(processes) if (share := whole + (number < more))]


def with_own_ids(target: Target) -> Target:
    """Gives the target request ids that no other run has: a router refuses an id that is already in use."""
    return replace(target, request_id_prefix=f"{target.request_id_prefix}-{secrets.token_hex(4)}")


class _Run:
    def __init__(self, plan: LoadPlan, on_progress: OnProgress) -> None:
        self._plan = replace(plan, target=with_own_ids(plan.target))
        self._on_progress = on_progress
        self._children: list[_Child] = []
        self._was_interrupted = False
        self._began_s = 0.0

    async def run(self) -> LoadRun:
        loop = asyncio.get_running_loop()
        try:
            open_shares = shares(self._plan.max_concurrency, self._plan.processes)
            for number, share in enumerate(open_shares):
                self._children.append(await _Child.start(self._instructions(number, len(open_shares), share)))
            if self._was_interrupted:
                self.stop()  # children that were started after Ctrl-C have not been stopped yet
            await asyncio.gather(*(child.ready() for child in self._children))
            if self._plan.delay_s:
                await asyncio.sleep(self._plan.delay_s)
            for child in self._children:
                child.write_line("go")
            self._began_s = time.monotonic()
            if self._plan.limit_s is not None:
                loop.call_later(self._plan.limit_s, self.stop)
            await asyncio.gather(*(child.receive_outcomes(self._on_child_progress) for child in self._children))
            return self._result()
        finally:
            for child in self._children:
                await child.end()

    def _instructions(self, number: int, processes: int, max_open: int | None) -> dict[str, Any]:
        plan = self._plan
        return {
            "target": asdict(plan.target),
            "workload": plan.workload.to_json(),
            "process": number,
            "processes": processes,
            "max_open": max_open,
            "num_warmups": plan.num_warmups,
            "request_timeout_s": plan.request_timeout_s,
        }

    def interrupt(self) -> None:
        """Ends the run early, with the outcomes until then; a second call kills the processes."""
        if self._was_interrupted:
            for child in self._children:
                child.kill()
        self._was_interrupted = True
        self.stop()

    def stop(self) -> None:
        """Ends the run early, with the outcomes until then."""
        for child in self._children:
            child.write_line("stop")

    def _on_child_progress(self) -> None:
        total = Progress()
        for child in self._children:
            progress = child.progress
            total.sent += progress.sent
            total.completed += progress.completed
            total.failed += progress.failed
            total.tokens += progress.tokens
            total.is_unreachable |= progress.is_unreachable
        if total.is_unreachable:
            self.stop()
        self._on_progress(total)

    def _result(self) -> LoadRun:
        outcomes = Outcomes()
        for child in self._children:
            outcomes.extend(child.outcomes)
        return LoadRun(
            outcomes,
            float(outcomes.finished_s.max()) if len(outcomes) else 0.0,
            sum(child.progress.sent for child in self._children),
            GeneratorLoad.of(
                outcomes, [child.cpu_share for child in self._children], [child.cpu_peak for child in self._children]
            ),
            self._was_interrupted,
            any(child.progress.is_unreachable for child in self._children),
            self._began_s,
        )


class _Child:
    """One generator process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.progress = Progress()
        self.outcomes = Outcomes()
        self.cpu_share = self.cpu_peak = 0.0

    @classmethod
    async def start(cls, instructions: dict[str, Any]) -> _Child:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", _MODULE), stdin=PIPE, stdout=PIPE, limit=_MAX_LINE, start_new_session=True
        )
        child = cls(process)
        child.write_line(json.dumps(instructions))
        return child

    def write_line(self, line: str) -> None:
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(line.encode() + b"\n")

    async def ready(self) -> None:
        """Waits until the process is ready; raises the error that kept it from becoming so."""
        await self._read_line()

    async def receive_outcomes(self, on_progress: Callable[[], None]) -> None:
        """Follows the process's progress until it has sent its outcomes."""
        while True:
            values = await self._read_line()
            if "bytes" in values:
                break
            self.progress = Progress(**values)
            on_progress()
        assert self._process.stdout is not None
        self.cpu_share, self.cpu_peak = values.pop("cpu_share"), values.pop("cpu_peak")
        size = values.pop("bytes")
        self.progress = Progress(**values)
        on_progress()
        self.outcomes = Outcomes.from_bytes(await self._process.stdout.readexactly(size))

    async def _read_line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            status = await self._process.wait()
            raise BatonError(f"a process of the load generator ended with status {status}; its error is printed above")
        values: dict[str, Any] = json.loads(line)
        if "error" in values:
            raise (Unreachable if values["kind"] == "Unreachable" else BatonError)(values["error"])
        return values

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()
