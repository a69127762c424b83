"""Starts a real router for a benchmark, pinned to a core, with its own Redis."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.messages.node import NodeDescription
from baton.node.reports.reports import node_record
from baton.observe.ready import Failed, Ready, parse_announcement
from baton.processes.ends import ending_with_us
from baton.processes.process_stat import process_stat
from baton.registry.embedded import READY_WORDS, embedded_redis
from baton.registry.registry import Registry

_CLUSTER = "bench"
_LEASE_S = 60.0


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """A running router."""

    pid: int
    addresses: Ready

    def rss(self) -> int:
        """Resident memory in bytes."""
        pages = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def cpu_s(self) -> float:
        """CPU time of all its threads, seconds."""
        return process_stat(self.pid).cpu_s


@asynccontextmanager
async def router_process(nodes: Sequence[NodeDescription], model_dir: Path, core: int) -> AsyncIterator[RouterProcess]:
    """A router on `core` that is attached to all `nodes`; on exit all processes have ended. Raises ConfigError."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, _redis(Path(folder)) as url:
        registry = Registry.connect(url, _CLUSTER)
        try:
            for node in nodes:
                await registry.lease(node_record(node, 1.0, _LEASE_S))
            process, ready = await asyncio.to_thread(_start, url, model_dir, core, len(nodes))
            try:
                yield RouterProcess(process.pid, ready)
            finally:
                process.terminate()
                await asyncio.to_thread(process.wait)
        finally:
            await registry.close()


@contextmanager
def _redis(run_dir: Path) -> Iterator[str]:
    redis = embedded_redis(run_dir)
    command = ending_with_us(redis.command)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0) as process:
        try:
            assert process.stdout is not None
            if not any(READY_WORDS in line.lower() for line in process.stdout):
                raise ConfigError("the benchmark's redis-server did not start")
            yield redis.url
        finally:
            process.terminate()
            process.wait()
            redis.remove_socket()


def _start(url: str, model_dir: Path, core: int, await_nodes: int) -> tuple[subprocess.Popen[bytes], Ready]:
    read_end, write_end = os.pipe()
    flags = {
        "--registry": url,
        "--cluster": _CLUSTER,
        "--router-id": "router-bench",
        "--model": str(model_dir),
        "--model-name": "bench",
        "--grpc-port": "0",
        "--http-port": "0",
        "--await-nodes": str(await_nodes),
        "--drain-s": "0",
        "--notify-fd": str(write_end),
    }
    words = [sys.executable, "-P", "-m", "baton.cli.main", "router"]
    with open(read_end, "rb") as announcements:
        cores = os.sched_getaffinity(0)
        try:
            # The child inherits this thread's core. (A function to be called in the child would mean fork, which
            # disturbs gRPC's threads.)
            os.sched_setaffinity(0, {core})
            process = subprocess.Popen(
                ending_with_us([*words, *(word for pair in flags.items() for word in pair)]),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[write_end],
                process_group=0,
            )
        finally:
            os.close(write_end)
            os.sched_setaffinity(0, cores)
        line = announcements.readline()
    announced = parse_announcement(line) if line else Failed("it ended before it was ready", 1)
    if isinstance(announced, Failed):
        process.kill()
        process.wait()
        raise ConfigError(f"the benchmark's router did not start: {announced.error}")
    return process, announced
