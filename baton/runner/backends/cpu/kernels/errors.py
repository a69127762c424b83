"""The error for arguments that the kernels can't take."""

from __future__ import annotations

from baton.errors import BatonError


class KernelArgumentError(BatonError):
    """An argument that a kernel can't take; `argument` names it. Raised before any memory is read or written."""

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(f"{argument}: {reason}")
        self.argument = argument
        self.reason = reason
