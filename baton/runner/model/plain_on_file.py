"""Leaves plain weights in their files until they are packed, so that a rank reads no more of them than its part.

Otherwise transformers' loader would cast, merge or dequantise the weights of all ranks and stages before they are
divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from baton.runner.backends.weight_rows import WeightOnFile
from baton.runner.model.checkpoint_names import CheckpointNames
from baton.runner.model.held_weights import FoundWeight, HeldWeights, hold_weights
from baton.runner.model.quantization.stored_weight import CheckpointTensor, StoredWeight


def weights_on_file(
    skeleton: Any,
    names: CheckpointNames,
    plain: Mapping[str, CheckpointTensor],
    dtype: torch.dtype,
    device: torch.device,
) -> HeldWeights:
    """Leave all `plain` tensors that layers can hold in their file; `skeleton` is the model on the meta device."""

    def store(found: FoundWeight) -> StoredWeight:
        def rows(first: int, stop: int) -> torch.Tensor:
            return found.view(found.tensor.read())[first:stop].to(device, dtype).contiguous()

        return _stored(WeightOnFile(rows, 0, *found.shape), dtype)

    return hold_weights(skeleton, names, plain, store, embeddings=True)


def dequantized_on_file(stored: StoredWeight, dtype: torch.dtype, device: torch.device) -> StoredWeight:
    """The plain form of a quantised weight, which is dequantised whenever it is read."""

    def rows(first: int, stop: int) -> torch.Tensor:
        return stored.dequantized()[first:stop].to(device, dtype)

    return _stored(WeightOnFile(rows, 0, *stored.shape, reads_all=True), dtype)


def _stored(weight: WeightOnFile, dtype: torch.dtype) -> StoredWeight:
    n, k = weight.shape
    return StoredWeight(weight.shape, lambda: weight, n * k * dtype.itemsize, is_plain=True)
