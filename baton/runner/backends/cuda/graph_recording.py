"""Records a computation on a GPU, so that all its kernels can be started in one call later (CUDA graphs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """A recorded computation."""

    def replay(self) -> None:
        """Run the computation again on the present content of its buffers."""
        ...


Record = Callable[[Callable[[], torch.Tensor]], tuple[Graph, torch.Tensor]]
"""Records a computation, and returns the graph and the tensor to which every replay writes its result.

The result is valid until the next replay of any graph of the recorder. Raises RuntimeError for a computation that reads
from the device. Implemented by `GpuRecorder` and, for tests, by `tests.doubles.fake_graph.FakeRecorder`."""


class GpuRecorder:
    """Records on the current device. All graphs of a recorder share one memory pool, since no two run at the same time:
    the pool grows to what the largest graph needs, not to the sum."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Record a computation, see `Record`. Work of other threads on the device is not recorded."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            compute()  # a first run, in which libraries choose kernels and allocate workspaces: a recording can't
        torch.cuda.current_stream().wait_stream(aside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        return graph, result
