"""The name of everything that decides the bits which a GPU computes, beside the model and torch's own version.

It has the compute capability, and what computes each kind of work: kernels of our own with their versions and Triton's,
or torch's products with what decides in which order cuBLAS sums. It does not have the card's name: two cards of one
capability compute equal bits with the same kernels, and may exchange KV and streams. Nor has it the host's processor:
that computes nothing of a step, and of what it computes when a model is loaded the bits themselves are named.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

KERNEL_VERSIONS: Mapping[str, int] = {"attention": 2, "norms": 1, "products": 1, "heads": 1, "experts": 1}
"""The version of each module of kernels, by the kind of work that it computes. Count it up with every change of the
module after which any input gives other bits: its nodes then refuse the KV of those of the version before."""
_CUBLAS_PACKAGES = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")


@dataclass(frozen=True, slots=True)
class Gpu:
    """What of a card decides bits."""

    architecture: str
    """Its compute capability, as `sm_90`."""
    num_multiprocessors: int
    """By which cuBLAS chooses kernels, and whether they divide sums. Kernels of our own don't look at it."""

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """What decides bits of a device; a device that is no GPU has its type alone."""
        if device.type != "cuda":
            return cls(device.type, 0)
        properties = torch.cuda.get_device_properties(device)
        return cls(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)


def gpu_numerics(gpu: Gpu, ways: Mapping[str, Iterable[str]], rows_per_call: int) -> str:
    """The name. `ways`: for each kind of work the ways that compute it: `triton` for a kernel of our own, `cublas` for
    torch's products in calls of `rows_per_call` rows, anything else for operations of torch that need no more than
    torch's version to be named.
    """
    all_ways = {way for some in ways.values() for way in some}
    parts = [gpu.architecture]
    if "triton" in all_ways:
        parts.append(f"triton-{_version('triton')}")
    if "cublas" in all_ways:
        parts.append(_cublas(gpu, rows_per_call))
    for kind, some in ways.items():
        named = [f"triton.{KERNEL_VERSIONS[kind]}" if way == "triton" else way for way in sorted(some)]
        parts.append(f"{kind}-{'+'.join(named)}")
    return "-".join(parts)


def _cublas(gpu: Gpu, rows_per_call: int) -> str:
    """What decides how cuBLAS sums: its version, the shape of calls, the size of the GPU, its workspace, and TF32."""
    library = _version(*_CUBLAS_PACKAGES, otherwise=f"of-cuda-{torch.version.cuda}")
    name = f"cublas-{library}-rows-{rows_per_call}-sms-{gpu.num_multiprocessors}"
    if workspace := os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
        name += f"-workspace-{workspace}"
    return f"{name}-tf32" if torch.backends.cuda.matmul.allow_tf32 else name


@cache
def host_numerics() -> str:
    """A fingerprint of the inverse frequencies of rotary angles, which the host computes when a model is loaded.

    Their last bits depend on the vector instructions that torch uses for powers.
    """
    digest = hashlib.sha256()
    for base in (1e4, 5e5, 1e6):
        for width in (16, 64, 80, 128, 256):
            exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
            digest.update((1.0 / (base**exponents)).numpy().tobytes())
    return f"angles-{digest.hexdigest()[:8]}"


def _version(*packages: str, otherwise: str = "unknown") -> str:
    """The version of the first of these packages that is installed."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return otherwise
