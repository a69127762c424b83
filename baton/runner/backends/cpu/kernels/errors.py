"""What can go wrong with the kernels."""

from __future__ import annotations

from baton.errors import BatonError


class KernelArgumentError(BatonError):
    """A tensor that a kernel can't take; `argument` names it. Raised before any memory is touched."""

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(f"{argument}: {reason}")
        self.argument = argument
        self.reason = reason
