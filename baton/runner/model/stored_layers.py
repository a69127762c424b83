"""Stands for the linear layers, embeddings and experts of a model whose weights stay in their files until packed.

The weights are quantised ones, and plain ones that a rank packs a part of. While recognition (recognition.py) compares
what parts compute, a linear layer computes with a quantised weight as operations do, so that both sides round alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional

from baton.runner.backends.quantized_product import narrow_product
from baton.runner.backends.quantized_weight import NarrowWeight
from baton.runner.backends.weight_on_file import WeightOnFile
from baton.runner.backends.weight_rows import Weight, rows_of
from baton.runner.model.quantization.stored_weight import StoredWeight


class StoredLinear(nn.Linear):
    """A linear layer whose weight is read, and dequantised, whenever `weight` is asked for."""

    def __init__(
        self, stored: StoredWeight, bias: nn.Parameter | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate a weight
        self.out_features, self.in_features = stored.shape
        self.register_parameter("bias", bias)
        self.stored = stored
        self.dtype = dtype
        self.device = device
        self._held: NarrowWeight | WeightOnFile | None = None
        # transformers would otherwise fill the weight with random numbers.
        self._is_hf_initialized = True

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight as plain numbers: [n, k] in the model's dtype."""
        return _plain(self.held(), self.dtype)

    def held(self) -> NarrowWeight | WeightOnFile:
        """The weight as its file has it: a quantised one stays in memory until `forget`, a plain one in the file."""
        if self._held is None:
            self._held = read_packed(self.stored)
        return self._held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product of x [..., k] and the weight transposed, plus the bias: [..., n]."""
        held = self.held()
        if isinstance(held, WeightOnFile):
            return functional.linear(x, held.read(), self.bias)
        sums = narrow_product(x.reshape(-1, self.in_features), held)
        if self.bias is not None:
            sums = sums + self.bias.float()
        return sums.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def forget(self) -> None:
        """Free the weight; it is read again when it is needed."""
        self._held = None


class StoredEmbedding(nn.Module):
    """An embedding whose weight is in its file. `replace_products` replaces it before it is called."""

    def __init__(self, stored: StoredWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.stored = stored
        self.dtype = dtype
        self._is_hf_initialized = True


ExpertWeights: TypeAlias = Mapping[str, Sequence[Sequence[StoredWeight]]]
"""The weights of an experts module by the name of the parameter that they stand for: for every expert those that are
stacked over their outputs (gate and up, or one)."""


def hold_experts(module: nn.Module, weights: ExpertWeights) -> None:
    """Take the parameters that these weights replace away from an experts module, and give it the weights."""
    for name in weights:
        delattr(module, name)
    object.__setattr__(module, "stored_experts", weights)
    object.__setattr__(module, "_is_hf_initialized", True)


def held_experts(module: nn.Module) -> ExpertWeights:
    """The weights of an experts module that are in their files; empty if it has none."""
    held: ExpertWeights = getattr(module, "stored_experts", {})
    return held


def read_packed(stored: StoredWeight) -> NarrowWeight | WeightOnFile:
    """Read a weight that can be packed as it is; a plain one stays in its file."""
    weight = stored.read()
    if isinstance(weight, torch.Tensor):
        raise TypeError("a weight that has no packed form must be loaded as a plain tensor")
    return weight


def _plain(weight: NarrowWeight | WeightOnFile, dtype: torch.dtype) -> torch.Tensor:
    return weight.read() if isinstance(weight, WeightOnFile) else weight.dequantized(dtype)


def weight_of(linear: nn.Linear) -> Weight:
    """The weight of a linear layer as operations pack it: with its scales if it is quantised."""
    return linear.held() if isinstance(linear, StoredLinear) else linear.weight


def halves_of(weight: Weight) -> tuple[Weight, Weight]:
    """The first and the second half of a weight's outputs."""
    half = weight.shape[0] // 2
    return rows_of(weight, 0, half), rows_of(weight, half, 2 * half)


def forget_weights(module: nn.Module) -> None:
    """Free the quantised weights that the layers in a module have read."""
    for part in module.modules():
        if isinstance(part, StoredLinear):
            part.forget()


def widths_of(module: nn.Module) -> set[int]:
    """The widths of the rows that the weights of a module take and give, as far as they are in their files."""
    shapes = [part.stored.shape for part in module.modules() if isinstance(part, StoredLinear | StoredEmbedding)]
    for part in module.modules():
        shapes += [stored.shape for experts in held_experts(part).values() for expert in experts for stored in expert]
    return {width for shape in shapes for width in shape}
