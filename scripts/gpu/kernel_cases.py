"""Every kind of GPU kernel as it is started by the functions that start it on a GPU, with empty tensors of real shapes.

Only for compiling: nothing is computed. See compile_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from baton.runner.backends.cuda.product_tiles import AMPERE, HOPPER, WIDE_TILES, of_experts, tiles_of
from baton.runner.backends.cuda.triton_digest import xxh3_constants, xxh3_of_layers
from baton.runner.backends.cuda.triton_heads import triton_heads, triton_rotate, triton_store
from baton.runner.backends.cuda.triton_mixture import triton_mixture, triton_sum
from baton.runner.backends.cuda.triton_norm import triton_norm
from baton.runner.backends.cuda.triton_product import triton_gate, triton_product
from baton.runner.backends.head_rows import HeadNorm, HeadRows
from baton.runner.backends.paged_cache import CacheView
from baton.runner.backends.routing import SharedRows
from gpu.attention_cases import attention_cases
from gpu.sampler_cases import sampler_cases


class Case(NamedTuple):
    """One or several kernels that are started together."""

    name: str
    launch: Callable[[], object]
    instruction: str | None = None
    """The matrix instruction that they are to use on Hopper, if that matters."""
    least_capability: int = AMPERE


_BLOCK_SIZE, _BLOCKS = 16, 128


def kernel_cases() -> Iterator[Case]:
    yield from _products()
    yield from _mixtures()
    for name, launch in (*attention_cases(), *sampler_cases()):
        yield Case(name, launch)
    for dim in (64, 128):
        yield from _heads(dim)
    for width in (2048, 4096):
        row = _rows(8, width)
        yield Case(f"norm of {width}", partial(triton_norm, row, None, row[0], 1e-6, False))
        yield Case(f"norm of {width} and sum", partial(triton_norm, row, row, row[0], 1e-6, False))
    memory, numbers = torch.zeros(64, dtype=torch.uint64), torch.zeros(8, dtype=torch.int64)
    constants = xxh3_constants(torch.device("cpu"))
    yield Case("digests", partial(xxh3_of_layers, memory, 64, numbers, numbers, numbers, numbers, constants))


def _rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _products() -> Iterator[Case]:
    x, weight = _rows(64, 2048), _rows(512, 2048)
    for tile in tiles_of(wide=False, gated=False):
        instruction = "HMMA" if tile.rows == 16 else "HGMMA"
        name = f"product in tiles of {tile.rows} x {tile.columns}"
        yield Case(name, partial(triton_product, x, weight, tile), instruction)
        if tile in tiles_of(wide=False, gated=True):
            least = AMPERE if tile in tiles_of(wide=False, gated=True, capability=AMPERE) else HOPPER
            launch = partial(triton_product, x, weight, tile, activation="silu")
            yield Case(f"gated {name}", launch, instruction, least)
    tile = tiles_of(wide=False, gated=False)[0]
    yield Case("product with a bias", partial(triton_product, x, weight, tile, weight[:, 0].contiguous()), "HMMA")
    yield Case("product in float32", partial(triton_product, x, weight, tile, None, torch.float32), "HMMA")
    yield Case("product of an odd width", partial(triton_product, x[:, :100], weight[:, :100], tile), "HMMA")
    wide, wide_weight = _rows(64, 2048, dtype=torch.float32), _rows(512, 2048, dtype=torch.float32)
    for tile in WIDE_TILES:
        name = f"product of float32 in tiles of {tile.rows} x {tile.columns}"
        yield Case(name, partial(triton_product, wide, wide_weight, tile))
        yield Case(f"gated {name}", partial(triton_product, wide, wide_weight, tile, activation="silu"))
    yield Case("gate of sums", partial(triton_gate, wide, "silu", torch.bfloat16))


def _mixtures() -> Iterator[Case]:
    experts, inner, width, count, most = 8, 768, 2048, 64, 8
    x, chosen = _rows(count, width), torch.zeros(count, most, dtype=torch.int32)
    ups, downs = _rows(experts, 2 * inner, width), _rows(experts, width, inner)
    for tile in of_experts(tiles_of(wide=False, gated=True)):
        launch = partial(triton_mixture, x, chosen, ups, downs, "silu", tile)
        yield Case(f"experts in tiles of {tile.rows} x {tile.columns}", launch)
    shares, outs = _rows(count, most, dtype=torch.float32), _rows(count * most, width)
    shared = SharedRows(x, x[:, :1].contiguous())
    yield Case("sums of experts", partial(triton_sum, outs, chosen, shares, 2.5, shared, experts))


def _cache(dim: int, num_kv_heads: int) -> CacheView:
    half = num_kv_heads * _BLOCK_SIZE * dim
    return CacheView(_rows(_BLOCKS * 2 * half), _BLOCKS, 2 * half, 0, half, num_kv_heads, _BLOCK_SIZE, dim, dim)


def _heads(dim: int) -> Iterator[Case]:
    heads, kv_heads, count = 32, 8, 8
    qkv, angles, slots = _rows(count, (heads + 2 * kv_heads) * dim), _rows(count, dim), torch.zeros(count).long()
    both = qkv[:, : (heads + kv_heads) * dim].view(count, -1, dim)
    value, cache = qkv[:, (heads + kv_heads) * dim :].view(count, -1, dim), _cache(dim, kv_heads)
    norms = (HeadNorm(angles[0], 1e-6, False),) * 2
    for name, own in (("heads", None), ("normed heads", norms)):
        rows = HeadRows(both, value, heads, own, False)
        yield Case(f"{name} of {dim}", partial(triton_heads, rows, angles, angles, cache, slots))
    yield Case(f"rotation of heads of {dim}", partial(triton_rotate, both, angles, angles, False))
    yield Case(f"storing heads of {dim}", partial(triton_store, value, value, cache, slots))
