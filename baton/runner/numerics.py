"""Names everything that decides the bits of a model's results, beside its files."""

from __future__ import annotations

import torch

from baton.engine.runner import KVLayout
from baton.runner.backends.operations import Operations


def numerics_of(treatment: str, operations: Operations, layout: KVLayout) -> str:
    """A name for everything that decides the bits, beside the files of the model.

    `treatment`: what was made of the weights (`ModelWeights`). Operations may name more once a step was computed.
    """
    numerics = f"{operations.numerics()}/torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}"
    if treatment:
        numerics += f"/{treatment}"
    if layout.has_scales:
        # A stream must not move between decode nodes whose caches round differently.
        numerics += f"/kv-{layout.dtype}"
    return numerics
