"""Writes adapters of random numbers as PEFT writes them, for benchmarks and tests; without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.model_formats.adapters import CONFIG_NAME, WEIGHTS_NAME

PREFIX = "base_model.model."

Tensors = Mapping[str, npt.NDArray[Any]]


def lora_tensors(
    modules: Mapping[str, tuple[int, int]], rank: int = 4, seed: int = 0, scale: float = 1.0
) -> dict[str, npt.NDArray[np.float32]]:
    """Random tensors A and B for modules, by names, each with its numbers of outputs and inputs."""
    random = np.random.default_rng(seed)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for module, (outputs, inputs) in modules.items():
        a = random.standard_normal((rank, inputs), dtype=np.float32)
        b = random.standard_normal((outputs, rank), dtype=np.float32)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a * np.float32(scale)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b * np.float32(scale)
    return tensors


def write_adapter(directory: Path, tensors: Tensors, rank: int = 4, **settings: object) -> Path:
    """Write an adapter's two files; `settings` go over those of a plain LoRA adapter. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **settings}
    (directory / CONFIG_NAME).write_text(json.dumps(config), encoding="utf-8")
    (directory / WEIGHTS_NAME).write_bytes(safetensors_bytes(tensors))
    return directory


def safetensors_bytes(tensors: Tensors) -> bytes:
    """The content of a safetensors file with these tensors."""
    names = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}
    header: dict[str, object] = {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": names.get(tensor.dtype, "I64"),
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensor.tobytes() for tensor in tensors.values())
