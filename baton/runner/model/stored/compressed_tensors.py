"""Reads weights that compressed-tensors has written (llm-compressor).

`pack-quantized`: weight_packed int32 [n, k / p], p = 32 / bits, with codes that are larger than their numbers by half
their range; weight_scale [n, G]; weight_shape [2]; weight_zero_point, int8 [n, G] or packed along the outputs.
`int-quantized` and `naive-quantized`: weight int8 [n, k]; weight_scale [n, 1], [n, G] or [1]; weight_zero_point int8 of
the same shape. `float-quantized`: as fp8.py reads it.

Activations are never quantised: a scheme that quantises them, too (W8A8), is served with its weights alone, which is
nearer to the model that was quantised. Layers that the list `ignore` names have plain weights in the file, so which
layers are quantised is read from the file; targets decide between the schemes of a mixed file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.model.stored.fp8 import Fp8, block_of
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

_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision", "dense")
_MOST_SCHEMES = 64
_MOST_TARGETS = 4096
_PATTERN_LENGTH = 200
_MOST_REPEATS = 3
_REPEATED_GROUP = re.compile(r"\)[*+{]")


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How the weights of some layers are quantised."""

    bits: int
    is_float: bool
    group: int | None
    """The size of a group; None: a row, or the whole weight, has one scale."""
    block: tuple[int, int]
    targets: tuple[str, ...]
    """Kinds of modules, names of modules, or regular expressions that follow `re:`."""

    def covers(self, layer: str) -> bool:
        return any(_is_target(target, layer) for target in self.targets)

    @property
    def description(self) -> str:
        return Fp8(self.block).description if self.is_float else f"int{self.bits}, {groups_of(self.group)}"


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """A checkpoint of compressed-tensors, with one or several schemes."""

    schemes: tuple[_Scheme, ...]

    parts = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    main_parts = ("weight_packed", "weight_scale")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> CompressedTensors:
        """Read a `quantization_config`; raises UnusableWeight."""
        _check_format(config.get("format", "dense"))
        for name in ("sparsity_config", "transform_config"):
            inner = config.get(name)
            if inner and not (isinstance(inner, dict) and inner.get("format") == "dense"):
                raise UnusableWeight(f"its quantization_config has a {name}, which Baton can't read")
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not 1 <= len(groups) <= _MOST_SCHEMES:
            raise UnusableWeight(f"its quantization_config needs 1 to {_MOST_SCHEMES} config_groups")
        return cls(tuple(_scheme(group) for group in groups.values()))

    @property
    def description(self) -> str:
        kinds = dict.fromkeys(scheme.description for scheme in self.schemes)
        return f"compressed-tensors: {' and '.join(kinds)}"

    def stored(self, layer: str, parts: Mapping[str, CheckpointTensor], dequantize: bool) -> StoredWeight:
        """Raises UnusableWeight for wrong shapes, scales that are not finite, and groups that are not neighbours."""
        scheme = self._scheme_of(layer)
        if "weight_g_idx" in parts:
            raise UnusableWeight(
                f"{layer} has inputs in the order of their activations (actorder group, weight_g_idx), which Baton "
                "can't read; take a checkpoint that was made with actorder static or none"
            )
        if scheme.is_float:
            return Fp8(scheme.block).stored(layer, parts, dequantize)
        require(parts, layer, ("weight_scale",))
        if "weight_packed" in parts:
            return _packed(layer, parts, scheme)
        require(parts, layer, ("weight",))
        return _unpacked(layer, parts, scheme)

    def _scheme_of(self, layer: str) -> _Scheme:
        if len(set(self.schemes)) == 1:
            return self.schemes[0]
        scheme = next((scheme for scheme in self.schemes if scheme.covers(layer)), None)
        if scheme is None:
            raise UnusableWeight(f"{layer} is quantised, but no target of its quantization_config names it")
        return scheme


def _check_format(name: object) -> None:
    if name not in _FORMATS:
        raise UnusableWeight(
            f"its format is {name!r:.80}; of compressed-tensors, Baton reads {', '.join(_FORMATS[:-1])}"
        )


def _scheme(group: object) -> _Scheme:
    weights = group.get("weights") if isinstance(group, dict) else None
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict) or not isinstance(targets, list):
        raise UnusableWeight("its quantization_config has a config_group without weights or targets")
    if len(targets) > _MOST_TARGETS or not all(isinstance(target, str) for target in targets):
        raise UnusableWeight(f"its quantization_config has targets that are not at most {_MOST_TARGETS} names")
    if group.get("format") is not None:
        _check_format(group["format"])
    is_float = weights.get("type", "int") == "float"
    if is_float:
        whole_number(weights.get("num_bits"), "num_bits of floating point", (8,))
    bits = whole_number(weights.get("num_bits"), "num_bits", (4, 8))
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel", "tensor", "block", None):
        raise UnusableWeight(f"its quantization_config has the strategy {strategy!r:.80}; Baton reads group, channel")
    size = group_size(weights.get("group_size")) if strategy in ("group", None) else None
    return _Scheme(bits, is_float, size, block_of(weights.get("block_structure")), tuple(targets))


def _is_target(target: str, layer: str) -> bool:
    if not target.startswith("re:"):
        # Every layer whose weight is stored quantised is of this kind.
        return target == layer or target == "Linear"
    pattern = target.removeprefix("re:")
    # A pattern comes from a stranger: one that could take years is refused.
    if (
        len(pattern) > _PATTERN_LENGTH
        or sum(map(pattern.count, "*+{")) > _MOST_REPEATS
        or _REPEATED_GROUP.search(pattern)
    ):
        raise UnusableWeight(f"its quantization_config has the target {target!r:.80}, which is too complex a pattern")
    try:
        return re.match(pattern, layer) is not None
    except (re.error, RecursionError) as error:
        raise UnusableWeight(f"its quantization_config has the target {target!r:.80}, which is no pattern") from error


def _packed(layer: str, parts: Mapping[str, CheckpointTensor], scheme: _Scheme) -> StoredWeight:
    require(parts, layer, ("weight_shape",))
    per_word = 32 // scheme.bits
    n, num_words = matrix_shape(parts["weight_packed"], f"{layer}.weight_packed")
    expect(parts["weight_packed"], f"{layer}.weight_packed", ("I32",))
    expect(parts["weight_shape"], f"{layer}.weight_shape", ("I64", "I32"), (2,))
    rows, k = (int(size) for size in parts["weight_shape"].read())
    if rows != n or not (num_words - 1) * per_word < k <= num_words * per_word:
        raise UnusableWeight(
            f"{layer}.weight_shape is {rows} x {k}, but {layer}.weight_packed holds {n} rows of {num_words} words"
        )
    group = group_of(layer, k, scheme.group)
    _check_scales(layer, parts, n, k // group, scheme.bits)

    def read() -> QuantizedWeight:
        codes = unpack(parts["weight_packed"].read(), scheme.bits)[:, :k].contiguous()
        return _weight(codes, parts, scheme.bits, group, n)

    return StoredWeight((n, k), read, packed_bytes((n, k), scheme.bits, group, _group_bytes(parts)))


def _unpacked(layer: str, parts: Mapping[str, CheckpointTensor], scheme: _Scheme) -> StoredWeight:
    n, k = matrix_shape(parts["weight"], f"{layer}.weight")
    expect(parts["weight"], f"{layer}.weight", ("I8",))
    group = group_of(layer, k, scheme.group)
    _check_scales(layer, parts, n, k // group, scheme.bits)

    def read() -> QuantizedWeight:
        # Codes without a sign: -128 becomes 0. Numbers of 4 bits take 8 here, as they do in the file.
        return _weight((parts["weight"].read().view(torch.uint8) ^ 128), parts, 8, group, n)

    return StoredWeight((n, k), read, packed_bytes((n, k), 8, group, _group_bytes(parts)))


def _group_bytes(parts: Mapping[str, CheckpointTensor]) -> int:
    return scale_bytes(parts["weight_scale"]) + ("weight_zero_point" in parts)


def _check_scales(layer: str, parts: Mapping[str, CheckpointTensor], n: int, num_groups: int, bits: int) -> None:
    scales, name = parts["weight_scale"], f"{layer}.weight_scale"
    expect(scales, name, FLOATS)
    for_all = {(), (1,), (1, 1)} if num_groups == 1 else set()
    per_row = {(n,)} if num_groups == 1 else set()
    if scales.shape not in for_all | per_row | {(n, num_groups)}:
        raise UnusableWeight(f"{name} has the shape {list(scales.shape)} instead of {[n, num_groups]}")
    expect_finite(scales, name)
    zeros = parts.get("weight_zero_point")
    if zeros is None:
        return
    name = f"{layer}.weight_zero_point"
    expect(zeros, name, ("I8", "I32", "I64"))
    if zeros.dtype == "I32" and "weight_packed" in parts:
        expect(zeros, name, ("I32",), (-(-n * bits // 32), num_groups))
        return
    if zeros.shape not in for_all | per_row | {(n, num_groups)}:
        raise UnusableWeight(f"{name} has the shape {list(zeros.shape)} instead of {[n, num_groups]}")
    values, half = zeros.read().long(), 1 << (bits - 1)
    if bool(((values < -half) | (values >= half)).any()):
        raise UnusableWeight(f"{name} has numbers that are not from {-half} to {half - 1}; copy the file again")


def _weight(
    codes: torch.Tensor, parts: Mapping[str, CheckpointTensor], bits: int, group: int, n: int
) -> QuantizedWeight:
    num_groups = codes.shape[1] // group
    scales = parts["weight_scale"].read()
    scales = (scales.reshape(-1, num_groups) if scales.numel() > 1 else scales.reshape(1, 1)).expand(n, num_groups)
    middle = 1 << (bits - 1)
    zeros: int | torch.Tensor = middle
    if "weight_zero_point" in parts:
        stored = parts["weight_zero_point"].read()
        if stored.dtype == torch.int32 and "weight_packed" in parts:
            zeros = one_or_each(unpack(stored.T, bits)[:, :n].T)
        else:
            signed = stored.to(torch.int16)
            signed = signed.reshape(-1, num_groups) if signed.numel() > 1 else signed.reshape(1, 1)
            zeros = one_or_each((signed.expand(n, num_groups) + middle).to(torch.uint8))
    return QuantizedWeight(codes=codes, bits=bits, group=group, scales=scales.contiguous(), zeros=zeros)
