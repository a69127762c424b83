"""What a stage of `scripts/gpu_check` is given: its size, device and time, and how to report, to check and to time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

from gpu.results import ResultFile

Size = Literal["tiny", "full"]
Device = Literal["cpu", "cuda"]

CACHE_BYTES = 256 << 20
"""Several times the level-2 cache of any GPU: after so many bytes were written, nothing else is in it."""


class Timing(NamedTuple):
    """The times of repeated calls, in milliseconds a call."""

    ms: float
    """The median."""
    ms_min: float
    ms_max: float
    repeats: int


@dataclass
class StageContext:
    """One stage's run, in its own process."""

    stage: str
    size: Size
    device: Device
    seconds: float
    """The stage's deadline in seconds after its start. The driver kills it then."""
    results: ResultFile
    failed: list[str] = field(default_factory=list)
    """The names of the checks that failed."""
    _started: float = field(default_factory=time.monotonic)

    @property
    def tiny(self) -> bool:
        """Whether sizes are such that a CPU and Triton's interpreter take seconds; figures mean nothing then."""
        return self.size == "tiny"

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline: a stage of many parts leaves out those that no longer fit, and reports it."""
        return self.seconds - (time.monotonic() - self._started)

    def report(self, name: str, /, **fields: Any) -> None:
        """Writes one line with a figure or a fact. Fields are what JSON can hold."""
        self.results.append({"kind": "report", "stage": self.stage, "name": name, "fields": fields})
        print(f"{self.stage}: {name}: {_shown(fields)}", flush=True)

    def check(self, name: str, ok: bool, /, **fields: Any) -> bool:
        """Writes one line with a check's result, and returns it. One that failed makes the stage and the run red."""
        self.results.append({"kind": "check", "stage": self.stage, "name": name, "ok": bool(ok), "fields": fields})
        print(f"{self.stage}: {name}: {'ok' if ok else 'FAILED'} {_shown(fields)}", flush=True)
        if not ok:
            self.failed.append(name)
        return bool(ok)

    def time(
        self,
        call: Callable[[], object],
        *,
        repeats: int = 20,
        calls: int = 1,
        warm_up: int = 2,
        graph: bool = False,
        cold: bool = False,
    ) -> Timing:
        """Times `repeats` times `calls` calls, on a GPU between two CUDA events, after `warm_up` calls.

        With `graph` the calls are recorded once in a CUDA graph and replayed, so that starting kernels takes no time.
        With `cold` the GPU's cache is overwritten before each repeat, as if the operands came from memory. On a CPU
        neither changes anything, and at tiny size there are at most two repeats.
        """
        if self.tiny:
            repeats, calls, warm_up = min(repeats, 2), 1, 0
        measure = _cuda_times if self.device == "cuda" else _cpu_times
        times = [seconds * 1e3 / calls for seconds in measure(call, repeats, calls, warm_up, graph, cold)]
        return Timing(median(times), min(times), max(times), repeats)


def _cpu_times(
    call: Callable[[], object], repeats: int, calls: int, warm_up: int, graph: bool, cold: bool
) -> list[float]:
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(time.perf_counter() - started)
    return times


def _cuda_times(
    call: Callable[[], object], repeats: int, calls: int, warm_up: int, graph: bool, cold: bool
) -> list[float]:
    import torch  # The driver and its tests need no torch.

    def all_calls() -> None:
        for _ in range(calls):
            call()

    for _ in range(warm_up):
        call()
    torch.cuda.synchronize()
    start: Callable[[], None] = all_calls
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            all_calls()
        start = recorded.replay
        start()
    overwritten = torch.empty(CACHE_BYTES, dtype=torch.uint8, device="cuda") if cold else None
    events: Any = torch.cuda.Event  # torch gives its constructor no types
    pairs = []
    for _ in range(repeats):
        if overwritten is not None:
            overwritten.zero_()
        before, after = events(enable_timing=True), events(enable_timing=True)
        before.record()
        start()
        after.record()
        pairs.append((before, after))
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def _shown(fields: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in fields.items()
    )
