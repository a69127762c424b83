"""Reads weights that AWQ's tools have written for its `gemm` kernels.

Codes of 4 bits are packed along the outputs: qweight int32 [k, n / 8]; qzeros int32 [G, n / 8]; scales [G, n]. The
eight codes of a word are those of outputs 0, 2, 4, 6, 1, 3, 5, 7, from its lowest bits on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.model.quantization.packed_integers import one_or_each, unpack
from baton.runner.model.quantization.stored_weight import (
    FLOATS,
    CheckpointTensor,
    StoredWeight,
    UnusableWeight,
    expect,
    expect_finite,
    group_of,
    group_size,
    groups_of,
    matrix_shape,
    packed_bytes,
    require,
    scale_bytes,
    whole_number,
)

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""At which place of a word the code of each of its eight outputs is."""
_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ with 4 bits."""

    group: int | None
    """The size of a group; None: a row has one scale."""

    parts = ("qweight", "qzeros", "scales")
    main_parts = ("qweight",)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Awq:
        """Read a `quantization_config`; raises UnusableWeight."""
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise UnusableWeight(f"it is AWQ of version {version!r:.80}; Baton reads version gemm")
        whole_number(config.get("bits", config.get("w_bit")), "bits", (4,))
        return cls(group_size(config.get("group_size", config.get("q_group_size"))))

    @property
    def description(self) -> str:
        return f"int4 (AWQ), {groups_of(self.group)}"

    def stored(self, layer: str, parts: Mapping[str, CheckpointTensor], dequantize: bool) -> StoredWeight:
        """Raises UnusableWeight for wrong shapes and scales that are not finite."""
        require(parts, layer, self.parts)
        k, num_words = matrix_shape(parts["qweight"], f"{layer}.qweight")
        n = num_words * _PER_WORD
        group = group_of(layer, k, self.group)
        expect(parts["qweight"], f"{layer}.qweight", ("I32",))
        expect(parts["scales"], f"{layer}.scales", FLOATS, (k // group, n))
        expect(parts["qzeros"], f"{layer}.qzeros", ("I32",), (k // group, num_words))
        expect_finite(parts["scales"], f"{layer}.scales")
        size = packed_bytes((n, k), 4, group, scale_bytes(parts["scales"]) + 1)
        return StoredWeight((n, k), lambda: _read(parts, group), size)


def _read(parts: Mapping[str, CheckpointTensor], group: int) -> QuantizedWeight:
    return QuantizedWeight(
        codes=_by_output(parts["qweight"].read()),
        bits=4,
        group=group,
        scales=parts["scales"].read().T.contiguous(),
        zeros=one_or_each(_by_output(parts["qzeros"].read())),
    )


def _by_output(words: torch.Tensor) -> torch.Tensor:
    """Words int32 [m, n / 8] as codes uint8 [n, m]."""
    codes = unpack(words, 4).view(words.shape[0], -1, _PER_WORD)[..., list(_PLACES)]
    return codes.flatten(1).T.contiguous()
