"""The errors of the kernels: arguments that they can't take, and ranks that are lost."""

from __future__ import annotations

from baton.engine.runner import RunnerLost
from baton.errors import BatonError


class KernelArgumentError(BatonError):
    """An argument that a kernel can't take; `argument` names it. Raised before any memory is read or written."""

    def __init__(self, argument: str, reason: str) -> None:
        super().__init__(f"{argument}: {reason}")
        self.argument = argument
        self.reason = reason


class RankLost(RunnerLost):
    """Another rank of the model has ended, hangs or computes something else: the step is void, and the node ends."""
