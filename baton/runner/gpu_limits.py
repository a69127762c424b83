"""Whether a GPU can take a node, and how large its KV cache may be. Pure: the facts come from `gpu_facts.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError

FREE_SHARE = 0.9
"""The share of what is left for the KV cache that it gets. The rest is for attention's own memory, for recorded graphs,
and for what torch can't use of what it has."""
DRIVER_OF_CUDA = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest driver for Linux that runs programs of each version of CUDA, whatever its minor version (NVIDIA's table of
minor version compatibility)."""
_PROHIBITED, _EXCLUSIVE = "Prohibited", "Exclusive_Process"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU."""

    pid: int
    name: str
    used_bytes: int | None
    """None: the driver does not say."""

    def __str__(self) -> str:
        used = "" if self.used_bytes is None else f", {gib(self.used_bytes)}"
        return f"process {self.pid} ({self.name}{used})"


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What the driver says of one GPU."""

    name: str
    total_bytes: int
    free_bytes: int
    compute_mode: str = "Default"
    """Default, Exclusive_Process or Prohibited."""
    processes: Sequence[GpuProcess] = ()
    """Others that compute on it, as far as this process may see them."""


def gib(num_bytes: int) -> str:
    """A number of bytes in GiB."""
    return f"{num_bytes / _GIB:.2f} GiB"


def why_driver_too_old(driver: str, cuda: str) -> str:
    """Why a driver runs no programs of this version of CUDA; empty if it does, or if one of the two is not known.

    `driver`, `cuda`: versions such as 535.104.05 and 12.8.
    """
    needed = DRIVER_OF_CUDA.get(_numbers(cuda)[0]) if cuda else None
    if not driver or needed is None or _numbers(driver) >= _numbers(needed):
        return ""
    return (
        f"the driver is {driver}, and this torch is built for CUDA {cuda}, which needs {needed} or a later one: update "
        "the driver, or install a torch for an older CUDA"
    )


def check_gpu(gpu: GpuFacts, device: str, weight_bytes: int, cache_bytes: int) -> None:
    """Raise ConfigError unless a node can use this GPU, with the number of bytes that would do.

    `device`: its name in settings. `weight_bytes`: what the weights take at least. `cache_bytes`: the size of the KV
    cache; 0: as much as is left.
    """
    named = f"{device} ({gpu.name})"
    if gpu.compute_mode == _PROHIBITED:
        raise ConfigError(f"{named} is closed to all processes (compute mode {_PROHIBITED}): {_OPEN}")
    if gpu.compute_mode == _EXCLUSIVE and gpu.processes:
        raise ConfigError(
            f"{named} is for one process alone (compute mode {_EXCLUSIVE}), and is in use by "
            f"{_listed(gpu.processes)}: give the node another GPU (--device), end that process, or {_OPEN}"
        )
    needed = weight_bytes + cache_bytes
    if gpu.free_bytes >= needed:
        return
    cache = f"{gib(cache_bytes)} of KV cache" if cache_bytes else "a KV cache"
    others = f"; it is in use by {_listed(gpu.processes)}" if gpu.processes else ""
    fits = gpu.free_bytes - weight_bytes
    smaller = f"lower --kv-cache-memory to at most {fits >> 20}MiB, " if cache_bytes and fits > 0 else ""
    raise ConfigError(
        f"{named} has {gib(gpu.free_bytes)} free of {gib(gpu.total_bytes)}, and the node needs at least {gib(needed)}: "
        f"{gib(weight_bytes)} of weights and {cache}{others}. Give the node another GPU (--device), {smaller}end "
        "what uses this one, or divide the model among several (--pp)"
    )


def room_for_cache(free_bytes: int, total_bytes: int, held_bytes: int, step_bytes: int, sharers: int) -> int:
    """The bytes of a GPU for a KV cache that gets what is left.

    `held_bytes`: what this process has already, its weights. `step_bytes`: what the largest step takes beside them.
    `sharers`: nodes that have the GPU in common; each may use an equal part of it, whoever comes first.
    """
    own = min(free_bytes, total_bytes // sharers - held_bytes)
    return max(0, int(FREE_SHARE * (own - step_bytes)))


_OPEN = "open it with `nvidia-smi -c DEFAULT`"


def _listed(processes: Sequence[GpuProcess]) -> str:
    return " and ".join(map(str, processes))


def _numbers(version: str) -> tuple[int, ...]:
    """A version's numbers; what is no number counts as 0."""
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split("."))
