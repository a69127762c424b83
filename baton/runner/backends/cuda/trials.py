"""What all trials of kernels have in common: when a result is right, and what is said of a kernel that fails."""

from __future__ import annotations

import torch

_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2}


def why_failed(error: Exception) -> str:
    """What operators are told of an exception of Triton's compiler or of the driver, whose kernel is then given up.

    Raises an OutOfMemoryError again: memory may be free later, and what a node computes with must not depend on that.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    return f"Triton's kernel fails with {type(error).__name__} ({(str(error).splitlines() or [''])[0]:.200})"


def is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results of one dtype differ by roundings alone."""
    tolerance = _TOLERANCE[one.dtype]
    return torch.allclose(one.float(), other.float(), atol=tolerance, rtol=tolerance)
