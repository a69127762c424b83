"""Stage `micro`: single operations of a step: products, attention, norms, the sampler, digests of blocks.

Kernels are timed as replays of a graph, after the GPU's cache was overwritten.
"""

from __future__ import annotations

import torch

from gpu.micro import attention, host_work, norms, products, sampling
from gpu.stage import StageContext

SECONDS = 60


def run(context: StageContext) -> None:
    """Run the stage, the parts of a few seconds first."""
    with torch.inference_mode():
        host_work.measure_digests(context)
        sampling.measure(context)
        norms.measure(context)
        attention.measure(context)
        products.measure(context)
