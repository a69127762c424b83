"""Which kernels a GPU has: Triton's, or none where Triton is not there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.runner.backends.cpu.kernels.product import Activation
from baton.runner.backends.cuda.attention_choice import PagedAttention
from baton.runner.backends.cuda.product_tiles import Tile
from baton.runner.backends.head_rows import HeadRows
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.routing import SharedRows

_log = logging.getLogger(__name__)

Norm = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float, bool], tuple[torch.Tensor, torch.Tensor]]
"""Computes x + residual, if there is one, and its `Operations.rms_norm`, from x, residual, weight, eps and plus_one, in
one order of summation for every row."""
Multiply = Callable[
    [torch.Tensor, torch.Tensor, Tile, torch.Tensor | None, torch.dtype | None, Activation | None], torch.Tensor
]
"""Computes a product in tiles, as `triton_product.triton_product`."""
Gate = Callable[[torch.Tensor, Activation, torch.dtype], torch.Tensor]
"""Gates sums, as `triton_product.triton_gate`."""
Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Activation, Tile], torch.Tensor]
"""What the experts of rows give, as `triton_mixture.triton_mixture`."""


class SumExperts(Protocol):
    """Sums it, as `triton_mixture.triton_sum`."""

    def __call__(
        self,
        outs: torch.Tensor,
        places: torch.Tensor,
        weights: torch.Tensor,
        factor: float,
        shared: SharedRows | None,
        num_experts: int | None = None,
    ) -> torch.Tensor: ...


Prepare = Callable[[HeadRows, torch.Tensor, torch.Tensor, CacheView, torch.Tensor], None]
"""Norms, rotates and stores, as `triton_heads.triton_heads`."""
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]
Store = Callable[[torch.Tensor, torch.Tensor | None, CacheView, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Products:
    """Kernels of products, and of what follows a product of gate and up."""

    multiply: Multiply
    gate: Gate


@dataclass(frozen=True, slots=True)
class Mixtures:
    """Kernels of mixtures of experts."""

    mix: Mix
    sum_experts: SumExperts


@dataclass(frozen=True, slots=True)
class Heads:
    """Kernels between the product of queries, keys and values and their attention."""

    prepare: Prepare
    rotate: Rotate
    store: Store


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels that are tried; None: torch computes what they would."""

    attend: PagedAttention
    norm: Norm | None = None
    products: Products | None = None
    heads: Heads | None = None
    mixtures: Mixtures | None = None
    """Only beside products."""


def no_triton(_: object) -> torch.Tensor:
    """The attention of an installation without Triton. Raises ModuleNotFoundError."""
    raise ModuleNotFoundError("Triton is not installed")


def triton_kernels() -> Kernels:
    """Triton's kernels. Triton comes with torch's builds for GPUs, and is imported here alone."""
    try:
        from baton.runner.backends.cuda.triton_attention import triton_attention
        from baton.runner.backends.cuda.triton_heads import triton_heads, triton_rotate, triton_store
        from baton.runner.backends.cuda.triton_mixture import triton_mixture, triton_sum
        from baton.runner.backends.cuda.triton_norm import triton_norm
        from baton.runner.backends.cuda.triton_product import triton_gate, triton_product
    except ImportError as error:
        _log.warning("Triton can't be imported, so torch computes everything, and slowly: %s", error)
        return Kernels(no_triton)
    return Kernels(
        triton_attention,
        triton_norm,
        Products(triton_product, triton_gate),
        Heads(triton_heads, triton_rotate, triton_store),
        Mixtures(triton_mixture, triton_sum),
    )
