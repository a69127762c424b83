"""Where a step's time goes: the operations of a runner with a stopwatch around each, for the benchmark alone."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from baton.engine.batch import ModelRunnerOutput, SchedulerOutput
from baton.engine.runner import KVLayout, KVMemory, ModelInfo, ModelRunner
from baton.runner.backends.cpu.kernels import Program
from baton.runner.backends.operations import Operations
from baton.runner.spec import TorchSpec

_AT_LOAD = frozenset({"numerics", "pack", "pack_gated"})
"""What a step never calls."""
_ATTENTION = frozenset({"paged_attention", "store_kv"})
_PRODUCTS = frozenset({"linear", "gated_linear"})


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Seconds of one step. What is left of the step's whole time is Python and torch's own small functions."""

    attention: float
    """Storing keys and values, and attending."""
    products: float
    elementwise: float
    """Norms, rotary embeddings and other operations that are neither."""
    sampling: float
    """From the end of the last operation to the runner's return: logits to float32, sampling, bookkeeping."""


class TimedOperations:
    """Stands for another implementation of the operations and adds up how long each call took while `timing`.

    Calls go to whatever the other one has, so that it may have more of them than this file knows.
    """

    def __init__(self, inner: Operations) -> None:
        self._inner = inner
        self._timing = False
        self._seconds: dict[str, float] = defaultdict(float)
        self._last_end = 0.0
        self._programs: list[Program] = []

    @property
    def timed(self) -> Operations:
        """The operations that are timed."""
        return self._inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in _AT_LOAD or not callable(method):
            return method
        timed = self._timed(name, method)
        # The next look-up finds it without coming here.
        setattr(self, name, timed)
        return timed

    @property
    def timing(self) -> bool:
        return self._timing

    @timing.setter
    def timing(self, value: bool) -> None:
        self._timing = value
        for program in self._programs:
            program.timing = value

    def program(self, dtype: torch.dtype) -> Program | None:
        """The other's, which has its own stopwatch."""
        program = self._inner.program(dtype)
        if program is not None:
            self._programs.append(program)
        return program

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not self.timing:
                return method(*arguments, **keywords)
            started = time.perf_counter()
            result = method(*arguments, **keywords)
            self._last_end = time.perf_counter()
            self._seconds[name] += self._last_end - started
            return result

        return call

    def take(self, step_end: float) -> StepSplit:
        """The times since the last `take`, for a step that the runner returned from at `step_end` (perf_counter)."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        for program in self._programs:
            self._last_end = max(self._last_end, program.timed_until)
            for name, taken in program.take_seconds().items():
                seconds[name] += taken
        attention = sum(seconds[name] for name in _ATTENTION)
        products = sum(seconds[name] for name in _PRODUCTS)
        return StepSplit(
            attention=attention,
            products=products,
            elementwise=sum(seconds.values()) - attention - products,
            sampling=step_end - self._last_end if self._last_end else 0.0,
        )


class TimedRunner:
    """A runner that keeps, while `timing`, where the time of each of its steps went."""

    def __init__(self, runner: ModelRunner, stopwatch: TimedOperations) -> None:
        self._runner = runner
        self._stopwatch = stopwatch
        self.splits: list[StepSplit] = []
        """Of every step since the timing was switched on."""

    @property
    def model(self) -> ModelInfo:
        return self._runner.model

    @property
    def layout(self) -> KVLayout:
        return self._runner.layout

    @property
    def memory(self) -> KVMemory:
        return self._runner.memory

    @property
    def num_host_blocks(self) -> int:
        return self._runner.num_host_blocks

    @property
    def timing(self) -> bool:
        return self._stopwatch.timing

    @timing.setter
    def timing(self, value: bool) -> None:
        self._stopwatch.timing = value
        self.splits = []

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, as the runner does."""
        output = self._runner.execute_model(scheduler_output)
        if self._stopwatch.timing:
            self.splits.append(self._stopwatch.take(time.perf_counter()))
        return output


def load_timed(spec: TorchSpec, *, bit_exact: bool = True) -> TimedRunner:
    """Load like `load`, with a stopwatch that starts switched off; raises ConfigError.

    Without `bit_exact` the products are torch's own, on just the rows that there are: a model that is good for
    measuring what the rule costs, and for nothing else.
    """
    from baton.runner.backends.kernel_choice import choose_operations
    from baton.runner.measuring.limits import UnpaddedOperations
    from baton.runner.model_runner import load_runner

    chosen = choose_operations(spec.num_threads)
    stopwatch = TimedOperations(chosen if bit_exact else cast(Operations, UnpaddedOperations(chosen)))
    runner = load_runner(
        spec.model_dir,
        dtype=spec.dtype,
        block_size=spec.block_size,
        num_blocks=spec.num_blocks,
        cache_bytes=spec.cache_bytes,
        num_threads=spec.num_threads,
        name=spec.name,
        operations=cast(Operations, stopwatch),
    )
    return TimedRunner(runner, stopwatch)
