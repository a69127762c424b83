"""What the machine has: versions, what a cluster needs, and the ceilings that other figures are compared with."""

from __future__ import annotations

import importlib
import platform
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

from gpu.packages import read_machine
from gpu.stage import StageContext

SECONDS = 40
NEEDS_KERNELS = False

MODULES = (
    "transformers",
    "baton.runner.loading",
    "baton.cli.main",
    "router.process",
    "prefill_node.app",
    "decode_node.app",
    "soundfile",
    "soxr",
    "redis",
)
"""What imports, together, all packages that the processes of a cluster need, beside NIXL and the server of Redis.

The last three are what Baton imports late.
"""
_BLOCKS, _BLOCK_BYTES = 4, 1 << 16


def run(context: StageContext) -> None:
    context.report("versions", python=platform.python_version(), cuda=torch.version.cuda, packages=_versions())
    # First: where a package is missing, most of what follows is lost.
    for module in MODULES:
        _try(context, "import", module, lambda module=module: importlib.import_module(module))  # type: ignore[misc]
    _try(context, "start", "the server of Redis", _run_redis)
    if context.device == "cuda":
        about = torch.cuda.get_device_properties(0)
        context.report(
            "gpu",
            name=about.name,
            capability=[about.major, about.minor],
            multiprocessors=about.multi_processor_count,
            memory_bytes=about.total_memory,
            free_bytes=torch.cuda.mem_get_info()[0],
        )
    _copy(context)
    _product(context)
    # Last: native code that fails may end the process.
    _try(context, "start", "an agent of NIXL", lambda: _make_agent(context))


def _try(context: StageContext, name: str, of: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        context.check(name, False, of=of, error=f"{type(error).__name__}: {error}")
    else:
        context.check(name, True, of=of)


def _run_redis() -> None:
    """Run the program that `baton up` would start, for its version only."""
    from baton.registry.embedded import find_redis_server

    subprocess.run([find_redis_server(), "--version"], check=True, timeout=10)


def _make_agent(context: StageContext) -> None:
    """Make an agent with UCX, and register memory of the device, as a node does at its start."""
    from baton.engine.runner import KVMemory
    from kv_transfer.backends.nixl import NixlBackend

    memory = torch.ones(_BLOCKS * _BLOCK_BYTES, dtype=torch.uint8, device=context.device)
    kind = "VRAM" if context.device == "cuda" else "DRAM"
    NixlBackend("gpu-check", KVMemory(memory.data_ptr(), _BLOCKS, _BLOCK_BYTES, kind, 0, memory)).close()


def _versions() -> dict[str, str | None]:
    """The versions of the packages that scripts/gpu_pack takes to be on the machine, or None."""
    versions: dict[str, str | None] = {}
    for name in read_machine().versions:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def _copy(context: StageContext) -> None:
    numbers = 1 << (10 if context.tiny else 30)
    source = torch.randn(numbers, device=context.device)
    target = torch.full_like(source, float("nan"))
    timing = context.time(lambda: target.copy_(source))
    context.check("copy is right", torch.equal(source, target))
    moved = 2 * source.numel() * source.element_size()
    context.report("copy", bytes_moved=moved, gb_per_s=moved / timing.ms / 1e6, **timing._asdict())


def _product(context: StageContext) -> None:
    size = 64 if context.tiny else 8192
    left, other = (torch.randn(size, size, device=context.device).bfloat16() for _ in range(2))
    timing = context.time(lambda: left @ other)
    context.report("product", size=size, tflop_per_s=2 * size**3 / timing.ms / 1e9, **timing._asdict())
