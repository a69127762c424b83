"""The fake of `triton_attention.triton_attention`, in plain torch on any device: each row by itself."""

from __future__ import annotations

from typing import Any

import torch

from baton.runner.backends.torch_operations import TorchOperations

_plain = TorchOperations(num_threads=1)


def fake_paged_attention(*arguments: Any, **keywords: Any) -> torch.Tensor:
    """Compute `Operations.paged_attention`."""
    # Operations inside a kernel are exempt from the checks of a graph that is being recorded (fake_graph.py).
    with torch._C.DisableTorchFunction():
        return _plain.paged_attention(*arguments, **keywords)
