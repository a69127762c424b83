"""What a supervisor writes down about its cluster, for the commands that come later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process under a supervisor."""

    name: str
    role: str
    """redis, prefill, decode or router."""
    status: str
    """Starting, Ready, CrashLoop, Draining or Stopped."""
    pid: int
    """0 while it is not running."""
    start_time: int
    """The kernel's start time of that process: with the pid it names one process for good. 0 where it is unknown."""
    restarts: int
    incarnation: str
    address: str
    operator_address: str
    log: str
    last_exit: str
    """How it ended the last time, for people; empty when it never did."""
    http_address: str = ""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster on this machine."""

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
    """Of the first router that serves, as the next one."""
    operator_address: str
    processes: Sequence[ProcessState]
    http_address: str = ""
    """Of the same router."""
    certs: str = ""
    """Directory of the certificates of its processes and its operators; empty: it has none."""
    needs_key: bool = False
    """Clients must show one."""

    @property
    def grpc_addresses(self) -> tuple[str, ...]:
        """Of every router that has said where it listens, the one above at least."""
        found = tuple(p.address for p in self.processes if p.role == "router" and p.address)
        return found or tuple(filter(None, [self.grpc_address]))

    @property
    def operator_addresses(self) -> tuple[str, ...]:
        """Of every router that has said where it listens, the one above at least."""
        found = tuple(p.operator_address for p in self.processes if p.role == "router" and p.operator_address)
        return found or tuple(filter(None, [self.operator_address]))

    @property
    def http_addresses(self) -> tuple[str, ...]:
        """Of every router that has said where it listens."""
        return tuple(p.http_address for p in self.processes if p.role == "router" and p.http_address)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> ClusterState:
        """What `to_json` made; raises TypeError, KeyError or ValueError for anything else."""
        processes = tuple(ProcessState(**process) for process in found["processes"])
        return cls(**{**found, "processes": processes})


def start_time(pid: int) -> int:
    """The kernel's start time of a process, clock ticks since boot (proc(5)); 0 where there is no /proc or process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The second field is the program's name in parentheses and may hold anything, parentheses included.
    return int(stat.rpartition(")")[2].split()[19])
