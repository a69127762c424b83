"""Names everything that decides the bits of a model's results, beside its files."""

from __future__ import annotations

import torch

from baton.runner.backends.operations import Operations
from baton.runner.model.transformer import Transformer
from baton.runner.model.weights import LoadedModel


def numerics_of(loaded: LoadedModel, operations: Operations, transformer: Transformer) -> str:
    """A name for everything that decides the bits, beside the files of the model."""
    numerics = f"{operations.numerics()}/torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    if loaded.weights.treatment:
        numerics += f"/{loaded.weights.treatment}"
    if transformer.layout.has_scales:
        # A stream must not move between decode nodes whose caches round differently.
        numerics += f"/kv-{transformer.layout.dtype}"
    return numerics
