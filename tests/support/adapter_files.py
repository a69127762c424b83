"""Adapter directories as PEFT writes them, sound or with one fault."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.bench.micro.adapters import PREFIX, lora_tensors, safetensors_bytes, write_adapter

__all__ = ["PREFIX", "expert_tensors", "lora_tensors", "safetensors_bytes", "write_adapter", "write_simple_adapter"]


def write_simple_adapter(directory: Path, seed: int = 0) -> Path:
    """Write an adapter that any seed makes another one, for runners that don't look at its modules."""
    return write_adapter(directory, lora_tensors({"model.layers.0.self_attn.q_proj": (8, 8)}, seed=seed))


def expert_tensors(
    module: str, shapes: Sequence[tuple[int, int]], num_experts: int, rank: int = 4, seed: int = 0, scale: float = 1.0
) -> dict[str, npt.NDArray[np.float32]]:
    """Random tensors A and B for the parameters of a mixture's experts, stacked and named as PEFT's `ParamWrapper` has
    them.

    `shapes`: of each parameter, in the module's order, the numbers of outputs and inputs of one expert.
    """
    random = np.random.default_rng(seed)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for depth, (outputs, inputs) in enumerate(reversed(shapes)):
        name = f"{PREFIX}{module}" + depth * ".base_layer"
        for part, shape in (("A", (rank * num_experts, inputs)), ("B", (outputs, rank * num_experts))):
            tensors[f"{name}.lora_{part}.weight"] = random.standard_normal(shape, dtype=np.float32) * np.float32(scale)
    return tensors
