"""Recording a computation on a GPU, to be started as one later (CUDA graphs)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """A recorded computation."""

    def replay(self) -> None:
        """Run it again, on what is in its buffers by now."""
        ...


Record = Callable[[Callable[[], torch.Tensor]], tuple[Graph, torch.Tensor]]
"""Records a computation; the tensor is where every replay puts its result. Raises RuntimeError for one that asks the
device for anything. `record_on_gpu` and, beside it, `graph_fake.record_fake`."""


def record_on_gpu(compute: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
    """On the current device. What other threads do there meanwhile is not recorded."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        compute()  # libraries choose their kernels and make their workspaces, which a recording can't
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = compute()
    return graph, result
