"""How many threads torch computes with, where their number would decide bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MOST = 2


def elementwise_threads(num_threads: int) -> int:
    """The number of torch's own threads: one or two, since padding can't keep the shares of three or more aligned."""
    return max(1, min(num_threads, _MOST))


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Let torch compute with so many threads in the body."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
