"""Operations that measure the time of each call, for benchmarks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from baton.runner.backends.cpu.kernels import Program
from baton.runner.backends.operations import Operations

_AT_LOAD = frozenset({"numerics", "pack", "pack_gated", "pack_heads", "pack_mixture", "pack_choice", "adapt"})
"""Operations that are called while a model is loaded, and never in a step."""

_ATTENTION = frozenset({"paged_attention", "select_keys", "store_kv", "convolve", "recur"})

_PRODUCTS = frozenset({"linear", "gated_linear", "linear_of_heads", "mix_experts", "multiply_chosen"})


@dataclass(frozen=True, slots=True)
class StepSplit:
    """The seconds of one step by kind of operation. The rest of a step's time is Python and torch's small functions."""

    attention: float
    """Storing keys and values in the cache, and attention; convolutions and recurrences with states."""
    products: float
    elementwise: float
    """Norms, rotary embeddings and all other operations."""
    sampling: float
    """From the end of the last operation to the runner's return: logits to float32, sampling, bookkeeping."""


class TimedOperations:
    """Wraps another implementation of the operations and adds up the time of each call while `timing` is set.

    All attributes are looked up in the wrapped one, which may have more operations than the protocol.
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
        # Stored as an attribute, so that the next look-up does not call __getattr__.
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
        """A program of the wrapped operations, which measures its own operations while `timing` is set."""
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

    def forget(self) -> None:
        """Forget what was measured so far, as a step begins."""
        self._seconds.clear()
        for program in self._programs:
            program.forget_times()

    def split(self, step_end: float) -> StepSplit:
        """The times since `forget`, for a step from which the runner returned at `step_end` (perf_counter)."""
        seconds = self._seconds.copy()
        for program in self._programs:
            self._last_end = max(self._last_end, program.timed_until)
            for name, taken in program.seconds().items():
                seconds[name] += taken
        attention = sum(seconds[name] for name in _ATTENTION)
        products = sum(seconds[name] for name in _PRODUCTS)
        return StepSplit(
            attention=attention,
            products=products,
            elementwise=sum(seconds.values()) - attention - products,
            sampling=step_end - self._last_end if self._last_end else 0.0,
        )
