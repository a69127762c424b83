"""A weight that is still in its file: what readers of checkpoints make, and the layers of a model hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.runner.backends.quantized_weight import NarrowWeight
from baton.runner.backends.weight_rows import WeightOnFile

FLOATS = frozenset({"F16", "BF16", "F32"})
"""The dtypes of scales, as safetensors names them."""


class UnusableWeight(Exception):
    """A quantised weight, or the configuration that describes it, can't be used; the message says why, in one line."""


class CheckpointTensor(Protocol):
    """A tensor in a file whose shape and dtype are known before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str:
        """The dtype has the name that safetensors gives it: F16, I32, F8_E4M3, …"""
        ...

    def read(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [n, k] in a checkpoint. It is read whenever a layer asks for it, so that it takes no memory before."""

    shape: tuple[int, int]
    read: Callable[[], NarrowWeight | WeightOnFile | torch.Tensor]
    """Read it: with its scales, or as plain numbers, in float32 [n, k], if they can't be kept apart. A weight that is
    plain in its file is not read yet."""
    packed_bytes: int | None
    """Its size in memory after packing. None: it has no packed form, and becomes a plain tensor when it is loaded."""
    is_plain: bool = False
    """Whether it is packed as plain numbers."""

    def dequantized(self) -> torch.Tensor:
        """Read it as plain numbers [n, k]: a quantised one in float32, a plain one in the model's dtype."""
        weight = self.read()
        if isinstance(weight, WeightOnFile):
            return weight.read()
        return weight if isinstance(weight, torch.Tensor) else weight.dequantized()


class WeightFormat(Protocol):
    """A format of quantised checkpoints, with the settings of one checkpoint."""

    @property
    def description(self) -> str:
        """For operators: "int4 (GPTQ), groups of 128"."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """The last parts of the names of a weight's tensors."""
        ...

    @property
    def main_parts(self) -> tuple[str, ...]:
        """Those of `parts` of which every quantised weight has at least one, and no plain weight has any."""
        ...

    def stored(self, layer: str, parts: Mapping[str, CheckpointTensor], dequantize: bool) -> StoredWeight:
        """The weight of a layer, of which shapes and scales have been checked; raises UnusableWeight."""
        ...


def stored_weights(
    weight_format: WeightFormat, tensors: Mapping[str, CheckpointTensor], dequantize: bool
) -> tuple[dict[str, StoredWeight], frozenset[str]]:
    """The quantised weights by the names of their plain form (`….weight`), and the names of all their tensors.

    Raises UnusableWeight, whose message names the layer.
    """
    weights: dict[str, StoredWeight] = {}
    names: set[str] = set()
    for name in tensors:
        main = next((part for part in weight_format.main_parts if name.endswith(f".{part}")), None)
        if main is None:
            continue
        layer = name.removesuffix(f".{main}")
        parts = {part: tensors[f"{layer}.{part}"] for part in weight_format.parts if f"{layer}.{part}" in tensors}
        weights[f"{layer}.weight"] = weight_format.stored(layer, parts, dequantize)
        names.update(f"{layer}.{part}" for part in parts)
    return weights, frozenset(names)


def require(parts: Mapping[str, CheckpointTensor], layer: str, names: Iterable[str]) -> None:
    """Raise UnusableWeight unless all of these tensors are there."""
    missing = [name for name in names if name not in parts]
    if missing:
        raise UnusableWeight(f"{layer} lacks {', '.join(missing)}")


def expect(tensor: CheckpointTensor, name: str, dtypes: Iterable[str], shape: tuple[int, ...] | None = None) -> None:
    """Raise UnusableWeight unless a tensor has one of these dtypes and this shape."""
    if tensor.dtype not in dtypes:
        raise UnusableWeight(f"{name} is of type {tensor.dtype} instead of {' or '.join(sorted(dtypes))}")
    if shape is not None and tensor.shape != shape:
        raise UnusableWeight(f"{name} has the shape {list(tensor.shape)} instead of {list(shape)}")


def matrix_shape(tensor: CheckpointTensor, name: str) -> tuple[int, int]:
    """The shape of a matrix that is not empty; raises UnusableWeight for any other tensor."""
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        raise UnusableWeight(f"{name} has the shape {list(tensor.shape)}, which is not that of a matrix")
    return tensor.shape[0], tensor.shape[1]


def expect_finite(scales: CheckpointTensor, name: str) -> None:
    """Raise UnusableWeight if one of the scales is not a number or infinite: it would spoil every token."""
    if not bool(scales.read().isfinite().all()):
        raise UnusableWeight(f"{name} has numbers that are not finite; copy the file again")


def whole_number(value: object, name: str, allowed: Iterable[int] | None = None) -> int:
    """A number of a configuration; raises UnusableWeight unless it is an integer, and one of `allowed`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnusableWeight(f"its quantization_config has {name} {value!r:.80}, which is not an integer")
    if allowed is not None and value not in allowed:
        known = ", ".join(str(number) for number in allowed)
        raise UnusableWeight(f"its quantization_config has {name} {value}; Baton reads {known}")
    return value


def group_size(value: object) -> int | None:
    """The size of a group in a configuration; None: the whole row, which configurations write as -1 or null."""
    if value is None or value == -1:
        return None
    size = whole_number(value, "group_size")
    if size < 1:
        raise UnusableWeight(f"its quantization_config has group_size {size}; it must be positive, or -1 for a row")
    return size


def group_of(layer: str, k: int, size: int | None) -> int:
    """The number of elements in a group of rows of k; raises UnusableWeight unless it divides them."""
    group = k if size is None else size
    if k % group:
        raise UnusableWeight(f"{layer} has rows of {k} elements, which groups of {group} don't divide")
    return group


def packed_bytes(shape: tuple[int, int], bits: int, group: int, group_bytes: int) -> int:
    """The size of a packed weight whose groups have `group_bytes` bytes of scales and zeros each."""
    n, k = shape
    return n * k * bits // 8 + n * -(-k // group) * group_bytes


def scale_bytes(scales: CheckpointTensor) -> int:
    """The size of a scale."""
    return 4 if scales.dtype == "F32" else 2


def groups_of(size: int | None) -> str:
    """How descriptions name groups."""
    return "one scale a row" if size is None else f"groups of {size}"


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The integers in words int32 [..., m]: uint8 [..., m * 32 / bits]."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def one_or_each(zeros: torch.Tensor) -> int | torch.Tensor:
    """The codes that mean zero, uint8 [n, G]: as one number where all are equal, which costs no memory."""
    first = int(zeros.flatten()[0])
    return first if bool((zeros == first).all()) else zeros.contiguous()
