"""Random models of which no tensor is constant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from baton.runner.model.random_model import write_random_model

_SPREAD, _SPREAD_OF_ZEROS = 0.25, 0.1
"""The standard deviations of what is added to constant tensors. With larger biases all tokens would be alike."""


def write_varied_model(directory: Path, config: Mapping[str, Any], seed: int) -> None:
    """Write a random model, and make its constant tensors random: norms, biases, gates, sinks.

    With their first values, 0 or 1, a part that leaves them out would compute the same.
    """
    write_random_model(directory, config, seed)
    generator = torch.Generator().manual_seed(seed)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.numel() and tensor.min() == tensor.max():
                spread = _SPREAD if tensor.any() else _SPREAD_OF_ZEROS
                tensors[name] = tensor + spread * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, file, metadata={"format": "pt"})
