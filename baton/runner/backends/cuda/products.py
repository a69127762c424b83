"""Products on a GPU by kernels of our own, in tiles that were seen to give equal bits on this GPU.

A kind of product is tried when it is needed for the first time, which is in the checks at start: every tile computes
random rows, and those whose bits are not the first tile's are left out. So it decides about no bit which tiles a GPU
has, and each kernel is compiled before a request comes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cuda.kernels import Multiply
from baton.runner.backends.cuda.product_tiles import HOPPER, Tile, fastest_tile, tiles_of
from baton.runner.backends.cuda.trials import why_failed
from baton.runner.backends.torch_operations import activate

_log = logging.getLogger(__name__)

_SAMPLE_ROWS, _SAMPLE_COLUMNS = 150, 72
"""More rows than a tile has, and columns that fill no tile."""
_SAMPLE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class _Kind(NamedTuple):
    """What decides which variant of the kernel a product needs."""

    dtype: torch.dtype
    width: int
    has_bias: bool
    out_dtype: torch.dtype
    activation: Activation | None


class ProductsFail(Exception):
    """The kernels compute no product here, or a wrong one; the text says why."""


class TiledProducts:
    """Row-invariant products on one GPU. Called from one thread."""

    def __init__(self, device: torch.device, multiply: Multiply, tiles: Sequence[Tile] | None = None) -> None:
        """`tiles`: in place of those of the table, for Triton's interpreter."""
        self._device = device
        self._multiply = multiply
        self._given_tiles = tiles
        self._tiles: dict[_Kind, Sequence[Tile]] = {}

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """Compute `triton_product.triton_product`. Raises ProductsFail if a trial has found out that it can't."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        kind = _Kind(x.dtype, x.shape[1], bias is not None, out_dtype or x.dtype, activation)
        tile = fastest_tile(self._tried_tiles(kind), x.shape[0], weight.shape[0])
        return self._multiply(x, weight, tile, bias, out_dtype, activation)

    def tiles_for(self, dtype: torch.dtype, width: int, activation: Activation | None) -> Sequence[Tile]:
        """The tiles of products of such rows. Raises ProductsFail."""
        return self._tried_tiles(_Kind(dtype, width, False, dtype, activation))

    def _tried_tiles(self, kind: _Kind) -> Sequence[Tile]:
        """The tiles of a kind, which is tried first if that is new. Raises ProductsFail."""
        if kind not in self._tiles:
            self._tiles[kind] = self._try_out(kind)
        return self._tiles[kind]

    def _all_tiles(self, kind: _Kind) -> Sequence[Tile]:
        capability = HOPPER
        if self._device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self._device)
            capability = 10 * major + minor
        return tiles_of(wide=kind.dtype == torch.float32, gated=kind.activation is not None, capability=capability)

    def _try_out(self, kind: _Kind) -> Sequence[Tile]:
        """The tiles with the bits of the first one. Raises ProductsFail."""
        gated = kind.activation is not None
        first, *others = self._given_tiles or self._all_tiles(kind)
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self._device, kind.dtype)

        x, weight = random(_SAMPLE_ROWS, kind.width), random(_SAMPLE_COLUMNS * (2 if gated else 1), kind.width)
        bias = random(_SAMPLE_COLUMNS) if kind.has_bias else None

        def product(tile: Tile, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            own = bias if bias is None else bias[: columns.shape[0]]
            return self._multiply(rows, columns, tile, own, kind.out_dtype, kind.activation)

        try:
            expected = product(first, x, weight)
            alone = product(first, x[-1:], weight)
        except Exception as error:  # of Triton's compiler or of the driver: not on this device or this shape
            raise ProductsFail(why_failed(error)) from error
        if not torch.equal(expected[-1:], alone):
            raise ProductsFail("Triton's kernel gives a row other bits alone than in a batch")
        _require_near(expected, x, weight, bias, kind)
        kept = [first]
        for tile in others:
            try:
                if torch.equal(product(tile, x, weight), expected):
                    kept.append(tile)
                    continue
                reason = "other bits than smaller ones"
            except Exception as error:  # as above; a tile may need more shared memory than this GPU has
                reason = why_failed(error)
            _log.warning("products of %s are not computed in tiles of %s: %s", kind, tuple(tile), reason)
        return kept


def _require_near(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: _Kind
) -> None:
    """Raise ProductsFail unless a result is near the one of float64 on the host, as its largest numbers go."""
    exact = x.double().cpu() @ weight.double().cpu().T
    if bias is not None:
        exact += bias.double().cpu()
    if kind.activation is not None:
        gate, up = exact.chunk(2, dim=1)
        exact = activate(gate, kind.activation) * up
    error = (out.double().cpu() - exact).abs().amax() / exact.abs().amax()
    if not error <= _SAMPLE_TOLERANCE[kind.dtype]:
        raise ProductsFail("the result of Triton's kernel differs from that of float64")
