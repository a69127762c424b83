"""Reads weights that the tools of GPTQ (AutoGPTQ, GPTQModel) and AWQ (for its `gemm` kernels) have written.

GPTQ packs codes along the inputs: qweight int32 [k / p, n], p = 32 / bits; scales [G, n]; qzeros int32 [G, n / p];
g_idx int32 [k], the group of each input. Format `gptq` stores every zero minus one, and `gptq_v2` as it is.

AWQ packs codes of 4 bits along the outputs: qweight int32 [k, n / 8]; qzeros int32 [G, n / 8]; scales [G, n]. The eight
codes of a word are those of outputs 0, 2, 4, 6, 1, 3, 5, 7, from its lowest bits on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.model.stored.weight import (
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
    one_or_each,
    packed_bytes,
    require,
    scale_bytes,
    unpack,
    whole_number,
)

_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ with 4 or 8 bits."""

    bits: int
    group: int | None
    """The size of a group; None: a row has one scale."""
    symmetric: bool
    """Whether the same code means zero in all groups."""
    stored_minus_one: bool
    """Whether zeros are stored minus one, as the first version of the format does."""

    parts = ("qweight", "qzeros", "scales", "g_idx")
    main_parts = ("qweight",)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Gptq:
        """Read a `quantization_config`; raises UnusableWeight."""
        layout = config.get("checkpoint_format", "gptq")
        if layout not in _FORMATS:
            raise UnusableWeight(
                f"its checkpoint_format is {layout!r:.80}; Baton reads {' and '.join(_FORMATS)}, to which GPTQModel "
                "can convert it"
            )
        if config.get("dynamic"):
            raise UnusableWeight("its quantization_config has rules for single layers (dynamic), which Baton lacks")
        bits = whole_number(config.get("bits"), "bits", (4, 8))
        return cls(bits, group_size(config.get("group_size")), config.get("sym") is True, layout == "gptq")

    @property
    def description(self) -> str:
        return f"int{self.bits} (GPTQ), {groups_of(self.group)}"

    def stored(self, layer: str, parts: Mapping[str, CheckpointTensor], dequantize: bool) -> StoredWeight:
        """Raises UnusableWeight for wrong shapes, scales that are not finite, and groups that are not neighbours."""
        require(parts, layer, ("qweight", "qzeros", "scales"))
        per_word = 32 // self.bits
        num_words, n = matrix_shape(parts["qweight"], f"{layer}.qweight")
        k = num_words * per_word
        group = group_of(layer, k, self.group)
        if n % per_word:
            raise UnusableWeight(f"{layer} has {n} outputs, which is no multiple of {per_word}")
        expect(parts["qweight"], f"{layer}.qweight", ("I32",))
        expect(parts["scales"], f"{layer}.scales", FLOATS, (k // group, n))
        expect(parts["qzeros"], f"{layer}.qzeros", ("I32",), (k // group, n // per_word))
        expect_finite(parts["scales"], f"{layer}.scales")
        if "g_idx" in parts:
            expect(parts["g_idx"], f"{layer}.g_idx", ("I32", "I64"), (k,))
            index = parts["g_idx"].read().long()
            if bool(((index < 0) | (index >= k // group)).any()):
                raise UnusableWeight(f"{layer}.g_idx names groups that {layer}.scales lacks")
            if not torch.equal(index, torch.arange(k) // group):
                if not dequantize:
                    raise UnusableWeight(
                        f"{layer} has inputs in the order of their activations (desc_act, g_idx), which Baton can't "
                        "pack; serve it with --dequantize, or take a checkpoint that was made with desc_act false"
                    )
                return StoredWeight((n, k), lambda: self._in_another_order(parts, group), packed_bytes=None)
        group_bytes = scale_bytes(parts["scales"]) + (0 if self.symmetric else 1)
        size = packed_bytes((n, k), self.bits, group, group_bytes)
        return StoredWeight((n, k), lambda: self._read(parts, group), size)

    def _read(self, parts: Mapping[str, CheckpointTensor], group: int) -> QuantizedWeight:
        zeros = unpack(parts["qzeros"].read(), self.bits)
        if self.stored_minus_one:
            # GPTQ's tools let the sum wrap around: a stored 15 of 4 bits means 0.
            zeros = (zeros + 1) & (2**self.bits - 1)
        return QuantizedWeight(
            codes=unpack(parts["qweight"].read().T, self.bits),
            bits=self.bits,
            group=group,
            scales=parts["scales"].read().T.contiguous(),
            zeros=one_or_each(zeros.T),
        )

    def _in_another_order(self, parts: Mapping[str, CheckpointTensor], group: int) -> torch.Tensor:
        """The weight in float32 [n, k] if input j is in the group g_idx[j]."""
        weight = self._read(parts, group)
        index = parts["g_idx"].read().long()
        zeros = weight.zeros if isinstance(weight.zeros, int) else weight.zeros.float()[:, index]
        return (weight.codes.float() - zeros) * weight.float32_scales()[:, index]


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
