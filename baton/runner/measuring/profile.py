"""A runner that times each of its operations, for the benchmark that shows how a step's time divides."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, cast

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.runner.backends.kernel_choice import choose_operations
from baton.runner.backends.operations import Operations
from baton.runner.backends.timed_operations import StepSplit, TimedOperations
from baton.runner.loading import load_runner
from baton.runner.measuring.limits import UnpaddedOperations
from baton.runner.model_runner import TorchModelRunner
from baton.runner.spec import TorchSpec


class TimedRunner(TorchModelRunner):
    """A runner that measures, while `timing` is set, how the time of each step divides."""

    def __init__(self, stopwatch: TimedOperations, *arguments: Any, **named: Any) -> None:
        """`arguments`, `named`: those of any other runner."""
        super().__init__(*arguments, **named)
        self._stopwatch = stopwatch
        self._step_end = 0.0

    @property
    def timing(self) -> bool:
        return self._stopwatch.timing

    @timing.setter
    def timing(self, value: bool) -> None:
        self._stopwatch.timing = value

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if scheduler_output.is_empty or not self.timing:
            return super().execute_model(scheduler_output)
        self._stopwatch.forget()
        output = super().execute_model(scheduler_output)
        self._step_end = time.perf_counter()
        return output

    def split(self) -> StepSplit:
        """How the time of the last step divides that computed something. Called after the step has been timed."""
        return self._stopwatch.split(self._step_end)


def load_timed(spec: TorchSpec, *, bit_exact: bool = True) -> TimedRunner:
    """Load a model as `baton.runner.load` does, with timing switched off at first; raises ConfigError.

    Without `bit_exact` the products are torch's own without padding, to measure what bit-exactness costs.
    """
    chosen = choose_operations(spec.num_threads)
    stopwatch = TimedOperations(chosen if bit_exact else cast(Operations, UnpaddedOperations(chosen)))
    operations, make_runner = cast(Operations, stopwatch), partial(TimedRunner, stopwatch)
    runner = load_runner(spec, operations=operations, make_runner=make_runner)
    assert isinstance(runner, TimedRunner)
    return runner
