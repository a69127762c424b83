"""Unpacks the blocks of GGUF's quantised formats into integer codes with scales, without rounding anything.

The layouts are those of `block_q4_0` to `block_q6_K` in ggml's `ggml-common.h`. Each function takes the bytes of all
blocks as uint8 [n, B, bytes of a block], for a weight of n rows with B blocks each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from baton.errors import ConfigError
from baton.model_formats.gguf.container import TensorPlace
from baton.runner.backends.quantized_weight import QuantizedWeight

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GROUP = 32
_SUPERBLOCK_GROUPS = 8
"""Groups in a block of Q4_K and Q5_K, which share the factors of their scales and offsets."""
_Q6_GROUP, _Q6_GROUPS = 16, 16


def unpack(tensor: TensorPlace, data: memoryview) -> torch.Tensor | QuantizedWeight:
    """The tensor whose bytes `data` are: plain ones in their own dtype and shape, as a copy.

    Raises ConfigError, which names the tensor, for a scale that is not finite and for a quantised tensor that is not a
    matrix.
    """
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    plain = _PLAIN.get(tensor.format.name)
    if plain is not None:
        return raw.view(plain).view(tensor.shape)
    if len(tensor.shape) != 2:
        raise ConfigError(f"tensor {tensor.name} is quantised and has {len(tensor.shape)} dimensions instead of 2")
    weight = _UNPACKERS[tensor.format.name](raw.view(tensor.shape[0], -1, tensor.format.num_bytes))
    for factors in (weight.scales, weight.scale_factors, weight.offsets, weight.offset_factors):
        if factors is not None and factors.is_floating_point() and not bool(factors.isfinite().all()):
            raise ConfigError(f"tensor {tensor.name} has a scale that is infinite or not a number; copy the file again")
    return weight


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(_nibbles(blocks[..., 2:]), 4, _GROUP, scales=_halves(blocks, 0), zeros=8)


def _q4_1(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 4:])
    return _weight(codes, 4, _GROUP, scales=_halves(blocks, 0), offsets=_halves(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return _weight(codes, 8, _GROUP, scales=_halves(blocks, 0), zeros=16)


def _q5_1(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return _weight(codes, 8, _GROUP, scales=_halves(blocks, 0), offsets=_halves(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    # Signed codes from -128: the same bits as unsigned ones from 0 whose zero is 128, but for the highest.
    return _weight(blocks[..., 2:] ^ 0x80, 8, _GROUP, scales=_halves(blocks, 0), zeros=128)


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    return _with_k_scales(blocks, _nibbles_by_32(blocks[..., 16:]), 4)


def _q5_k(blocks: torch.Tensor) -> QuantizedWeight:
    # Bit g of byte i is the fifth bit of element i of group g.
    fifth = torch.stack([blocks[..., 16:48] >> group & 1 for group in range(_SUPERBLOCK_GROUPS)], dim=-2)
    return _with_k_scales(blocks, _nibbles_by_32(blocks[..., 48:]) | fifth.flatten(-2) << 4, 8)


def _q6_k(blocks: torch.Tensor) -> QuantizedWeight:
    n, count, _ = blocks.shape
    low = blocks[..., :128].view(n, count, 2, 2, 32)  # [half, which 32 bytes]
    high = blocks[..., 128:192].view(n, count, 2, 32)
    parts = [
        nibbles[:, :, :, column] | (high >> 2 * (2 * row + column) & 3) << 4
        for row, nibbles in enumerate((low & 0xF, low >> 4))
        for column in (0, 1)
    ]
    codes = torch.stack(parts, dim=3)  # [n, count, 2, 4, 32]
    scales = blocks[..., 192:208].view(torch.int8).reshape(n, count * _Q6_GROUPS)
    return _weight(codes, 8, _Q6_GROUP, scales=scales, scale_factors=_halves(blocks, 208), zeros=32)


def _with_k_scales(blocks: torch.Tensor, codes: torch.Tensor, bits: int) -> QuantizedWeight:
    """A weight of Q4_K or Q5_K: 6-bit scales and offsets, packed in 12 bytes, and one factor for 8 of each."""
    first, second, third = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = torch.cat([first & 63, third & 0xF | first >> 6 << 4], dim=-1)
    offsets = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    return _weight(
        codes,
        bits,
        _GROUP,
        scales=scales.flatten(1),
        scale_factors=_halves(blocks, 0),
        offsets=offsets.flatten(1),
        offset_factors=-_halves(blocks, 2),
    )


def _weight(codes: torch.Tensor, bits: int, group: int, **factors: Any) -> QuantizedWeight:
    return QuantizedWeight(codes.reshape(codes.shape[0], -1), bits, group, **factors)


def _halves(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block: [n, B]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).flatten(1)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """The low halves of all bytes, then the high halves."""
    return torch.cat([data & 0xF, data >> 4], dim=-1)


def _nibbles_by_32(data: torch.Tensor) -> torch.Tensor:
    """Of each 32 bytes the low halves, then the high halves."""
    return _nibbles(data.reshape(*data.shape[:-1], -1, 32)).flatten(-2)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """The bits of 4 bytes, the lowest of the first byte first."""
    places = torch.arange(8, dtype=torch.uint8)
    return (data[..., None] >> places & 1).flatten(-2)


_UNPACKERS: Mapping[str, Callable[[torch.Tensor], QuantizedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
