"""Rows in several streams, of which a layer computes one: it predicts all of them, and corrects them by its result.

These are alternating updates (https://arxiv.org/abs/2301.13310), as Gemma 3n has them. Its layers hold S streams as
[S, 1, T, N]; Baton's parts take them side by side, [1, T, S * N].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from baton.runner.adapters.adaptable import AdaptableProduct, HasProducts
from baton.runner.model.fused.rows import FusedNorm


def side_by_side(streams: torch.Tensor) -> torch.Tensor:
    """Streams [S, 1, T, N] as rows [1, T, S * N]."""
    rows: torch.Tensor = streams.permute(1, 2, 0, 3).flatten(2)
    return rows


def apart(rows: torch.Tensor, num_streams: int) -> torch.Tensor:
    """Rows [1, T, S * N] as streams [S, 1, T, N]."""
    return rows[0].view(rows.shape[1], 1, num_streams, -1).permute(2, 1, 0, 3).contiguous()


class _Coefficients:
    """Numbers that follow from one stream's row: product(tanh(router(norm(row) * factor)))."""

    def __init__(self, norm: FusedNorm, factor: float, router: AdaptableProduct, product: AdaptableProduct) -> None:
        self._norm = norm
        self._factor = factor
        self._router = router
        self._product = product

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, N], contiguous, to as many numbers a row as the product gives."""
        routed = self._router.linear(self._norm.rows(x) * self._factor)
        return self._product.linear(torch.tanh(routed.float()).to(x.dtype))


class StreamPrediction(nn.Module):
    """Adds to each stream a sum of all of them, whose factors follow from the active stream."""

    def __init__(self, coefficients: _Coefficients, num_streams: int, active: int) -> None:
        super().__init__()
        self._coefficients = coefficients
        self._num_streams = num_streams
        self._active = active

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [1, T, S * N] to [1, T, S * N]"""
        streams = rows[0].view(rows.shape[1], self._num_streams, -1)
        factors = self._coefficients.of(streams[:, self._active].contiguous()).float()
        factors = factors.view(-1, self._num_streams, self._num_streams)
        # One after the other in float32: the order of torch's sums may depend on the number of rows.
        total = streams[:, None, 0].float() * factors[:, :, 0, None]
        for place in range(1, self._num_streams):
            total = total + streams[:, None, place].float() * factors[:, :, place, None]
        return (total.to(rows.dtype) + streams).flatten(1)[None]


class StreamCorrection(nn.Module):
    """Adds to each stream the difference of a layer's result and its prediction, by factors that follow from it."""

    def __init__(self, coefficients: _Coefficients, num_streams: int, active: int) -> None:
        super().__init__()
        self._coefficients = coefficients
        self._num_streams = num_streams
        self._active = active

    def forward(self, rows: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Predicted rows [1, T, S * N] and the layer's result [1, T, N] to [1, T, S * N]."""
        streams, own = rows[0].view(rows.shape[1], self._num_streams, -1), result[0].contiguous()
        factors = self._coefficients.of(own) + 1.0
        difference = own - streams[:, self._active]
        return (difference[:, None] * factors[:, :, None] + streams).flatten(1)[None]


class AlternatingUpdates(nn.Module, HasProducts):
    """In the place of a layer's part with the methods `predict`, `correct` and `scale_corrected_output`.

    Each calls a module, as Baton's loop does itself: the first two `prediction` and `correction`, the last one this.
    """

    def __init__(
        self, products: Sequence[AdaptableProduct], norm: FusedNorm, factor: float, scale: torch.Tensor, active: int
    ) -> None:
        """`products`: the router, and those for predictions and corrections. `factor`: of the norm's rows. `scale` [N]:
        of the corrected active stream. `active`: which stream the layer computes."""
        super().__init__()
        self._products = router, of_prediction, of_correction = tuple(products)
        self._num_streams = of_correction.num_inputs
        self._scale = scale.detach().clone()
        self.prediction = StreamPrediction(
            _Coefficients(norm, factor, router, of_prediction), self._num_streams, active
        )
        self.correction = StreamCorrection(
            _Coefficients(norm, factor, router, of_correction), self._num_streams, active
        )

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._scale
