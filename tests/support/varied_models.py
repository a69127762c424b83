"""Tiny random models whose every tensor varies, so that a mechanism that initial values switch off is computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from baton.runner.model.random_model import write_random_model


def write_varied_model(directory: Path, config: Mapping[str, Any], seed: int) -> None:
    """Write a random model as `write_random_model` does, with noise of 0.25 in all tensors that hold one number alone:
    norms, biases, gates and scales."""
    write_random_model(directory, config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.numel() and tensor.float().std(unbiased=False) == 0:
                noise = 0.25 * torch.randn(tensor.shape, generator=generator)
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
