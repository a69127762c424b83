"""Step executors that run a step as soon as it is submitted, or only when its result is needed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

from baton.engine.batch import ModelRunnerOutput
from baton.engine.runner import LazyExecutor, StepExecutor

Ahead = Literal["no", "late", "early"]
"""Asynchronous scheduling: off ("no"), or on with steps in flight that run as late or as early as they may."""


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
    """Return the executor to be passed to `EngineCore`; None: synchronous scheduling."""
    return {"no": None, "late": LazyExecutor(), "early": EagerExecutor()}[ahead]
