"""One process of the load generator: `python -m baton.bench.load.generator_process`.

The parent writes to stdin: a line of JSON (what to send, and which share of it), then `go`, then maybe `stop`. This
process writes lines of JSON to stdout: `ready`, its progress, and at the end how many bytes of outcomes follow. When
stdin ends, the parent has ended, and this process ends too. Ctrl-C reaches only the parent, which then writes `stop`.
Clocks of different processes are not compared: times count from `go`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from baton.bench.load.endpoint import Endpoint, Target
from baton.bench.load.generator import Generator, sessions, share_of
from baton.bench.load.grpc_endpoint import GrpcEndpoint
from baton.bench.workloads.spec import WorkloadSpec
from baton.bench.workloads.workload import WorkloadRequest, unique_piece
from baton.errors import BatonError

_PROGRESS_S = 0.25
_LEAD_S = 0.05
"""From `go` to the workload's start: time for every process to read it."""


def endpoint_of(target: Target) -> Endpoint:
    """Makes the endpoint of a target's backend."""
    if target.backend == "baton":
        return GrpcEndpoint(target)
    from baton.bench.load.http_endpoint import HttpEndpoint

    return HttpEndpoint(target)


def main() -> int:
    """Runs to the end; returns the exit code."""
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    try:
        return asyncio.run(_run(order))
    except (BatonError, OSError) as error:
        _write_line({"error": str(error), "kind": type(error).__name__})
        return 1


async def _run(order: dict[str, Any]) -> int:
    target = Target(**order["target"])
    workload = WorkloadSpec.from_json(order["workload"]).build()
    process, processes = order["process"], order["processes"]
    share = share_of(sessions(workload), process, processes)
    endpoint = endpoint_of(target)
    await endpoint.open()
    await _warm_up(endpoint, order["num_warmups"] if process == 0 else 0)
    _write_line({"ready": True})
    commands = _Commands()
    command = await commands.next()
    if not command:
        endpoint.close()
        return 1
    generator = Generator(endpoint, order["max_open"], order["request_timeout_s"])
    if command == "stop":
        generator.stop()  # before it has sent anything
    obeying = asyncio.create_task(_obey(commands, generator))
    meter = _CpuMeter()
    reporting = asyncio.create_task(_report_progress(generator, meter))
    gc.freeze()
    try:
        await generator.run(share, asyncio.get_running_loop().time() + _LEAD_S)
    finally:
        obeying.cancel()
        reporting.cancel()
        endpoint.close()
    data = generator.outcomes.to_bytes()
    meter.tick()
    _write_line({"bytes": len(data), "cpu_share": meter.share, "cpu_peak": meter.peak, **asdict(generator.progress)})
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return 0


async def _warm_up(endpoint: Endpoint, count: int) -> None:
    """Sends a few requests that are not counted, one after the other."""
    for number in range(count):
        request = WorkloadRequest(-1 - number, 0.0, 64, 8, (unique_piece(64, 77, number),))
        await Generator(endpoint, None, 60.0).run([[request]], asyncio.get_running_loop().time())


class _Commands:
    """Lines that the parent writes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    async def next(self) -> str:
        """The next line; empty once the parent has ended."""
        return await self._queue.get()

    def _read(self) -> None:
        try:
            for line in iter(sys.stdin.readline, ""):
                self._loop.call_soon_threadsafe(self._queue.put_nowait, line.strip())
            self._loop.call_soon_threadsafe(self._queue.put_nowait, "")
        except RuntimeError:
            return  # the event loop is closed: nobody waits for commands


async def _obey(commands: _Commands, generator: Generator) -> None:
    while True:
        command = await commands.next()
        if command == "stop":
            generator.stop()
        elif not command:
            os._exit(1)


async def _report_progress(generator: Generator, meter: _CpuMeter) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        meter.tick()
        _write_line(asdict(generator.progress))


class _CpuMeter:
    """Measures this process's share of a core."""

    def __init__(self) -> None:
        self._begin = self._since = time.perf_counter()
        self._cpu_begin = self._cpu = time.process_time()
        self.peak = 0.0

    @property
    def share(self) -> float:
        return (time.process_time() - self._cpu_begin) / max(1e-9, time.perf_counter() - self._begin)

    def tick(self) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        if now - self._since >= 1.0:
            self.peak = max(self.peak, (cpu - self._cpu) / (now - self._since))
            self._since, self._cpu = now, cpu


def _write_line(values: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(values).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
