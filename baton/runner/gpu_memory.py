"""The memory of the GPU that a model is loaded to, as torch has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class GpuMemory(Protocol):
    """The memory of one GPU, in bytes."""

    @property
    def total(self) -> int:
        """All of it."""
        ...

    @property
    def free(self) -> int:
        """What nobody has allocated."""
        ...

    @property
    def held(self) -> int:
        """What this process has allocated."""
        ...

    def peak_of(self, run: Callable[[], object]) -> int:
        """Run something, and return how much it had allocated at most. Raises torch.OutOfMemoryError."""
        ...


class TorchGpuMemory:
    """`GpuMemory` of torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    @property
    def free(self) -> int:
        # Torch keeps what it once had.
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    @property
    def held(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak_of(self, run: Callable[[], object]) -> int:
        before = self.held
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        return int(torch.cuda.max_memory_allocated(self._device)) - before


def gpu_memory(device: torch.device) -> GpuMemory | None:
    """The memory of this device; None if it is a CPU."""
    return TorchGpuMemory(device) if device.type == "cuda" else None
