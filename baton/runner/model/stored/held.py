"""Finds the plain tensors of a checkpoint that layers can hold as weights in their file, until they are packed.

They are those of linear layers, experts and embeddings. Norms, biases and the routers of mixtures are loaded by
transformers, and so is whatever its loader makes by more than stacking. Plain weights are held for two reasons:

- They are quantised while they are packed (`--quantization`). The head always gets 8 bits: its errors go straight into
  the choice of the next token, and with 4 bits they are seen. Embeddings that share nothing with it, gates of a few
  outputs, and rows that groups do not divide stay as they are.
- A rank reads no more of them than its part. Otherwise transformers' loader would cast, merge or dequantise the weights
  of all ranks and stages before they are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.backends.weight_rows import WeightOnFile
from baton.runner.model.stored.plan import CheckpointNames, expert_parameters, is_linear
from baton.runner.model.stored.quantize import GROUP, Quantization, bits_of, quantized
from baton.runner.model.stored.weight import (
    FLOATS,
    CheckpointTensor,
    StoredWeight,
    UnusableWeight,
    packed_bytes,
)

View: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""From a tensor as it is in its file to the weight [n, k] in it, without a copy."""


@dataclass(frozen=True, slots=True)
class FoundWeight:
    """A weight [n, k] in a plain tensor of a checkpoint."""

    name: str
    """The tensor's name in the checkpoint."""
    key: str
    """The name of the parameter that the tensor becomes, or becomes a part of."""
    tensor: CheckpointTensor
    shape: tuple[int, int]
    view: View


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """The weights that layers hold: those of checkpoints' tensors by name, and those of stacked experts."""

    weights: dict[str, StoredWeight] = field(default_factory=dict)
    experts: dict[str, list[list[StoredWeight]]] = field(default_factory=dict)
    """By the name of the parameter [E, …], which the checkpoint stores in one tensor: one weight for each expert."""
    tensors: set[str] = field(default_factory=set)
    """The names of the tensors that hold them."""


def hold_weights(
    skeleton: Any,
    names: CheckpointNames,
    plain: Mapping[str, CheckpointTensor],
    store: Callable[[FoundWeight], StoredWeight | None],
    *,
    embeddings: bool,
) -> HeldWeights:
    """Store the weights among the `plain` tensors of a checkpoint; those for which `store` returns None are left.

    `skeleton` is the model on the meta device, in the dtype of its rows. `embeddings`: also those that share nothing
    with the head.
    """
    from transformers.pytorch_utils import Conv1D

    held = HeldWeights()
    shared = shared_with_the_head(skeleton, names, plain)
    for name, tensor in plain.items():
        key, pattern = names.parameter_of(name)
        path, _, leaf = key.rpartition(".")
        if key not in names.parameters or tensor.dtype not in FLOATS:
            continue
        part = skeleton.get_submodule(path)
        of_experts = expert_parameters(part)
        if leaf in of_experts and len(tensor.shape) == 3 and pattern is None:
            weights = _stacked(name, key, tensor, transposed=of_experts[leaf])
            stored = [store(one) for one in weights]
            experts = [[one] for one in stored if one is not None]
            if weights and len(experts) == len(weights):
                held.experts[key] = experts
                held.tensors.add(name)
            continue
        # A router that transformers keeps in float32 is loaded by it.
        is_usual = names.parameters[key].dtype == skeleton.dtype
        is_layer = is_linear(part) and leaf == "weight" and pattern is None and is_usual
        is_expert = leaf in of_experts and pattern is not None and names.stacked_patterns(pattern)
        is_embedding = key in shared or (embeddings and type(part) is nn.Embedding)
        if len(tensor.shape) == 2 and (is_layer or is_expert or is_embedding):
            one = store(_matrix(name, key, tensor, transposed=isinstance(part, Conv1D)))
            if one is not None:
                held.weights[name] = one
                held.tensors.add(name)
    return held


def shared_with_the_head(
    skeleton: Any, names: CheckpointNames, plain: Mapping[str, CheckpointTensor]
) -> frozenset[str]:
    """The names of the parameters whose tensor in the checkpoint is also that of a tied one, such as the head's."""
    stored_keys = {names.parameter_of(name)[0] for name in plain}
    ties: Mapping[str, str] = skeleton.all_tied_weights_keys
    return frozenset(source for target, source in ties.items() if target not in stored_keys)


def _matrix(name: str, key: str, tensor: CheckpointTensor, *, transposed: bool) -> FoundWeight:
    rows, columns = tensor.shape
    if transposed:
        return FoundWeight(name, key, tensor, (columns, rows), lambda found: found.T)
    return FoundWeight(name, key, tensor, (rows, columns), lambda found: found)


def _stacked(name: str, key: str, tensor: CheckpointTensor, *, transposed: bool) -> list[FoundWeight]:
    """The weights of all experts in a tensor [E, …]."""
    count, rows, columns = tensor.shape
    shape = (columns, rows) if transposed else (rows, columns)

    def view(expert: int) -> View:
        return lambda tensor_read: tensor_read[expert].T if transposed else tensor_read[expert]

    return [FoundWeight(name, key, tensor, shape, view(expert)) for expert in range(count)]


def weights_on_file(
    skeleton: Any,
    names: CheckpointNames,
    plain: Mapping[str, CheckpointTensor],
    dtype: torch.dtype,
    device: torch.device,
) -> HeldWeights:
    """Leave all `plain` tensors that layers can hold in their file; `skeleton` is the model on the meta device."""

    def store(weight: FoundWeight) -> StoredWeight:
        def rows(first: int, stop: int) -> torch.Tensor:
            return weight.view(weight.tensor.read())[first:stop].to(device, dtype).contiguous()

        return _plain_stored(WeightOnFile(rows, 0, *weight.shape), dtype)

    return hold_weights(skeleton, names, plain, store, embeddings=True)


def dequantized_on_file(stored: StoredWeight, dtype: torch.dtype, device: torch.device) -> StoredWeight:
    """The plain form of a quantised weight, which is dequantised whenever it is read."""

    def rows(first: int, stop: int) -> torch.Tensor:
        return stored.dequantized()[first:stop].to(device, dtype)

    return _plain_stored(WeightOnFile(rows, 0, *stored.shape, reads_all=True), dtype)


def _plain_stored(weight: WeightOnFile, dtype: torch.dtype) -> StoredWeight:
    n, k = weight.shape
    return StoredWeight(weight.shape, lambda: weight, n * k * dtype.itemsize, is_plain=True)


_FEWEST_OUTPUTS = 16
_HEAD_BITS = 8
_SCALE_BYTES = 2


def weights_to_quantize(
    skeleton: Any, names: CheckpointNames, plain: Mapping[str, CheckpointTensor], quantization: Quantization
) -> HeldWeights:
    """Choose among the `plain` tensors of a checkpoint; `skeleton` is the model on the meta device."""
    heads = _heads(skeleton) | shared_with_the_head(skeleton, names, plain)

    def store(to_quantize: FoundWeight) -> StoredWeight | None:
        n, k = to_quantize.shape
        if n < _FEWEST_OUTPUTS or k == 0 or k % GROUP:
            return None
        bits = _HEAD_BITS if to_quantize.key in heads else bits_of(quantization)

        def read() -> QuantizedWeight:
            weight = to_quantize.view(to_quantize.tensor.read())
            try:
                return quantized(weight.contiguous(), bits)
            except UnusableWeight as error:
                raise UnusableWeight(f"{to_quantize.name} {error}") from error

        return StoredWeight(to_quantize.shape, read, packed_bytes(to_quantize.shape, bits, GROUP, _SCALE_BYTES))

    return hold_weights(skeleton, names, plain, store, embeddings=False)


def _heads(skeleton: Any) -> set[str]:
    """The names of the head's weight."""
    head = skeleton.get_output_embeddings()
    return {f"{path}.weight" for path, part in skeleton.named_modules() if part is head and head is not None}
