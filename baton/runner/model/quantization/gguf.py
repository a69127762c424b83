"""Weights in the blocks of GGUF's quantised formats, as Baton's converter takes them over from a GGUF file.

A weight is one tensor uint8 [n, bytes of a row], named after the format of its blocks: `….q_proj.q4_k`. The rows are in
transformers' order. A checkpoint may mix formats; its `quantization_config` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.runner.model.quantization.gguf_blocks import QUANTIZED_FORMATS
from baton.runner.model.quantization.stored_weight import (
    CheckpointTensor,
    StoredWeight,
    UnusableWeight,
    expect,
    matrix_shape,
)

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
        found = config.get("formats")
        if not isinstance(found, list) or not found or not all(kind in QUANTIZED_FORMATS for kind in map(str, found)):
            known = ", ".join(QUANTIZED_FORMATS)
            raise UnusableWeight(f"its quantization_config has formats {found!r:.80}; Baton reads {known}")
        return cls(tuple(dict.fromkeys(map(str, found))))

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
