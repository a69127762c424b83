"""The fakes of `graph_recording.GpuRecorder` and of its graphs, on any device.

A replay computes anew from the buffers into the same result. It overwrites the results of the recorder's other graphs,
since all graphs of a recorder share their memory. While a graph is recorded, operations that a graph can't hold raise
RuntimeError: those that copy a number to the host, or whose result has as many elements as a mask selects. Operations
inside a kernel are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_COPIES_TO_HOST = frozenset({"tolist", "item", "nonzero", "numpy", "cpu", "__bool__", "__int__", "__float__"})
_INDEXING = frozenset({"__getitem__", "__setitem__"})


class _NoCopiesToHost(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _COPIES_TO_HOST or (name in _INDEXING and _selects_by_mask(args[1])):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        return function(*args, **(kwargs or {}))


def _selects_by_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


class FakeGraph:
    """A graph that holds the computation itself, and runs it again at each replay."""

    def __init__(
        self, compute: Callable[[], torch.Tensor], result: torch.Tensor, all_results: list[torch.Tensor]
    ) -> None:
        self._compute = compute
        self._result = result
        self._all_results = all_results

    def replay(self) -> None:
        for result in self._all_results:
            result.fill_(torch.nan)
        with _NoCopiesToHost():
            computed = self._compute()
        self._result.copy_(computed)


class FakeRecorder:
    """The fake of a recorder; see `graph_recording.Record`. As on a GPU, a result is not valid before the first replay
    of its graph."""

    def __init__(self) -> None:
        self._results: list[torch.Tensor] = []

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[FakeGraph, torch.Tensor]:
        with _NoCopiesToHost():
            result = torch.full_like(compute(), torch.nan)
        self._results.append(result)
        return FakeGraph(compute, result, self._results), result
