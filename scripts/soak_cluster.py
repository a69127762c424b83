"""Clusters of a soak run: starts them with `baton up`, and reads the figures of their processes."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import redis
from soak_load import Routers

from baton.cli.cluster.run_dir import RunDir
from baton.cli.cluster.state import ClusterState, ProcessState
from baton.registry.base import ENDED_S
from baton.registry.embedded import embedded_redis

START_S = 180.0
"""Time in which a cluster must be ready and a killed process must be back; all cores are busy meanwhile."""
ORPHAN_GRACE_S = 5.0
SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the two clusters."""

    flags: Sequence[str]
    environment: Mapping[str, str]
    vocab_size: int
    clients: int
    warm_up_clients: int
    """Clients during the warm-up. There are more of them, so that each node's buffer of events is full afterwards."""


CLUSTERS: Mapping[str, Kind] = {
    # The caches are small, so that all of their memory has been written before the warm-up ends.
    "simulated": Kind(
        ("--runner", "simulated", "--kv-cache-memory", "1MiB"), {"BATON_SIMULATED_STEP_MS": "10"}, 32000, 8, 24
    ),
    "bundled": Kind(("--kv-cache-memory", "24MiB"), {}, 4096, 4, 12),
}
FLAGS = (
    *("--prefill", "2", "--decode", "2", "--routers", "2", "--threads", "1", "--grpc-port", "0", "--http-port", "0"),
    # Every request uses both nodes and NIXL.
    *("--placement", "least-loaded", "--orphan-grace-s", f"{ORPHAN_GRACE_S:g}"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one process at one time; None if the process does not report one."""

    at_s: float
    cluster: str
    process: str
    pid: int
    resident: int
    anonymous: int
    descriptors: int
    threads: int
    tasks: int | None
    is_quiet: bool


class Cluster:
    """One running `baton up`."""

    def __init__(self, name: str, run_dir: Path, monitor_key: str, first_metrics_port: int) -> None:
        self.name = name
        self._run_dir = RunDir(run_dir)
        self._key = monitor_key
        self._redis = redis.Redis.from_url(embedded_redis(run_dir).url)
        nodes = [process.name for process in self.state.processes if process.role in ("prefill", "decode")]
        self._pages = {node: f"127.0.0.1:{first_metrics_port + n}" for n, node in enumerate(nodes)}

    @property
    def state(self) -> ClusterState:
        state = self._run_dir.read_state()
        if state is None:
            raise SystemExit(f"scripts/soak: the {self.name} cluster has ended unexpectedly; see {self._run_dir.logs}")
        return state

    @property
    def routers(self) -> Routers:
        return Routers(self.state.grpc_addresses, self.state.http_addresses)

    def process(self, name: str) -> ProcessState:
        return next(process for process in self.state.processes if process.name == name)

    def samples(self, at_s: float, *, is_quiet: bool) -> Iterator[Sample]:
        """Yields a sample of every running process."""
        state = self.state
        pids = [(process.name, process.pid) for process in state.processes if process.pid]
        for name, pid in [*pids, (SUPERVISOR, state.pid)]:
            with suppress(OSError, KeyError):  # the process was killed just now
                yield self._sample(at_s, name, pid, state, is_quiet=is_quiet)

    def _sample(self, at_s: float, name: str, pid: int, state: ClusterState, *, is_quiet: bool) -> Sample:
        proc = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        resident, anonymous = (int(status[key].split()[0]) << 10 for key in ("VmRSS", "RssAnon"))
        descriptors = len(os.listdir(proc / "fd"))
        address = self._pages.get(name) or next((p.http_address for p in state.processes if p.name == name), "")
        tasks = self._tasks(address) if address else None
        return Sample(
            at_s, self.name, name, pid, resident, anonymous, descriptors, int(status["Threads"]), tasks, is_quiet
        )

    def _tasks(self, address: str) -> int | None:
        asked = urllib.request.Request(
            f"http://{address}/metrics", headers={"authorization": f"Bearer {self._key}", "connection": "close"}
        )
        with suppress(OSError, ValueError), urllib.request.urlopen(asked, timeout=10) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("baton_event_loop_tasks"):
                    return int(float(line.rpartition(" ")[2]))
        return None

    def keys(self) -> dict[str, int]:
        """The number of Redis keys by kind. Records of ended requests, and quotas, expire soon and are not counted."""
        counts = {"keys of members and desired state": 0, "keys of running requests": 0}
        for key in self._redis.scan_iter(count=1000):
            kind = key.split(b":")[2] if key.count(b":") >= 2 else b""
            if kind not in (b"flight", b"quota", b"running"):
                counts["keys of members and desired state"] += 1
            elif kind == b"flight" and self._redis.ttl(key) > ENDED_S:
                counts["keys of running requests"] += 1
        return counts

    def tracebacks(self) -> list[str]:
        """The first line with a traceback of each log."""
        traces = []
        for log in sorted(self._run_dir.logs.glob("*.log*")):
            bad = [line for line in log.read_text(errors="replace").splitlines() if "Traceback" in line]
            traces += [f"{self.name}, {log.name}: {bad[0][:500]}"] if bad else []
        return traces


@contextmanager
def started_cluster(name: str, home: Path, monitor_key: str, first_metrics_port: int) -> Iterator[Cluster]:
    """Runs a cluster with the keys of `home`; on exit all its processes have ended."""
    run_dir = home / name
    kind = CLUSTERS[name]
    words = (*FLAGS, *kind.flags, "--api-keys", str(home / "keys.json"), "--metrics-port", str(first_metrics_port))
    try:
        _baton({**os.environ, **kind.environment}, "up", "--detach", "--run-dir", str(run_dir), *words)
        yield Cluster(name, run_dir, monitor_key, first_metrics_port)
    finally:
        with suppress(subprocess.CalledProcessError):
            _baton(os.environ, "down", "--force", "--timeout", "30", "--run-dir", str(run_dir))


def _baton(environment: Mapping[str, str], *words: str) -> None:
    # The process has its own session, so Ctrl-C reaches only this script, which then stops the clusters in order.
    command = [sys.executable, "-P", "-m", "baton.cli.main", *words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, start_new_session=True, timeout=START_S
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(f"scripts/soak: `baton {words[0]}` ended with status {done.returncode}; see its output above")
