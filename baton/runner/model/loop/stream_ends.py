"""What a model with rows in several streams does before its layers and behind them.

Streams are side by side in wide rows (fused/streams.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.model.fused.streams import stream_of
from baton.runner.model.layers import PackedLinear

_LEAST = 1e-5
"""What the mean square of a stream is at least, by whose root it is divided."""


class SpreadStreams(nn.Module):
    """The rows of the embedding, and beside them products with them, as large as they are."""

    def __init__(self, products: Sequence[PackedLinear]) -> None:
        super().__init__()
        self._products = products  # no modules of this part: the model has them
        self.num_inputs = products[0].in_features

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N] to [T, S * N]"""
        resize = self._products[0].operations.resize
        return torch.cat([x, *(resize(by.rows(x), x, _LEAST) for by in self._products)], dim=-1)

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes."""
        out = program.scratch(into, (1 + len(self._products)) * x.width, sampled=x.sampled)
        program.copy_columns(x, out, width=x.width)
        for place, by in enumerate(self._products, start=1):
            own = by.record(program, x, into=f"product of stream {place}")
            program.resize(own, x, _LEAST, stream_of(out, 1 + len(self._products), place))
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, T, N] to [1, T, S * N]"""
        return self.rows(x[0].contiguous())[None]


class MergedStreams(nn.Module):
    """The mean of the first stream and of products with the others, as large as the first one."""

    def __init__(self, products: Sequence[PackedLinear]) -> None:
        super().__init__()
        self._products = products
        self._num_streams = 1 + len(products)
        self.num_inputs = self._num_streams * products[0].in_features

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, S * N] to [T, N]"""
        operations = self._products[0].operations
        first, *others = (stream.contiguous() for stream in x.chunk(self._num_streams, dim=-1))
        pairs = zip(self._products, others, strict=True)
        sized = [first, *(operations.resize(by.rows(other), first, _LEAST) for by, other in pairs)]
        return operations.mean_of_streams(torch.cat(sized, dim=-1), self._num_streams)

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes."""
        first = stream_of(x, self._num_streams, 0)
        sized = program.scratch("sized streams", x.width, sampled=x.sampled)
        program.copy_columns(first, sized, width=first.width)
        for place, by in enumerate(self._products, start=1):
            own = by.record(program, stream_of(x, self._num_streams, place), into=f"product of stream {place}")
            program.resize(own, first, _LEAST, stream_of(sized, self._num_streams, place))
        return program.mean_of_streams(sized, self._num_streams, into=into)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [1, T, S * N] to [1, T, N]"""
        return self.rows(rows[0].contiguous())[None]
