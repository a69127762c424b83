"""Judges the facts about a machine. Each check says what was found and, if that is a problem, how to fix it."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.cli.output import size
from baton.messages.node_model import NodeShape
from baton.messages.node_report import SLOW_BYTES_PER_S
from baton.registry.embedded import INSTALL_SERVER, NO_SERVER

if TYPE_CHECKING:
    from baton.registry.connection import ServerMemory

_PROCESS_BYTES = 600 << 20
"""Memory of each rank of a node in addition to weights and KV cache: Python, torch, buffers."""
_SMALL_SHM = 64 << 20
_SMALL_DISK = 1 << 30
_NO_DISK = 64 << 20
_FULL_SHARE = 0.8
"""Share of a Redis' memory above which a burst of requests may fill the rest."""


class Level(enum.IntEnum):
    """The result of a check. The value is the exit code of `baton doctor`."""

    OK = 0
    WARNING = 1
    CRITICAL = 2
    UNKNOWN = 3


_SEVERITY = (Level.OK, Level.UNKNOWN, Level.WARNING, Level.CRITICAL)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    level: Level
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model, which was loaded once to find them."""

    name: str
    error: str = ""
    """Why the model can't be served; the fields below are empty then."""
    dtype: str = ""
    numerics: str = ""
    bit_exact: bool = False
    bit_exact_reason: str = ""
    weight_bytes: int = 0
    compute_paths: Sequence[tuple[str, str, str]] = ()
    """For each part: its name, what computes it, and why nothing faster does (empty for the fastest)."""
    template_error: str = ""
    """Why the model's chat template is not used; empty if it is, or if the model has none."""
    bits: str = ""
    """`NodeDescription.bits` of its nodes."""


@dataclass(frozen=True, slots=True)
class GpusFacts:
    """Facts about the GPUs of this machine."""

    found: Sequence[tuple[str, int, int]] = ()
    """For each its name, and how many of its bytes are free, and how many it has, as far as the driver says so."""
    driver: str = ""
    """The driver's version; empty without a driver."""
    why_unused: str = ""
    """Why torch computes on none of them, and what to do; empty if it does."""
    defaults: str = ""
    """The settings that have other defaults on a GPU, with these."""


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """How fast one process of this machine has read the memory of another."""

    memory_kind: str
    """DRAM or VRAM."""
    bytes_per_second: float
    lane: str
    """The transport, as UCX calls it; empty if it does not say."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about this machine and this installation."""

    kernel_path: str | None
    """The instruction set that the kernels use; None without kernels."""
    kernel_paths: Sequence[str]
    """All instruction sets that would run on this processor."""
    kernel_reason: str
    compiler: str
    """A C compiler on the PATH, or empty."""
    native_bfloat16: bool
    model: ModelFacts
    cores: int
    nodes: int
    threads_per_node: int
    shape: NodeShape
    """The shape of each node."""
    redis_server: str
    """The program that `baton up` would start, or empty."""
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
    """Default ports for clients, by the flag that chooses another one."""
    ports_in_use: frozenset[int]
    run_dir: str
    """The run directory, with the logs and sockets of a cluster on this machine."""
    disk_free: int | None
    """Bytes free for the run directory; None when unknown."""
    seconds_since_installed: float
    """Seconds by the wall clock since the installation was written; negative if the clock is wrong."""
    clock_is_synchronised: bool
    """Whether the kernel knows that a time service adjusts the clock."""
    version: str
    unmet: Sequence[str]
    """Requirements of Baton that the installed libraries do not meet."""
    registry: ServerMemory | None = None
    """Memory of the Redis given by --registry; None without that flag."""
    gpus: GpusFacts = GpusFacts()
    lane: LaneFacts | None = None
    """None where NIXL does not work."""


def run_checks(facts: Facts) -> list[Finding]:
    """Run all checks, and return their findings in the order in which they are printed."""
    return [
        _kernels(facts),
        _bfloat16(facts),
        _model(facts),
        _bit_exact(facts),
        _compute_paths(facts),
        *([_chat_template(facts)] if facts.model.template_error else []),
        _threads(facts),
        _memory(facts),
        _gpus(facts.gpus),
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


def worst_level(findings: Sequence[Finding]) -> Level:
    """The most severe level of the findings: CRITICAL, then WARNING, UNKNOWN, OK."""
    return max((finding.level for finding in findings), key=_SEVERITY.index, default=Level.UNKNOWN)


def _kernels(facts: Facts) -> Finding:
    if facts.kernel_path is None:
        fix = (
            f"{facts.compiler} is installed: run `pip install -e .` again, or reinstall the package"
            if facts.compiler
            else "install a C compiler (apt install gcc), then install Baton again"
        )
        why = f" ({facts.kernel_reason})" if facts.kernel_reason else ""
        message = (
            f"no C kernels{why}: torch's padded products are used. Outputs are bit-exact among "
            "nodes without kernels, but prompts take about twelve times as long and decode steps two to five times "
            "(docs/performance.md)"
        )
        return Finding("kernels", Level.WARNING, message, fix)
    others = [path for path in facts.kernel_paths if path != facts.kernel_path]
    message = f"kernels use {facts.kernel_path}" + (f"; {', '.join(others)} would also run" if others else "")
    return Finding("kernels", Level.OK, message)


def _bfloat16(facts: Facts) -> Finding:
    if facts.native_bfloat16:
        return Finding("bfloat16", Level.OK, "the processor has bfloat16 products; bfloat16 is the default dtype")
    return Finding(
        "bfloat16",
        Level.WARNING,
        "the processor has no bfloat16 products: float32 is the default, with twice the memory and traffic",
        "if speed matters, use a processor with AVX512-BF16, AMX or Armv8.6 BF16; no setting is needed",
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
        shown = "yes, as a check with the model's own shapes and weights has just shown"
        return Finding("bit-exact", Level.OK, f"{shown}; its tokens are those of all nodes with the BITS {model.bits}")
    return Finding(
        "bit-exact",
        Level.WARNING,
        f"no: {model.bit_exact_reason}. A request's tokens may depend on its batch, and a failover may change them",
        "choose another model or dtype, or accept that a stream which diverges after a failover ends with an error",
    )


def _compute_paths(facts: Facts) -> Finding:
    model = facts.model
    if model.error:
        return Finding("compute", Level.UNKNOWN, "the model does not load", "see the line above")
    message = "; ".join(f"{part}: {runs}" for part, runs, _ in model.compute_paths)
    slow = [f"{part} is not faster because {why}" for part, _, why in model.compute_paths if why]
    if not slow:
        return Finding("compute", Level.OK, message)
    return Finding(
        "compute",
        Level.WARNING,
        f"{message}. {'; '.join(slow)}",
        "fix what the reason names, if possible; without that tokens are the same, only slower",
    )


def _chat_template(facts: Facts) -> Finding:
    return Finding(
        "template",
        Level.WARNING,
        f"chats will be refused: {facts.model.template_error}",
        "replace the chat template in the model's directory (chat_template.jinja, or tokenizer_config.json)",
    )


def _threads(facts: Facts) -> Finding:
    total = facts.nodes * facts.threads_per_node
    message = f"{facts.cores} cores; `baton up` starts {facts.nodes} nodes with {facts.threads_per_node} threads each"
    ranks = facts.nodes * facts.shape.num_ranks
    if total > facts.cores:
        return Finding(
            "threads", Level.WARNING, f"{message}, more threads than cores", "give the machine or container more cores"
        )
    if facts.shape.num_ranks > 1:
        message += f" and {facts.shape.num_ranks} ranks ({facts.shape})"
    if ranks > facts.cores:
        return Finding(
            "threads",
            Level.WARNING,
            f"{message}, {ranks} ranks on {facts.cores} cores: those that wait take the cores of those that compute",
            "give the machine or container more cores, or the nodes fewer ranks",
        )
    return Finding("threads", Level.OK, message)


def _memory(facts: Facts) -> Finding:
    node = facts.model.weight_bytes + facts.kv_cache_bytes + facts.shape.num_ranks * _PROCESS_BYTES
    needed = node * facts.nodes
    if not facts.available_memory:
        return Finding("memory", Level.UNKNOWN, "available memory is unknown on this system", "check it by hand")
    message = (
        f"{size(facts.available_memory)} available; {facts.nodes} nodes need about {size(needed)} "
        f"({size(facts.kv_cache_bytes)} of KV cache each)"
    )
    if facts.available_memory >= needed:
        return Finding("memory", Level.OK, message)
    level = Level.WARNING if facts.available_memory >= node else Level.CRITICAL
    return Finding("memory", level, message, "free memory, lower --kv-cache-memory, or choose a smaller model")


def _gpus(gpus: GpusFacts) -> Finding:
    if not gpus.driver and not gpus.found:
        return Finding("gpu", Level.OK, "none: no driver of NVIDIA's is loaded, so the CPU computes")
    listed = ", ".join(f"{name} ({size(free)} of {size(total)} free)" for name, free, total in gpus.found) or "found"
    message = f"{listed}, driver {gpus.driver or 'unknown'}"
    if not gpus.why_unused:
        return Finding("gpu", Level.OK, f"{message}; defaults of a node there: {gpus.defaults}")
    fix = "do what the reason says, or give the nodes --device cpu"
    return Finding("gpu", Level.WARNING, f"{message}; the CPU computes: {gpus.why_unused}", fix)


def _redis(facts: Facts) -> Finding:
    if facts.redis_server:
        return Finding("redis", Level.OK, f"{facts.redis_server} is used as the registry of a cluster on this machine")
    return Finding("redis", Level.CRITICAL, NO_SERVER, INSTALL_SERVER)


def _registry(memory: ServerMemory) -> Finding:
    if memory.error:
        fix = "give the URL of a running Redis, with a user that may call INFO"
        return Finding("registry", Level.UNKNOWN, f"its memory can't be checked: {memory.error}", fix)
    bound = size(memory.max_bytes) if memory.max_bytes else "no limit"
    message = f"maxmemory-policy {memory.policy}, {size(memory.used_bytes)} of {bound} used"
    if memory.max_bytes and memory.policy != "noeviction":
        fix = "CONFIG SET maxmemory-policy noeviction, or give the cluster a Redis of its own"
        return Finding("registry", Level.WARNING, f"{message}: a full Redis evicts the records of running nodes", fix)
    if memory.max_bytes and memory.used_bytes > _FULL_SHARE * memory.max_bytes:
        fix = "raise maxmemory: records of nodes and requests need space"
        return Finding("registry", Level.WARNING, message, fix)
    return Finding("registry", Level.OK, message)


def _nixl(facts: Facts) -> Finding:
    chosen = f"UCX_TLS={facts.ucx_tls}" if facts.ucx_tls else "UCX chooses its transports"
    if not facts.nixl_reason:
        message, lane = f"NIXL with UCX loads and registers memory; {chosen}", facts.lane
        if lane is not None:
            over = f" over {lane.lane}" if lane.lane else ""
            rate = f"{lane.bytes_per_second / 1e9:.1f} GB/s"
            message += f"; {rate} of {lane.memory_kind} between two processes{over}"
            if lane.memory_kind == "VRAM" and lane.bytes_per_second < SLOW_BYTES_PER_S:
                fix = "let UCX use cuda_ipc (UCX_TLS), and give the containers of a host one IPC namespace"
                return Finding("nixl", Level.WARNING, f"{message}: it goes through the host", fix)
        return Finding("nixl", Level.OK, message)
    return Finding(
        "nixl",
        Level.CRITICAL,
        f"NIXL does not work ({chosen}): {facts.nixl_reason}",
        "pip install nixl-cu13; unset UCX_TLS if it names a transport that this machine does not have",
    )


def _shared_memory(facts: Facts) -> Finding:
    fix = "mount a larger /dev/shm: `docker run --shm-size=1g`, or in Kubernetes an emptyDir with medium Memory"
    if facts.shm_free is None:
        return Finding("shm", Level.WARNING, "no /dev/shm: nodes of this machine can't use shared memory", fix)
    message = f"{size(facts.shm_free)} free in /dev/shm"
    if facts.shm_free < _SMALL_SHM:
        return Finding("shm", Level.WARNING, f"{message}: too little for UCX's shared memory", fix)
    return Finding("shm", Level.OK, message)


def _locked_memory(facts: Facts) -> Finding:
    limit = "unlimited" if facts.memlock is None else size(facts.memlock)
    if not facts.rdma_devices:
        return Finding("memlock", Level.OK, f"ulimit -l is {limit}; there is no RDMA device that would need it")
    devices = ", ".join(facts.rdma_devices)
    message = f"ulimit -l is {limit}; RDMA over {devices} locks {size(facts.kv_cache_bytes)} in each node"
    if facts.memlock is None or facts.memlock >= facts.kv_cache_bytes:
        return Finding("memlock", Level.OK, message)
    return Finding(
        "memlock", Level.WARNING, message, "raise it: ulimit -l unlimited, or LimitMEMLOCK=infinity in systemd"
    )


def _port(facts: Facts) -> Finding:
    taken = {flag: port for flag, port in facts.ports.items() if port in facts.ports_in_use}
    if not taken:
        return Finding(
            "port", Level.OK, f"the default ports for clients, {' and '.join(map(str, facts.ports.values()))}, are free"
        )
    return Finding(
        "port",
        Level.WARNING,
        f"default ports for clients that are in use (by a running cluster?): {', '.join(map(str, taken.values()))}",
        f"stop the process that uses it, or choose another port with {', '.join(taken)}",
    )


def _disk(facts: Facts) -> Finding:
    if facts.disk_free is None:
        return Finding("disk", Level.UNKNOWN, f"free space for {facts.run_dir} is unknown", "check it by hand")
    message = f"{size(facts.disk_free)} free for {facts.run_dir}, where logs go"
    if facts.disk_free >= _SMALL_DISK:
        return Finding("disk", Level.OK, message)
    level = Level.WARNING if facts.disk_free >= _NO_DISK else Level.CRITICAL
    return Finding("disk", level, message, "free disk space, or choose another directory with --run-dir")


def _clock(facts: Facts) -> Finding:
    if facts.seconds_since_installed < 0:
        message = "the clock shows a time before Baton was installed, at which no certificate is valid"
        return Finding("clock", Level.CRITICAL, message, "set the clock, and start chrony or systemd-timesyncd")
    kept = "a time service adjusts it" if facts.clock_is_synchronised else "no time service is known to adjust it"
    return Finding("clock", Level.OK, f"{kept}; only certificates and the times in logs depend on it")


def _versions(facts: Facts) -> Finding:
    if not facts.unmet:
        return Finding("versions", Level.OK, f"Baton {facts.version}, and all libraries meet its requirements")
    fix = "pip install --upgrade baton-serve, in a virtual environment of its own"
    return Finding("versions", Level.WARNING, f"Baton {facts.version} requires {', '.join(facts.unmet)}", fix)
