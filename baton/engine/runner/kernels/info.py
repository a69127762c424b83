"""What the kernels are on this machine, and a fingerprint of the bits they produce."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from baton.engine.runner.kernels.attention import paged_attention, store_kv
from baton.engine.runner.kernels.errors import KernelsUnavailable
from baton.engine.runner.kernels.library import isa_name, library
from baton.engine.runner.kernels.product import linear, pack


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """Whether the kernels can be used, and which."""

    isa: str | None
    """The instruction set in use; None when there are no kernels."""
    isas: tuple[str, ...]
    """All that this processor supports."""
    numerics: str
    """Fingerprint of the bits: equal where a probe came out equal. Empty without kernels."""
    threads: bool
    """Whether the work is spread over torch's threads; else the caller's thread does all of it."""
    reason: str
    """Why there are none, and the way out. Empty when there are."""

    def __bool__(self) -> bool:
        return self.isa is not None


def available() -> KernelInfo:
    """Load the kernels and say what they are; never raises."""
    try:
        lib = library()
    except KernelsUnavailable as error:
        return KernelInfo(isa=None, isas=(), numerics="", threads=False, reason=str(error))
    return KernelInfo(isa_name(), lib.isas, _numerics(), lib.threads, reason="")


def _numerics() -> str:
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        digest.update(_bytes(_rounding_noise(dtype)))
        cache = torch.zeros(8, 1, 2, 1, 16, 24, dtype=dtype)
        keys, values = _noise(100, 24)[:, None].to(dtype), _noise(100, 25)[:, None, 1:].to(dtype)
        store_kv(keys, values.contiguous(), cache, 0, torch.arange(100))
        out = paged_attention(
            _noise(2 * 3, 24).view(2, 3, 24).to(dtype),
            cache,
            0,
            torch.tensor([0, 2], dtype=torch.int32),
            torch.tensor([100], dtype=torch.int32),
            torch.arange(8, dtype=torch.int32)[None],
            scale=0.7,
            softcap=30.0,
        )
        digest.update(_bytes(out))
    return digest.hexdigest()[:12]


def _rounding_noise(dtype: torch.dtype) -> torch.Tensor:
    """Products whose second half takes back the first: what is left shows each order of summation as it is."""
    x, weight = _noise(5, 320).to(dtype), _noise(70, 320).to(dtype)
    return linear(torch.cat([x, x], dim=1), pack(torch.cat([weight, -weight], dim=1)))


def _noise(rows: int, columns: int) -> torch.Tensor:
    """Numbers in [-1, 1) made with integers alone, so that they are the same everywhere."""
    index = torch.arange(1, rows * columns + 1, dtype=torch.int64)
    scattered = (index * 2654435761 + (index * index) * 40503) % (1 << 24)
    return (scattered.float() / (1 << 23) - 1).view(rows, columns)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
