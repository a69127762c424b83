"""The state of a cluster that its supervisor writes to the run directory, for other commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.processes.process_stat import process_stat


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The state of one process that a supervisor runs."""

    name: str
    role: str
    """redis, prefill, decode or router."""
    status: str
    """Starting, Ready, CrashLoop, Draining or Stopped."""
    pid: int
    """The process id; 0 while the process is not running."""
    start_time: int
    """The kernel's start time of the process, which with the pid identifies it for ever. 0 if it is unknown."""
    restarts: int
    incarnation: str
    address: str
    operator_address: str
    log: str
    last_exit: str
    """How the process ended the last time; empty if it never did."""
    http_address: str = ""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The state of a cluster on this machine."""

    cluster: str
    phase: str
    """starting, ready or draining."""
    pid: int
    start_time: int
    started_at: float
    """Seconds since the epoch."""
    model: str
    dtype: str
    grpc_address: str
    """The gRPC address of the first router that serves. The operator and HTTP addresses are of the same router."""
    operator_address: str
    processes: Sequence[ProcessState]
    http_address: str = ""
    certs: str = ""
    """Directory with the certificates of processes and operators; empty without TLS."""
    needs_key: bool = False
    """Whether clients must show an API key."""

    @property
    def grpc_addresses(self) -> tuple[str, ...]:
        """The gRPC addresses of all routers that have announced one, `grpc_address` at least."""
        addresses = tuple(p.address for p in self.processes if p.role == "router" and p.address)
        return addresses or tuple(filter(None, [self.grpc_address]))

    @property
    def operator_addresses(self) -> tuple[str, ...]:
        """The operator addresses of all routers that have announced one, `operator_address` at least."""
        addresses = tuple(p.operator_address for p in self.processes if p.role == "router" and p.operator_address)
        return addresses or tuple(filter(None, [self.operator_address]))

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """The HTTP addresses of all routers that have announced one."""
        return tuple(p.http_address for p in self.processes if p.role == "router" and p.http_address)

    def gone(self, start_time_of: Callable[[int], int]) -> tuple[str, ...]:
        """The names of processes that have ended since the state was written.

        For a moment after each end there are some; for longer only if the supervisor can't write the state.
        `start_time_of`: as `start_time`.
        """
        return tuple(p.name for p in self.processes if p.start_time and start_time_of(p.pid) != p.start_time)

    def to_json(self) -> dict[str, Any]:
        """The state as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ClusterState:
        """The inverse of `to_json`. Raises TypeError, KeyError or ValueError for anything else."""
        processes = tuple(ProcessState(**process) for process in values["processes"])
        return cls(**{**values, "processes": processes})


def start_time(pid: int) -> int:
    """The kernel's start time of a process in clock ticks since boot (proc(5)); 0 without /proc or such a process."""
    try:
        return process_stat(pid).start_ticks
    except OSError:
        return 0
