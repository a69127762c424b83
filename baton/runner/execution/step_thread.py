"""The thread on which a runner executes its steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from baton.engine.batch import ModelRunnerOutput


class StepThread:
    """A `StepExecutor` with one thread, which lives from the first step to `close`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="baton-runner")

    def submit(self, execute: Callable[[], ModelRunnerOutput]) -> Callable[[], ModelRunnerOutput]:
        return self._pool.submit(execute).result

    def close(self) -> None:
        self._pool.shutdown()
