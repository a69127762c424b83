"""Mixtures of experts on a GPU: their weights side by side in memory, for kernels that compute all experts at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cuda.kernels import Mixtures
from baton.runner.backends.cuda.product_tiles import Tile, fastest_tile, of_experts
from baton.runner.backends.cuda.products import ProductsFail, TiledProducts
from baton.runner.backends.cuda.trials import why_failed
from baton.runner.backends.routing import SharedRows
from baton.runner.backends.torch_operations import TorchWeight

_log = logging.getLogger(__name__)

_SAMPLE_ROWS, _SAMPLE_EXPERTS = 40, 3


@dataclass(frozen=True, slots=True, eq=False)
class StackedExperts:
    """The weights of gated experts, side by side."""

    ups: torch.Tensor
    """Gates and ups [E, 2 N, K]."""
    downs: torch.Tensor
    """[E, K, N]"""
    activation: Activation
    tiles: Sequence[Tile]
    """The tiles that give the bits of each expert's products alone."""


class MixtureProducts:
    """Computes all experts of a mixture at once. Called from one thread."""

    def __init__(self, device: torch.device, products: TiledProducts, kernels: Mixtures) -> None:
        self._device = device
        self._products = products
        self._kernels = kernels
        self.sum_experts = kernels.sum_experts
        self._tiles: dict[tuple[torch.dtype, int, int, Activation], Sequence[Tile]] = {}

    def pack(
        self, ups: Sequence[TorchWeight], downs: Sequence[TorchWeight], activation: Activation
    ) -> StackedExperts | None:
        """Move weights of one shape each side by side; None, and nothing is moved, if the kernels are of no use."""
        first = ups[0].matrix
        kind = (first.dtype, first.shape[1], downs[0].matrix.shape[1], activation)
        if kind not in self._tiles:
            self._tiles[kind] = self._try_out(*kind)
        if not self._tiles[kind]:
            return None
        return StackedExperts(_stacked(ups), _stacked(downs), activation, self._tiles[kind])

    def mix(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        experts: StackedExperts,
        factor: float,
        shared: SharedRows | None,
    ) -> torch.Tensor:
        """Compute `Operations.mix_experts`."""
        (count, most), num_experts = chosen.shape, experts.ups.shape[0]
        rows = max(1, count * most // num_experts)
        tile = fastest_tile(experts.tiles, rows, experts.ups.shape[1] * min(num_experts, max(1, count * most)))
        outs = self._kernels.mix(x, chosen, experts.ups, experts.downs, experts.activation, tile)
        return self.sum_experts(outs, chosen, weights, factor, shared, num_experts)

    def _try_out(self, dtype: torch.dtype, width: int, inner: int, activation: Activation) -> Sequence[Tile]:
        """The tiles with the bits of each expert's products alone; none if the kernels don't run."""
        generator = torch.Generator(self._device).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self._device, dtype=dtype)

        x = random(_SAMPLE_ROWS, width)
        ups = random(_SAMPLE_EXPERTS, 2 * inner, width)
        downs = random(_SAMPLE_EXPERTS, width, inner)
        first = torch.arange(_SAMPLE_ROWS) ** 2 % _SAMPLE_EXPERTS
        chosen = torch.stack([first, (first + 1) % _SAMPLE_EXPERTS], dim=1).to(self._device, torch.int32)
        kept: list[Tile] = []
        try:
            tiles = of_experts(self._products.tiles_for(dtype, width, activation))
            expected = x.new_zeros(_SAMPLE_ROWS, 2, width)
            for expert in range(_SAMPLE_EXPERTS):
                own = self._products(self._products(x, ups[expert], activation=activation), downs[expert])
                expected = torch.where((chosen == expert)[..., None], own[:, None], expected)
            expected = expected.view(-1, width)
        except ProductsFail:
            return ()
        for tile in tiles:
            try:
                if torch.equal(self._kernels.mix(x, chosen, ups, downs, activation, tile), expected):
                    kept.append(tile)
                    continue
                reason = "other bits than those of each expert's products alone"
            except Exception as error:  # of Triton's compiler or of the driver
                reason = why_failed(error)
            _log.warning("experts are not computed at once in tiles of %s: %s", tuple(tile), reason)
        return kept


def _stacked(weights: Sequence[TorchWeight]) -> torch.Tensor:
    """The weights side by side, [E, N, K], to where they are moved."""
    first = weights[0].matrix
    stack = first.new_empty(len(weights), *first.shape)
    for place, weight in zip(stack, weights, strict=True):
        place.copy_(weight.matrix)
        weight.matrix = place  # what it was is freed, so that there are never two of all
    return stack
