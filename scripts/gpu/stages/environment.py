"""What the machine has: versions, and the ceilings that other figures are compared with."""

from __future__ import annotations

import importlib
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from gpu.packages import read_machine
from gpu.stage import StageContext

SECONDS = 15
NEEDS_KERNELS = False

PROCESSES = ("router.process", "prefill_node.app", "decode_node.app", "kv_transfer.backends.nixl", "nixl", "redis")
"""What imports, together, all packages that the processes of a cluster need."""


def run(context: StageContext) -> None:
    context.report("versions", python=platform.python_version(), cuda=torch.version.cuda, packages=_versions())
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
    for module in PROCESSES:
        try:
            importlib.import_module(module)
        except Exception as error:
            context.check("import", False, module=module, error=f"{type(error).__name__}: {error}")
        else:
            context.check("import", True, module=module)


def _versions() -> dict[str, str | None]:
    """The versions of the packages that scripts/gpu_pack takes to be on the machine, or None."""
    found: dict[str, str | None] = {}
    for name in read_machine().versions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


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
    one, other = (torch.randn(size, size, device=context.device).bfloat16() for _ in range(2))
    timing = context.time(lambda: one @ other)
    context.report("product", size=size, tflop_per_s=2 * size**3 / timing.ms / 1e9, **timing._asdict())
