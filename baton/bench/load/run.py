"""Runs a load from several processes, and puts together what they wrote down."""

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

from baton.bench.load.endpoint import Target
from baton.bench.load.generator import Progress
from baton.bench.load.load import GeneratorLoad
from baton.bench.results.outcome import Outcomes
from baton.bench.workloads.spec import WorkloadSpec
from baton.errors import BatonError, Unreachable

_MODULE = "baton.bench.load.generator_process"
_MOST_LINE = 1 << 20
_STOP_S = 20.0
"""So long a generator may take to hand over what it has."""

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send, and how."""

    target: Target
    """As `probe` completed it."""
    workload: WorkloadSpec
    processes: int = 1
    max_concurrency: int | None = None
    request_timeout_s: float | None = None
    num_warmups: int = 0
    delay_s: float = 0.0
    """Seconds that its processes wait once they are ready."""
    limit_s: float | None = None
    """Seconds from the workload's begin after which the run ends, with what came until then."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What came of it."""

    outcomes: Outcomes
    """In seconds from the workload's begin."""
    duration_s: float
    offered: int
    """Requests that were sent, ended or not."""
    load: GeneratorLoad
    was_interrupted: bool
    is_unreachable: bool
    """Nobody was there any more: the run was ended."""
    began_s: float = 0.0
    """The workload's begin, about, on this process's monotonic clock: for what this process saw itself meanwhile."""


def run_load(plan: LoadPlan, on_progress: OnProgress = lambda _: None) -> LoadRun:
    """Run it; Ctrl-C ends it early, with what came until then. Raises BatonError and Unreachable."""
    return asyncio.run(_run_alone(_Run(plan, on_progress)))


async def _run_alone(run: _Run) -> LoadRun:
    with _on_interrupt(run.interrupt):
        return await run.run()


@contextmanager
def _on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C does this instead."""
    loop = asyncio.get_running_loop()
    with suppress(ValueError, RuntimeError):  # only a main thread hears signals
        loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        with suppress(ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)


async def run_beside(plans: Sequence[LoadPlan]) -> list[LoadRun]:
    """Several loads at once, each from its `delay_s` on; Ctrl-C ends them. Raises BatonError and Unreachable."""
    runs = [_Run(plan, lambda _: None) for plan in plans]
    tasks = [asyncio.create_task(run.run()) for run in runs]

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


def shares(max_concurrency: int | None, processes: int) -> list[int | None]:
    """How many requests each process may have open; as many processes as have any."""
    if max_concurrency is None:
        return [None] * processes
    whole, more = divmod(max_concurrency, processes)
    return [share for number in range(processes) if (share := whole + (number < more))]


def with_own_ids(target: Target) -> Target:
    """With request ids that no other run has: a router refuses one that is live, be it another generator's."""
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
                self._children.append(await _Child.start(self._order(number, len(open_shares), share)))
            if self._was_interrupted:
                self._stop()  # those that came after Ctrl-C have not heard of it
            await asyncio.gather(*(child.ready() for child in self._children))
            if self._plan.delay_s:
                await asyncio.sleep(self._plan.delay_s)
            for child in self._children:
                child.say("go")
            self._began_s = time.monotonic()
            if self._plan.limit_s is not None:
                loop.call_later(self._plan.limit_s, self._stop)
            await asyncio.gather(*(child.finish(self._progressed) for child in self._children))
            return self._result()
        finally:
            for child in self._children:
                await child.end()

    def _order(self, number: int, processes: int, max_open: int | None) -> dict[str, Any]:
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
        """End it early, with what came until then; the second time at once."""
        if self._was_interrupted:
            for child in self._children:
                child.kill()
        self._was_interrupted = True
        self._stop()

    def _stop(self) -> None:
        for child in self._children:
            child.say("stop")

    def _progressed(self) -> None:
        total = Progress()
        for child in self._children:
            one = child.progress
            total.sent += one.sent
            total.completed += one.completed
            total.failed += one.failed
            total.tokens += one.tokens
            total.is_unreachable |= one.is_unreachable
        if total.is_unreachable:
            self._stop()
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
    async def start(cls, order: dict[str, Any]) -> _Child:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", _MODULE), stdin=PIPE, stdout=PIPE, limit=_MOST_LINE, start_new_session=True
        )
        child = cls(process)
        child.say(json.dumps(order))
        return child

    def say(self, line: str) -> None:
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(line.encode() + b"\n")

    async def ready(self) -> None:
        """Raises what kept it from being so."""
        await self._words()

    async def finish(self, on_progress: Callable[[], None]) -> None:
        """Hear it to its end."""
        while True:
            words = await self._words()
            if "bytes" in words:
                break
            self.progress = Progress(**words)
            on_progress()
        assert self._process.stdout is not None
        self.cpu_share, self.cpu_peak = words.pop("cpu_share"), words.pop("cpu_peak")
        size = words.pop("bytes")
        self.progress = Progress(**words)
        on_progress()
        self.outcomes = Outcomes.from_bytes(await self._process.stdout.readexactly(size))

    async def _words(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise BatonError(f"a generator process ended with {await self._process.wait()}")
        words: dict[str, Any] = json.loads(line)
        if "error" in words:
            raise (Unreachable if words["kind"] == "Unreachable" else BatonError)(words["error"])
        return words

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
