"""Recording a computation on a GPU, to be started as one later (CUDA graphs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """A recorded computation."""

    def replay(self) -> None:
        """Run it again, on what is in its buffers by now."""
        ...


Record = Callable[[Callable[[], torch.Tensor]], tuple[Graph, torch.Tensor]]
"""Records a computation; the tensor is where every replay puts its result, valid until the recorder's next replay,
whichever graph's that is. Raises RuntimeError for one that asks the device for anything. `GpuRecorder` and, beside it,
`baton.testing.fake_graph.FakeRecorder`."""


class GpuRecorder:
    """Records on the current device. All graphs of a recorder compute in one pool of memory: it grows to what the
    largest needs, not to the sum, since no two run at once."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """See `Record`. What other threads do on the device meanwhile is not recorded."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            compute()  # libraries choose their kernels and make their workspaces, which a recording can't
        torch.cuda.current_stream().wait_stream(aside)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        return graph, result
