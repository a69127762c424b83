"""Steps that run when a test wants them to: as soon as they are submitted, or not before their result is needed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

from baton.engine.batch import ModelRunnerOutput
from baton.engine.runner import LazyExecutor, StepExecutor

Ahead = Literal["no", "late", "early"]
"""Whether steps are decided ahead, and when those in flight run: as late or as early as they may."""


class EagerExecutor:
    """Runs a step while it is submitted."""

    def submit(self, execute: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(execute())
        except Exception as error:
            future.set_exception(error)
        return future.result

    def close(self) -> None:
        return


def executor_for(ahead: Ahead) -> StepExecutor | None:
    """What `EngineCore` is to be given."""
    return {"no": None, "late": LazyExecutor(), "early": EagerExecutor()}[ahead]
