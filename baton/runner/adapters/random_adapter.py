"""Writes adapters of random numbers for benchmarks and tests, as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from baton.model_formats.adapters import CONFIG_NAME, WEIGHTS_NAME


def write_random_adapter(directory: Path, modules: Mapping[str, tuple[int, int]], rank: int, seed: int) -> None:
    """Write an adapter of one rank for modules, by names, each with its numbers of outputs and inputs."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in modules.items():
        for name, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            numbers = torch.randn(shape, generator=generator) * 0.02
            tensors[f"base_model.model.{module}.{name}.weight"] = numbers.bfloat16()
    targets = sorted({module.rpartition(".")[2] for module in modules})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / WEIGHTS_NAME)
