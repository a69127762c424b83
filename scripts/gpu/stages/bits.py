"""Whether bits depend on what they must not: the tiles of a product, the rows of a batch, the places of blocks.

Attention, norms, digests, products and the sampler are Baton's kernels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from baton.engine.runner import KVLayout, KVMemory
from baton.runner.backends.attention_call import AttentionCall, AttentionFeatures
from baton.runner.backends.cuda.device_sampler import DeviceSampler, why_not_right
from baton.runner.backends.cuda.product_tiles import TILES, Tile
from baton.runner.backends.cuda.triton_attention import triton_attention
from baton.runner.backends.cuda.triton_norm import triton_norm
from baton.runner.backends.cuda.triton_product import triton_product
from baton.runner.backends.paged_cache import CacheView
from baton.runner.blocks.device_digests import DeviceDigests
from baton.runner.blocks.digest_definition import digest_of, digested_rows
from baton.runner.blocks.sub_blocks import WHOLE, Division
from baton.runner.execution.sampler import SamplingState, sample
from gpu.micro.sampling import KINDS
from gpu.room import device_of
from gpu.stage import StageContext
from tests.support.triton_interpreter import SMALL_TILES, mend_interpreter

SECONDS = 60
NEEDS_KERNELS = False

SHAPES = (
    (2048, 2048),
    (3072, 2048),
    (16384, 2048),
    (2048, 8192),
    (128256, 2048),
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (2560, 8192),
    (14336, 8192),
    (8192, 7168),
)
"""Columns and width of products: a llama of 1.2 billion parameters, of 8, and a fourth of one of 70."""
ROWS = (1, 2, 3, 8, 15, 16, 17, 33, 64, 100, 128, 256, 511, 2048)
SMALL_SHAPES, SMALL_ROWS = ((48, 64), (40, 128)), (1, 2, 17, 40)
PARTS = range(1, 9)
SUM_ERROR, TERM_ERROR = 1e-6, 3e-9
"""The relative error of a product that is right: a part of its own, and one for each term of its sums.

A tensor core cuts off what its float32 accumulator has no room for, so the error has a direction and grows with the
width. Simulated for random numbers it is 4.4e-6 at a width of 4,096 and 1.6e-5 at 14,336.
"""
SHAPE_S = 8.0
"""Seconds that must be left to begin with another shape."""
CUBLAS_ROWS = 256
"""From so many rows on cuBLAS is a candidate for products."""


def run(context: StageContext) -> None:
    # Read when cuBLAS is used first: without a workspace no sum over k is split.
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
    if context.device == "cpu":
        from triton.runtime import interpreter

        mend_interpreter(interpreter)
    shapes = SMALL_SHAPES if context.tiny else SHAPES
    check_products(context, shapes[:1])
    for part in (check_digests, check_sampler, check_norms, check_attention):
        part(context)
    check_products(context, shapes[1:])  # what is left out if the kernels took long to compile


def check_products(context: StageContext, shapes: Sequence[tuple[int, int]]) -> None:
    """All tiles, numbers of rows and parts of the columns give a result's element the same bits."""
    rows, tiles = (SMALL_ROWS, SMALL_TILES) if context.tiny else (ROWS, TILES)
    for columns, width in shapes:
        if context.seconds_left < SHAPE_S:
            context.report("products left out", columns=columns, width=width, why="the stage's time was over")
            continue
        x = _random(context, 0, max(rows), width)
        weight = _random(context, 1, columns, width)
        expected = product(x, weight, tiles[0])
        shape = {"columns": columns, "width": width}
        for tile in tiles[1:]:
            context.check("product tiles", torch.equal(product(x, weight, tile), expected), **shape, tile=list(tile))
        wrong = [count for count in rows if not _rows_agree(x[:count], weight, expected[:count], tiles)]
        context.check("product rows", not wrong, **shape, wrong_rows=wrong)
        wrong = [
            parts for parts in PARTS if not _parts_agree(x[: rows[-2]], weight, expected[: rows[-2]], tiles, parts)
        ]
        context.check("product parts of columns", not wrong, **shape, wrong_parts=wrong)
        error = _error(expected[:8], x[:8].double() @ weight.double().T)
        context.check("product is right", error < SUM_ERROR + TERM_ERROR * width, **shape, error=error)
        if context.device == "cuda":
            _compare_cublas(context, x, weight, expected, shape)


def product(x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The float32 sums."""
    return triton_product(x, weight, tile, out_dtype=torch.float32)


def _rows_agree(x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor, tiles: Sequence[Tile]) -> bool:
    """Each number of rows takes the tile that would be chosen for it."""
    fitting = [tile for tile in tiles if tile.rows <= 2 * x.shape[0]] or [tiles[0]]
    return all(torch.equal(product(x, weight, tile), expected) for tile in (tiles[0], fitting[-1]))


def _parts_agree(
    x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor, tiles: Sequence[Tile], parts: int
) -> bool:
    results = [product(x, part, tiles[number % len(tiles)]) for number, part in enumerate(weight.tensor_split(parts))]
    return torch.equal(torch.cat(results, 1), expected)


def _compare_cublas(
    context: StageContext, x: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor, shape: dict[str, int]
) -> None:
    """Report whether cuBLAS, which may be used where it has the family's bits, has them here."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    for count in (row for row in ROWS if row >= CUBLAS_ROWS):
        result = torch.mm(x[:count], weight.T, out_dtype=torch.float32)
        differing = int((result != expected[:count]).sum())
        bits_equal = torch.equal(result, expected[:count])
        context.report("cuBLAS", **shape, rows=count, differing=differing, bits_equal=bits_equal)


class _Sequences(NamedTuple):
    """A step of decode rows on a paged cache whose blocks lie in a random order."""

    query: torch.Tensor
    cache: CacheView
    lengths: torch.Tensor
    tables: torch.Tensor

    def attend(self, some: Sequence[int]) -> torch.Tensor:
        """The attention of these sequences, one query each."""
        starts = torch.arange(len(some) + 1, dtype=torch.int32, device=self.query.device)
        chosen = torch.tensor(some, device=self.query.device)
        step = (starts, self.lengths[chosen], self.tables[chosen].contiguous())
        how = AttentionFeatures(self.query.shape[-1] ** -0.5)
        return triton_attention(AttentionCall(self.query[chosen], self.cache, *step, how))


def check_attention(context: StageContext) -> None:
    """A sequence's attention has the same bits alone, among others, and with the others in another order."""
    if context.tiny:
        kinds, lengths = [(4, 2, 16)], [1, 20, 37]
    else:
        kinds, lengths = [(32, 8, 64), (32, 8, 128), (16, 2, 128)], [1, 15, 512, 700, 4096, 8000, 333, 64]
    for heads, kv_heads, dim in kinds:
        sequences = _sequences(context, heads, kv_heads, dim, lengths)
        whole = sequences.attend(range(len(lengths)))
        shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim}
        alone = [index for index in range(len(lengths)) if not torch.equal(sequences.attend([index])[0], whole[index])]
        context.check("attention alone", not alone, **shape, wrong_lengths=[lengths[index] for index in alone])
        turned = sequences.attend(range(len(lengths) - 1, -1, -1)).flip(0)
        context.check("attention in another order", torch.equal(turned, whole), **shape)
        errors = [_error(whole[index], _attention(sequences, index)) for index in range(len(lengths))]
        context.check("attention is right", max(errors) < 1e-2, **shape, largest_error=max(errors))


def _sequences(context: StageContext, heads: int, kv_heads: int, dim: int, lengths: Sequence[int]) -> _Sequences:
    block_size = 16
    widest = -(-max(lengths) // block_size)
    count = len(lengths) * widest
    half = kv_heads * block_size * dim
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    memory = _random(context, 4, count, 2 * half, whole=False).view(-1)
    return _Sequences(
        _random(context, 5, len(lengths), heads * dim, whole=False).view(-1, heads, dim),
        CacheView(memory, count, 2 * half, 0, half, kv_heads, block_size, dim, dim),
        torch.tensor(lengths, dtype=torch.int32, device=context.device),
        order.view(len(lengths), widest).to(context.device),
    )


def _attention(sequences: _Sequences, index: int) -> torch.Tensor:
    """One sequence's attention in float64, [heads, dim]."""
    cache, query = sequences.cache, sequences.query[index].double()
    blocks = cache.memory.view(-1, 2, cache.num_kv_heads, cache.block_size, cache.key_dim)[sequences.tables[index]]
    keys, values = blocks.double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : int(sequences.lengths[index])]
    grouped = query.view(cache.num_kv_heads, -1, cache.key_dim)
    weights = torch.softmax(grouped @ keys.mT * cache.key_dim**-0.5, -1)
    attended: torch.Tensor = weights @ values
    return attended.flatten(0, 1)


def check_norms(context: StageContext) -> None:
    """A row's norm has the same bits among any number of rows."""
    for width in (64,) if context.tiny else (2048, 4096, 8192):
        x = _random(context, 6, SMALL_ROWS[-1] if context.tiny else 400, width, whole=False)
        weight = _random(context, 7, 1, width, whole=False)[0]
        whole = triton_norm(x, None, weight, 1e-6, False)[1]
        rows = (1, 2, 17) if context.tiny else (1, 2, 3, 8, 16, 17, 40)
        wrong = [n for n in rows if not torch.equal(triton_norm(x[:n], None, weight, 1e-6, False)[1], whole[:n])]
        context.check("norm rows", not wrong, width=width, wrong_rows=wrong)


def check_sampler(context: StageContext) -> None:
    """The sampler's kernels draw numpy's tokens, each row's alone and among others, and find what is not finite."""
    rows, tokens = (5, 2500) if context.tiny else (128, 128256)
    device = device_of(context)
    sampler = DeviceSampler(device, tokens)
    context.check("sampler is right", not (why_not := why_not_right(sampler, device, tokens)), why_not=why_not)
    kinds = list(KINDS.values())
    params = [replace(kinds[row % len(kinds)], seed=row, logprobs=None if row % 4 else 3) for row in range(rows)]
    states = [SamplingState(one, list(range(64)), 56, frozenset()) for one in params]
    logits = _random(context, 8, rows, tokens, whole=False).float() * 3.0
    logits[0, 1], logits[0, tokens - 1] = 100.0, 100.0  # of equal ones the lowest is chosen
    together = sampler.sample(logits, states)
    context.check("sampler, the lowest of equal logits", together[0].token_id == 1)
    few = range(min(rows, 16))
    wrong = [row for row in few if sampler.sample(logits[row : row + 1], states[row : row + 1])[0] != together[row]]
    context.check("sampler alone", not wrong, rows=rows, tokens=tokens, wrong_rows=wrong)
    some = range(rows) if context.tiny else range(0, rows, 4)
    expected = sample(logits[some[0] :: some.step].cpu().numpy(), [states[row] for row in some])
    wrong = [row for row, one in zip(some, expected, strict=True) if one.token_id != together[row].token_id]
    context.check("sampler draws numpy's tokens", not wrong, rows=len(some), wrong_rows=wrong)
    logits[1, 7] = float("nan")
    failed = [row for row, one in enumerate(sampler.sample(logits, states)) if one.error is not None]
    context.check("what is not finite is found", failed == [1], rows=failed)


def check_digests(context: StageContext) -> None:
    """Digests of blocks on the device are those of the host, of whole blocks and of their parts."""
    for heads, count in ((1, 3),) if context.tiny else ((1, 33), (8, 512)):
        layout = KVLayout.uniform(4, num_layers=3, num_kv_heads=heads, head_dim=64, dtype="bfloat16")
        size = layout.block_bytes
        numbers = torch.randint(0, 256, (count * size,), generator=torch.Generator().manual_seed(9))
        owner = numbers.to(torch.uint8).to(context.device)
        memory = KVMemory(owner.data_ptr(), count, size, "VRAM", owner.device.index or 0, owner, layout=layout)
        digests, host = DeviceDigests(memory, _no_copies), numbers.to(torch.uint8).numpy().tobytes()
        for division in (WHOLE, Division(2)):
            parts, rows, ids = division.parts, digested_rows(memory, division), range(count * division.parts)
            wanted = [digest_of(host[i // parts * size :][:size], rows, i % parts) for i in ids]
            context.check("digests", digests(ids, division) == wanted, block_bytes=size, parts=parts, pieces=len(ids))


def _no_copies(ids: Sequence[int], division: Division = WHOLE, /) -> Sequence[int]:
    raise AssertionError("the kernel takes blocks of this shape")


def _random(context: StageContext, seed: int, rows: int, width: int, whole: bool | None = None) -> torch.Tensor:
    """bfloat16 numbers; small whole ones in the interpreter, whose sums in float32 are exact in any order.

    Its products are numpy's, which adds in an order of its own for each shape.
    """
    generator = torch.Generator(context.device).manual_seed(seed)
    if whole is None:
        whole = context.device == "cpu"
    if whole:
        return torch.randint(-3, 4, (rows, width), generator=generator, device=context.device).bfloat16()
    return torch.randn(rows, width, generator=generator, device=context.device).bfloat16()


def _error(result: torch.Tensor, right: torch.Tensor) -> float:
    return float((result.double() - right).norm() / right.norm())
