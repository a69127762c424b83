"""What is said of a kernel that fails when it is tried."""

from __future__ import annotations

import torch


def why_failed(error: Exception) -> str:
    """What operators are told of an exception of Triton's compiler or of the driver, whose kernel is then given up.

    Raises an OutOfMemoryError again: memory may be free later, and what a node computes with must not depend on that.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    return f"Triton's kernel fails with {type(error).__name__} ({(str(error).splitlines() or [''])[0]:.200})"
