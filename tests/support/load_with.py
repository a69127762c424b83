"""Loads models for tests whose parameters say in one dictionary what to load, and with what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from baton.runner.backends.cuda.cuda_operations import CudaOperations
from baton.runner.backends.cuda.kernels import Kernels
from baton.runner.backends.device import CPU
from baton.runner.loading import load_runner
from baton.runner.model.random_model import write_random_model
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec
from tests.doubles.fake_attention import fake_paged_attention
from tests.support.tiny_models import TINY_MODELS

_OF_SPEC = {field.name for field in fields(TorchSpec)}


def load_with(directory: Path, **how: Any) -> TorchModelRunner:
    """Load a model directory; `how`: fields of `TorchSpec`, and arguments of `load_runner`."""
    spec = TorchSpec(directory, **{name: value for name, value in how.items() if name in _OF_SPEC})
    return load_runner(spec, **{name: value for name, value in how.items() if name not in _OF_SPEC})


def load_tiny(
    directory: Path, architecture: str, *, seed: int = 0, config: Mapping[str, Any] | None = None, **how: Any
) -> TorchModelRunner:
    """Write a tiny random model, with these changes of its configuration, and load it, in float32 by default."""
    write_random_model(directory, {**TINY_MODELS[architecture], **(config or {})}, seed)
    return load_with(directory, **{"dtype": "float32", "num_blocks": 64, **how})


def load_as_on_a_gpu(
    directory: Path, attend: Callable[..., torch.Tensor] = fake_paged_attention, record: Any = None, **how: Any
) -> TorchModelRunner:
    """Load a model directory in float32 with the operations of a GPU around a fake kernel.

    `record`: of CUDA graphs. `how`: other kernels by their names in `Kernels`.
    """
    operations = CudaOperations(CPU, Kernels(attend, **how), record)
    return load_with(directory, dtype="float32", num_blocks=64, operations=operations)
