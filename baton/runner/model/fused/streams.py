"""Rows in several streams, of which a layer computes one: it predicts all of them, and corrects them by its result.

These are alternating updates (https://arxiv.org/abs/2301.13310), as Gemma 3n has them. Its layers hold S streams as
[S, 1, T, N]; Baton's parts take them side by side, [1, T, S * N], and in Baton's loop [T, S * N].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts
from baton.runner.backends.cpu.kernels.buffers import Rows
from baton.runner.backends.cpu.kernels.programs.program import Program
from baton.runner.backends.operations import Operations
from baton.runner.model.fused.rows import FusedNorm


def side_by_side(streams: torch.Tensor) -> torch.Tensor:
    """Streams [S, 1, T, N] as rows [1, T, S * N]."""
    rows: torch.Tensor = streams.permute(1, 2, 0, 3).flatten(2)
    return rows


def apart(rows: torch.Tensor, num_streams: int) -> torch.Tensor:
    """Rows [1, T, S * N] as streams [S, 1, T, N]."""
    return rows[0].view(rows.shape[1], 1, num_streams, -1).permute(2, 1, 0, 3).contiguous()


def stream_of(rows: Rows, num_streams: int, place: int) -> Rows:
    """One of the streams that recorded rows have side by side."""
    width = rows.width // num_streams
    return rows.columns(place * width, (place + 1) * width)


class _Coefficients:
    """Numbers that follow from one stream's row: product(tanh(router(norm(row) * factor)))."""

    def __init__(
        self,
        operations: Operations,
        norm: FusedNorm,
        factor: float,
        router: AdaptableProduct,
        product: AdaptableProduct,
    ) -> None:
        self._operations = operations
        self._norm = norm
        self._factor = factor
        self._router = router
        self._product = product

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N], contiguous, to as many numbers a row as the product gives."""
        routed = self._router.linear(self._norm.rows(x) * self._factor)
        return self._product.linear(self._operations.activate(routed, "tanh"))

    def record(self, program: Program, x: Rows) -> Rows:
        """Append to a program what `of` computes."""
        normed = self._norm.record(program, x, into="normed stream")
        scaled = program.scale(normed, self._factor, into=normed)
        routed = self._router.record(program, scaled, None, into="routed stream")
        return self._product.record(program, program.activate(routed, "tanh", into="routes"), None, into="coefficients")


class StreamPrediction(nn.Module):
    """Adds to each stream a sum of all of them, whose factors follow from the active stream."""

    def __init__(self, operations: Operations, coefficients: _Coefficients, num_streams: int, active: int) -> None:
        super().__init__()
        self._operations = operations
        self._coefficients = coefficients
        self._num_streams = num_streams
        self._active = active

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, S * N] to [T, S * N]"""
        factors = self._coefficients.of(x.chunk(self._num_streams, dim=1)[self._active].contiguous())
        return self._operations.mix_streams(x, factors)

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes."""
        factors = self._coefficients.record(program, stream_of(x, self._num_streams, self._active))
        return program.mix_streams(x, factors, into=into)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [1, T, S * N] to [1, T, S * N]"""
        return self.rows(rows[0].contiguous())[None]


class StreamCorrection(nn.Module):
    """Adds to each stream the difference of a layer's result and its prediction, by factors that follow from it."""

    def __init__(self, operations: Operations, coefficients: _Coefficients, active: int) -> None:
        super().__init__()
        self._operations = operations
        self._coefficients = coefficients
        self._active = active

    def rows(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Predicted rows x [T, S * N] and the layer's result [T, N] to [T, S * N]."""
        return self._operations.correct_streams(x, result, self._coefficients.of(result), self._active)

    def record(self, program: Program, x: Rows, result: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes."""
        factors = self._coefficients.record(program, result)
        return program.correct_streams(x, result, factors, self._active, into=into)

    def forward(self, rows: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Predicted rows [1, T, S * N] and the layer's result [1, T, N] to [1, T, S * N]."""
        return self.rows(rows[0].contiguous(), result[0].contiguous())[None]


class AlternatingUpdates(nn.Module, HasProducts):
    """In the place of a layer's part with the methods `predict`, `correct` and `scale_corrected_output`.

    Each calls a module, as Baton's loop does itself: the first two `prediction` and `correction`, the last one this.
    """

    def __init__(
        self,
        operations: Operations,
        products: Sequence[AdaptableProduct],
        norm: FusedNorm,
        factor: float,
        scale: torch.Tensor,
        active: int,
    ) -> None:
        """`products`: the router, and those for predictions and corrections. `factor`: of the norm's rows. `scale` [N]:
        of the corrected active stream. `active`: which stream the layer computes."""
        super().__init__()
        self._products = router, of_prediction, of_correction = tuple(products)
        self._num_streams = of_correction.num_inputs
        self._scale = scale.detach().clone()
        predicting, correcting = (
            _Coefficients(operations, norm, factor, router, product) for product in (of_prediction, of_correction)
        )
        self.prediction = StreamPrediction(operations, predicting, self._num_streams, active)
        self.correction = StreamCorrection(operations, correcting, active)

    @property
    def products(self) -> Sequence[AdaptableProduct]:
        return self._products

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """[S, 1, T, N] to [S, 1, T, N]"""
        return apart(self.prediction(side_by_side(streams)), self._num_streams)

    def correct(self, streams: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Predicted streams [S, 1, T, N] and the layer's result [1, T, N] to [S, 1, T, N]."""
        return apart(self.correction(side_by_side(streams), result), self._num_streams)

    def scale_corrected_output(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, N] to [1, T, N]"""
        scaled: torch.Tensor = self(x)
        return scaled

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N] to [T, N]"""
        return x * self._scale

    def record(self, program: Program, x: Rows, *, into: str) -> Rows:
        """Append to a program what `rows` computes."""
        return program.multiply_columns(x, self._scale, into=into)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x)
