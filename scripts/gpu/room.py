"""Whether a device has memory, and a stage time, for one more size; a size that has none is reported as left out."""

from __future__ import annotations

import torch

from baton.runner.backends.device import resolve_device
from gpu.stage import StageContext

_CPU_BYTES = 2 << 30
"""What a stage may take on a CPU, which other processes share."""
_SHARE = 0.9
"""How much of what is free a size may need: allocators round up."""


def device_of(context: StageContext) -> torch.device:
    """The device that a stage computes on, with its number."""
    return resolve_device(context.device)


def free_bytes(device: torch.device) -> int:
    """Bytes that a stage may still allocate on a device; what torch keeps for reuse counts as free."""
    if device.type == "cpu":
        return _CPU_BYTES
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0] * _SHARE)


def has_room(context: StageContext, name: str, *, num_bytes: float = 0, seconds: float = 0) -> bool:
    """Whether so much memory and time is left; reports `name` as left out, with the reason, if not."""
    left = context.seconds_left
    if seconds > left:
        context.report(name, left_out=f"needs about {seconds:.0f} s, and {left:.0f} s are left")
        return False
    free = free_bytes(device_of(context))
    if num_bytes > free:
        context.report(name, left_out=f"needs {num_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
        return False
    return True
