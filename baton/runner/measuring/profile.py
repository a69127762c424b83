"""A runner that times each of its operations, for the benchmark that shows how a step's time divides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.runner import ModelRunner, RemotePart
from baton.messages.node_report import RankReport
from baton.runner.backends.operations import Operations
from baton.runner.backends.timed_operations import StepSplit, TimedOperations
from baton.runner.spec import TorchSpec


class TimedRunner:
    """A runner that measures, while `timing` is set, how the time of each step divides."""

    def __init__(self, runner: ModelRunner, stopwatch: TimedOperations) -> None:
        self._runner = runner
        self.model, self.layout, self.memory = runner.model, runner.layout, runner.memory
        self.num_host_blocks = runner.num_host_blocks
        self.adapters, self.encoder = runner.adapters, runner.encoder
        self._stopwatch = stopwatch
        self._step_end = 0.0

    @property
    def timing(self) -> bool:
        return self._stopwatch.timing

    @timing.setter
    def timing(self, value: bool) -> None:
        self._stopwatch.timing = value

    def expect(self, scheduler_output: SchedulerOutput) -> None:
        self._runner.expect(scheduler_output)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, as the runner does."""
        if scheduler_output.is_empty or not self.timing:
            return self._runner.execute_model(scheduler_output)
        self._stopwatch.forget()
        output = self._runner.execute_model(scheduler_output)
        self._step_end = time.perf_counter()
        return output

    @property
    def remote_parts(self) -> Sequence[RemotePart]:
        return self._runner.remote_parts

    def rank_reports(self) -> Sequence[RankReport]:
        return self._runner.rank_reports()

    def on_lost(self, callback: Callable[[str], None]) -> None:
        self._runner.on_lost(callback)

    def close(self) -> None:
        self._runner.close()

    def split(self) -> StepSplit:
        """How the time of the last step divides that computed something. Called after the step has been timed."""
        return self._stopwatch.split(self._step_end)


def load_timed(spec: TorchSpec, *, bit_exact: bool = True) -> TimedRunner:
    """Load a model as `baton.runner.load` does, with timing switched off at first; raises ConfigError.

    Without `bit_exact` the products are torch's own without padding, to measure what bit-exactness costs.
    """
    from baton.runner.backends.kernel_choice import choose_operations
    from baton.runner.loading import load_runner
    from baton.runner.measuring.limits import UnpaddedOperations

    chosen = choose_operations(spec.num_threads)
    stopwatch = TimedOperations(chosen if bit_exact else cast(Operations, UnpaddedOperations(chosen)))
    runner = load_runner(
        spec.model_dir,
        dtype=spec.dtype,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        cache_bytes=spec.cache_bytes,
        cache_dtype=spec.cache_dtype,
        num_threads=spec.num_threads,
        name=spec.name,
        operations=cast(Operations, stopwatch),
        quantization=spec.quantization,
        dequantize=spec.dequantize,
        max_lora_rank=spec.max_lora_rank,
    )
    return TimedRunner(runner, stopwatch)
