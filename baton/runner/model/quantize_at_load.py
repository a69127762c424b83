"""Chooses which plain weights of a checkpoint are quantised while it is loaded (`--quantization`).

Linear layers, experts, and an embedding that is also the head are. The head always gets 8 bits: its errors go straight
into the choice of the next token, and with 4 bits they are seen. Norms, biases, embeddings that share nothing, the
routers of mixtures, gates of a few outputs, and rows that groups do not divide stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from baton.runner.backends.quantized_weight import QuantizedWeight
from baton.runner.model.checkpoint_names import CheckpointNames
from baton.runner.model.quantization.quantize import GROUP, Quantization, bits_of, quantized
from baton.runner.model.quantization.stored_weight import (
    FLOATS,
    CheckpointTensor,
    StoredWeight,
    UnusableWeight,
    packed_bytes,
)
from baton.runner.model.weight_plan import is_experts

_FEWEST_OUTPUTS = 16
_HEAD_BITS = 8
_SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class QuantizedAtLoad:
    """The weights that are quantised: those of checkpoints' tensors by name, and those of stacked experts."""

    weights: dict[str, StoredWeight] = field(default_factory=dict)
    experts: dict[str, list[list[StoredWeight]]] = field(default_factory=dict)
    """By the name of the parameter [E, …], which the checkpoint stores in one tensor: one weight for each expert."""
    tensors: set[str] = field(default_factory=set)
    """The names of the tensors that are quantised."""


def weights_to_quantize(
    skeleton: Any, names: CheckpointNames, plain: Mapping[str, CheckpointTensor], quantization: Quantization
) -> QuantizedAtLoad:
    """Choose among the `plain` tensors of a checkpoint; `skeleton` is the model on the meta device."""
    from transformers.pytorch_utils import Conv1D

    chosen = QuantizedAtLoad()
    heads = _heads(skeleton)
    stored_keys = {names.parameter_of(name)[0] for name in plain}
    shared = {source for target, source in skeleton.all_tied_weights_keys.items() if target not in stored_keys}
    for name, tensor in plain.items():
        key, pattern = names.parameter_of(name)
        path, _, leaf = key.rpartition(".")
        if key not in names.parameters or tensor.dtype not in FLOATS:
            continue
        part = skeleton.get_submodule(path)
        bits = _HEAD_BITS if path in heads or key in shared else bits_of(quantization)
        if is_experts(part) and len(tensor.shape) == 3 and pattern is None:
            experts = _stacked(name, tensor, bits, transposed=bool(part.is_transposed))
            if experts:
                chosen.experts[key] = experts
                chosen.tensors.add(name)
            continue
        is_linear = isinstance(part, nn.Linear | Conv1D) and leaf == "weight" and pattern is None
        is_expert = is_experts(part) and pattern is not None and names.stacked_patterns(pattern)
        if len(tensor.shape) == 2 and (is_linear or is_expert or key in shared):
            stored = _stored(name, tensor, bits, transposed=isinstance(part, Conv1D))
            if stored is not None:
                chosen.weights[name] = stored
                chosen.tensors.add(name)
    return chosen


def _heads(skeleton: Any) -> set[str]:
    head = skeleton.get_output_embeddings()
    return {path for path, part in skeleton.named_modules() if part is head and head is not None}


def _fits(n: int, k: int) -> bool:
    return n >= _FEWEST_OUTPUTS and k > 0 and k % GROUP == 0


def _size(shape: tuple[int, int], bits: int) -> int:
    return packed_bytes(shape, bits, GROUP, _SCALE_BYTES)


def _stored(name: str, tensor: CheckpointTensor, bits: int, *, transposed: bool) -> StoredWeight | None:
    rows, columns = tensor.shape
    n, k = (columns, rows) if transposed else (rows, columns)
    if not _fits(n, k):
        return None

    def read() -> QuantizedWeight:
        weight = tensor.read()
        return _named(name, weight.T if transposed else weight, bits)

    return StoredWeight((n, k), read, _size((n, k), bits))


def _stacked(name: str, tensor: CheckpointTensor, bits: int, *, transposed: bool) -> list[list[StoredWeight]]:
    """The weights of all experts; empty if they stay plain."""
    count, rows, columns = tensor.shape
    n, k = (columns, rows) if transposed else (rows, columns)
    if not _fits(n, k):
        return []

    def read(expert: int) -> QuantizedWeight:
        weight = tensor.read()[expert]
        return _named(name, weight.T if transposed else weight, bits)

    return [[StoredWeight((n, k), partial(read, expert), _size((n, k), bits))] for expert in range(count)]


def _named(name: str, weight: torch.Tensor, bits: int) -> QuantizedWeight:
    try:
        return quantized(weight.contiguous(), bits)
    except UnusableWeight as error:
        raise UnusableWeight(f"{name} {error}") from error
