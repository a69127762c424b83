"""Weights in the blocks of GGUF's quantised formats, as Baton's converter takes them over from a GGUF file.

A weight is one tensor uint8 [n, bytes of a row], named after the format of its blocks: `….q_proj.q4_k`. The rows are in
transformers' order. A checkpoint may mix formats; its `quantization_config` lists them.

Blocks are unpacked into integer codes with scales, without rounding anything. Their layouts are those of `block_q4_0`
to `block_q6_K` in ggml's `ggml-common.h`; each function of a format takes the blocks of some rows as uint8 [m, B, bytes
of a block].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.model_formats.gguf.container import BLOCK_FORMATS, BlockFormat
from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.model.stored.weight import (
    CheckpointTensor,
    StoredWeight,
    UnusableWeight,
    expect,
    matrix_shape,
)

_GROUP = 32
_SUPERBLOCK_GROUPS = 8
"""Groups in a block of Q4_K and Q5_K, which share the factors of their scales and offsets."""
_Q6_GROUP, _Q6_GROUPS = 16, 16
_PIECE = 1 << 18
"""How many elements are unpacked at once, so that intermediate results stay small, and in the processor's cache."""
_FACTORS = ("scales", "scale_factors", "offsets", "offset_factors")


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """A format whose numbers are integers with scales."""

    layout: BlockFormat
    halves: tuple[int, ...]
    """The bytes of a block at which its numbers in float16 begin: scales, offsets, or factors of them."""
    packed_bytes: int
    """How many bytes the codes, scales and offsets of a block take in memory after packing."""
    unpack_rows: Callable[[torch.Tensor], QuantizedWeight]

    def columns(self, row_bytes: int) -> int | None:
        """The number of elements in a row of this size; None: it is no whole number of blocks."""
        blocks, rest = divmod(row_bytes, self.layout.num_bytes)
        return None if rest else blocks * self.layout.num_elements

    def has_finite_scales(self, weight: torch.Tensor) -> bool:
        """Whether all numbers of a weight are finite."""
        blocks = weight.view(weight.shape[0], -1, self.layout.num_bytes)
        return all(bool(_halves(blocks, start).isfinite().all()) for start in self.halves)

    def unpack(self, weight: torch.Tensor) -> QuantizedWeight:
        """The integers and scales of a weight [n, k]. Beside the result, only a few rows are in memory."""
        n, blocks = weight.shape[0], weight.shape[1] // self.layout.num_bytes
        k = blocks * self.layout.num_elements
        codes = torch.empty(n, k, dtype=torch.uint8)
        factors: dict[str, list[torch.Tensor]] = defaultdict(list)
        step = max(1, _PIECE // k)
        for first in range(0, n, step):
            piece = self.unpack_rows(weight[first : first + step].view(-1, blocks, self.layout.num_bytes))
            codes[first : first + step] = piece.codes
            for name in _FACTORS:
                if (factor := getattr(piece, name)) is not None:
                    factors[name].append(factor)
        joined: dict[str, Any] = {name: torch.cat(factor) for name, factor in factors.items()}
        return QuantizedWeight(codes, piece.bits, piece.group, zeros=piece.zeros, **joined)


def _q4_0(blocks: torch.Tensor) -> QuantizedWeight:
    return _weight(_nibbles(blocks[..., 2:]), 4, _GROUP, scales=_halves(blocks, 0), zeros=8)


def _q4_1(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 4:])
    return _weight(codes, 4, _GROUP, scales=_halves(blocks, 0), offsets=_halves(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return _weight(codes, 5, _GROUP, scales=_halves(blocks, 0), zeros=16)


def _q5_1(blocks: torch.Tensor) -> QuantizedWeight:
    codes = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return _weight(codes, 5, _GROUP, scales=_halves(blocks, 0), offsets=_halves(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> QuantizedWeight:
    # Signed codes from -128: the same bits as unsigned ones from 0 whose zero is 128, but for the highest.
    return _weight(blocks[..., 2:] ^ 0x80, 8, _GROUP, scales=_halves(blocks, 0), zeros=128)


def _q4_k(blocks: torch.Tensor) -> QuantizedWeight:
    return _with_k_scales(blocks, _nibbles_by_32(blocks[..., 16:]), 4)


def _q5_k(blocks: torch.Tensor) -> QuantizedWeight:
    # Bit g of byte i is the fifth bit of element i of group g.
    fifth = torch.stack([blocks[..., 16:48] >> group & 1 for group in range(_SUPERBLOCK_GROUPS)], dim=-2)
    return _with_k_scales(blocks, _nibbles_by_32(blocks[..., 48:]) | fifth.flatten(-2) << 4, 5)


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
    return _weight(codes, 6, _Q6_GROUP, scales=scales, scale_factors=_halves(blocks, 208), zeros=32)


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


_LAYOUTS = {layout.name: layout for layout in BLOCK_FORMATS.values()}
QUANTIZED_FORMATS: Mapping[str, QuantizedFormat] = {
    "Q4_0": QuantizedFormat(_LAYOUTS["Q4_0"], (0,), 16 + 2, _q4_0),
    "Q4_1": QuantizedFormat(_LAYOUTS["Q4_1"], (0, 2), 16 + 4, _q4_1),
    "Q5_0": QuantizedFormat(_LAYOUTS["Q5_0"], (0,), 20 + 2, _q5_0),
    "Q5_1": QuantizedFormat(_LAYOUTS["Q5_1"], (0, 2), 20 + 4, _q5_1),
    "Q8_0": QuantizedFormat(_LAYOUTS["Q8_0"], (0,), 32 + 2, _q8_0),
    "Q4_K": QuantizedFormat(_LAYOUTS["Q4_K"], (0, 2), 128 + 16 + 4, _q4_k),
    "Q5_K": QuantizedFormat(_LAYOUTS["Q5_K"], (0, 2), 160 + 16 + 4, _q5_k),
    "Q6_K": QuantizedFormat(_LAYOUTS["Q6_K"], (208,), 192 + 16 + 2, _q6_k),
}
"""The quantised formats that are read, by their names."""


METHOD = "gguf"
"""The `quant_method` of a configuration."""


def quantization_config(formats: list[str]) -> Mapping[str, Any]:
    """The `quantization_config` of a checkpoint with weights of these formats."""
    return {"quant_method": METHOD, "formats": formats}


def part_of(kind: str) -> str:
    """The last part of the name of a tensor whose blocks have this format."""
    return kind.lower()


@dataclass(frozen=True, slots=True)
class Gguf:
    """The formats of one checkpoint."""

    formats: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Gguf:
        """Read a `quantization_config`; raises UnusableWeight."""
        formats = config.get("formats")
        if (
            not isinstance(formats, list)
            or not formats
            or not all(kind in QUANTIZED_FORMATS for kind in map(str, formats))
        ):
            known = ", ".join(QUANTIZED_FORMATS)
            raise UnusableWeight(f"its quantization_config has formats {formats!r:.80}; Baton reads {known}")
        return cls(tuple(dict.fromkeys(map(str, formats))))

    @property
    def description(self) -> str:
        return f"{', '.join(self.formats)} (GGUF)"

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(part_of(kind) for kind in self.formats)

    @property
    def main_parts(self) -> tuple[str, ...]:
        return self.parts

    def stored(self, layer: str, parts: Mapping[str, CheckpointTensor], dequantize: bool) -> StoredWeight:
        """Raises UnusableWeight for wrong shapes and scales that are not finite."""
        if len(parts) > 1:
            raise UnusableWeight(f"{layer} is there in several formats: {', '.join(parts)}")
        ((part, tensor),) = parts.items()
        name, kind = f"{layer}.{part}", QUANTIZED_FORMATS[part.upper()]
        expect(tensor, name, ("U8",))
        n, row_bytes = matrix_shape(tensor, name)
        k = kind.columns(row_bytes)
        if k is None:
            raise UnusableWeight(f"{name} has rows of {row_bytes} bytes, which is no whole number of blocks")
        if not kind.has_finite_scales(tensor.read()):
            raise UnusableWeight(f"{name} has scales that are not finite; copy the file again")
        blocks = n * k // kind.layout.num_elements
        return StoredWeight((n, k), lambda: kind.unpack(tensor.read()), blocks * kind.packed_bytes)
